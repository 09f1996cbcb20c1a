"""The demo: one job per file of a folder, on embedded LMDB. Read ``tasks.py`` first.

``tasks.py`` is the app, as a user would write it. ``worker.py`` is its worker. ``run.py`` finds the
files, enqueues the jobs, shows the progress and adds up the results.
"""
