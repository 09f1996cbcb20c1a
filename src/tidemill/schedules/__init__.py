"""Schedules: rules by which jobs are put repeatedly.

    rules     the times of a rule: cron, intervals, calendar periods, once; pure arithmetic
    parse     user input, checked and turned into a rule
    record    the bytes of a stored schedule, and its changes when it fires
    declare   ``mill.schedules``: schedules in code and at run time

The broker makes each schedule fire exactly once: :mod:`tidemill.brokers.contract.schedules`.
"""
