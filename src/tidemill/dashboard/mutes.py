"""Muted failures, kept as notes of the store.

A failure stays muted until it changes: a further release has the failure, or it comes three times
as often.
"""

from __future__ import annotations

import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.generic.notes import Notes
from tidemill.client.history import FailureNumbers
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
    found = [msgspec.json.decode(note.body, type=Mute) for note in _kept(mill).list()]
    return {(one.fingerprint, one.task): one for one in found}


def mute(mill: Tidemill, failure: FailureNumbers, rate: float, who: str) -> None:
    """Mute a failure until it changes."""
    note = Mute(failure.fingerprint, failure.task, failure.releases, rate, who, clock.wall())
    _kept(mill).put(_name(failure.fingerprint, failure.task), msgspec.json.encode(note))


def unmute(mill: Tidemill, fingerprint: str, task: str) -> None:
    """Show a failure again."""
    if note := _kept(mill).get(_name(fingerprint, task)):
        _kept(mill).delete(note)


def _kept(mill: Tidemill) -> Notes:
    return Notes(mill.broker, "mute", "mute")


def _name(fingerprint: str, task: str) -> str:
    return f"{fingerprint} {task}"


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
