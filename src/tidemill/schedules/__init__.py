"""Schedules: when a job is to be put again and again, and who puts it.

    rules     when: cron, intervals, calendar steps, once; pure arithmetic of time
    reading   what a user says, checked, made a rule
    stored    what a record's bytes say, and how it goes on when it fires
    book      ``mill.schedules``: what people do with them

That one fires exactly once is the broker's part: :mod:`tidemill.brokers.schedules`.
"""
