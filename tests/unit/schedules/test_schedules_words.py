"""Cron rules in words."""

from __future__ import annotations

import pytest

from tidemill.schedules.words import cron_in_words


@pytest.mark.parametrize(
    ("cron", "words"),
    [
        ("0 3 * * *", "every day at 03:00"),
        ("0 3 * * 1-5", "at 03:00, Monday to Friday"),
        ("30 9 * * MON,WED", "at 09:30, on Monday and Wednesday"),
        ("0 0 1 * *", "at 00:00, on the 1st"),
        ("0 0 1 1 *", "at 00:00, on the 1st, in January"),
        ("0 0 L * *", "at 00:00, on the last day of the month"),
        ("0,30 8,20 * * *", "every day at 08:00, 08:30, 20:00 and 20:30"),
        ("*/5 * * * *", "every 5 minutes"),
        ("*/1 * * * *", "every minute"),
        ("* * * * *", "every minute"),
        ("10 * * * *", "at minute 10"),
        ("*/15 9-17 * * 1-5", "every 15 minutes, every hour from hour 9 to 17, Monday to Friday"),
        ("0 12 15 JAN-MAR *", "at 12:00, on the 15th, in January to March"),
        ("0 12 1 * 0", "at 12:00, on the 1st or on Sunday"),
        ("*/10 * * * * *", "every 10 seconds"),
        ("0 0 */2 * *", "at 00:00, every 2 days of the month"),
        ("0 0 * * 5#3", "at 00:00, on 5#3"),
        ("nonsense", "nonsense"),
    ],
)
def test_a_cron_rule_in_words(cron: str, words: str) -> None:
    assert cron_in_words(cron) == words
