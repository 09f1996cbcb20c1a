"""The rules of jobs on objects: ``memory://`` and ``django://`` run this code.

Dicts and one order of calls, no cleverness. ``memory://`` keeps the objects in memory.
``django://`` reads them from rows of a table, and writes the changed rows at the end of a
transaction. The other brokers do the same in files of the same names, so that
you can read them side by side.

Read ``transitions`` for the states of a job, and then one file for each act: ``put``, ``claim``,
``settle``, ``due``.
"""
