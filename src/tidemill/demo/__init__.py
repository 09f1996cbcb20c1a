"""The demo: one job per file of a folder, on embedded LMDB. Read ``tasks.py`` first.

``tasks.py`` is the app, as a user would write it. ``run.py`` puts the jobs, runs a worker and
waits; ``display.py`` shows how far it is; ``ledger.py`` keeps account of every execution;
``report.py`` adds up the results; ``worker.py`` is the process that does the work.
"""
