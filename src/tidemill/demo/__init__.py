"""The demo: one job per file of a folder, on embedded LMDB. Read ``tasks.py`` first.

``tasks.py`` is the app, as a user would write it. ``run.py`` enqueues the jobs, runs a
worker and waits for the jobs. ``worker.py`` is the worker. ``display.py`` shows the progress, and
``ledger.py`` records every execution. ``report.py`` adds up the results.
"""
