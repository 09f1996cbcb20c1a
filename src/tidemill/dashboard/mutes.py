"""Muted failures: rows of kind ``mute`` in the store's history, called notes.

A failure stays muted until it changes: a further release has the failure, or it comes three times
as often.
"""

from __future__ import annotations

import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.contract.history import with_history
from tidemill.brokers.contract.history_rows import ALWAYS, HistoryRow, join_name
from tidemill.client.history_numbers import FailureNumbers
from tidemill.core.clock import clock

_OFTENER = 3.0
_LEAST_RATE = 10.0  # failures an hour; a lower rate never counts as a change


class Mute(msgspec.Struct, frozen=True):
    """A muted failure, with its numbers when it was muted. ``rate`` is in failures an hour."""

    fingerprint: str
    task: str
    releases: tuple[str, ...]
    rate: float
    who: str
    at: float


def mutes(mill: Tidemill) -> dict[tuple[str, str], Mute]:
    """All muted failures, by fingerprint and task."""
    rows = with_history(mill.broker, "mute").history("mute", ALWAYS)
    found = [msgspec.json.decode(row.sample, type=Mute) for row in rows if row.sample]
    return {(one.fingerprint, one.task): one for one in found}


def mute(mill: Tidemill, failure: FailureNumbers, rate: float, who: str) -> None:
    """Mute a failure until it changes."""
    unmute(mill, failure.fingerprint, failure.task)
    now = clock.wall()
    note = Mute(failure.fingerprint, failure.task, failure.releases, rate, who, now)
    name = join_name(failure.fingerprint, failure.task)
    row = HistoryRow("mute", name, ALWAYS, int(now), (), msgspec.json.encode(note))
    with_history(mill.broker, "mute").keep_history([row])


def unmute(mill: Tidemill, fingerprint: str, task: str) -> None:
    """Show a failure again."""
    history = with_history(mill.broker, "mute")
    rows = history.history("mute", ALWAYS, name=join_name(fingerprint, task))
    history.keep_history([msgspec.structs.replace(row, sample=b"") for row in rows])


def change_of(one: Mute, failure: FailureNumbers, rate: float) -> str:
    """How a muted failure has changed; empty while it has not."""
    new = [release for release in failure.releases if release not in one.releases]
    if new:
        return (
            f"it is new in {', '.join(release or 'workers without a release' for release in new)}"
        )
    if rate > max(_LEAST_RATE, _OFTENER * one.rate):
        return f"it came {one.rate:.0f} times an hour when it was muted, and now {rate:.0f}"
    return ""
