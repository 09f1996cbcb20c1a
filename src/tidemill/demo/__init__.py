"""The demo: one job per file of a folder, on embedded LMDB. Read ``tasks.py`` first.

``tasks.py`` is the app, as a user would write it. ``command.py`` finds the files, enqueues the
jobs, runs ``tidemill worker``, shows the progress and adds up the results.
"""
