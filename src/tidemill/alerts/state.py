"""The active alerts, kept as notes of the store, so that a restart does not repeat them.

The note of an alert is written before the first message of the alert is
sent, with ``told`` empty. So if the process dies while it sends the message, the next process sends
the message again. The note stays until the message about the end of the alert was sent.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tidemill.alerts.measure import Value
from tidemill.alerts.send import Message
from tidemill.app import Tidemill
from tidemill.brokers.generic.notes import Notes


class Alert(msgspec.Struct, kw_only=True):
    """An active alert, or an alert that is over but whose last message was not sent yet."""

    rule: str
    when: str
    queue: str
    value: float
    above: float
    text: str
    began: float  # epoch seconds
    ended: float = 0.0  # epoch seconds; 0 while the alert is active
    told: str = ""  # the last event that was sent: ``begin`` or ``reminder``; or empty
    told_at: float = 0.0  # epoch seconds at which that event was sent

    @property
    def key(self) -> str:
        return f"{self.rule}\x1f{self.queue}"

    def measured(self, value: Value) -> None:
        self.value, self.text, self.above = value.value, value.text, value.rule.most

    def message(self, event: str, at: float, store: str, host: str) -> Message:
        text = f"{'over: ' if event == 'end' else ''}{self.rule}: {self.text}"
        names = ("rule", "when", "queue", "value", "above", "began")
        own = {name: getattr(self, name) for name in names}
        return Message(event=event, text=text, at=at, store=store, host=host, **own)


def begun(value: Value, now: float) -> Alert:
    rule = value.rule
    measured: dict[str, Any] = {"value": value.value, "above": rule.most, "text": value.text}
    return Alert(rule=rule.name, when=rule.when, queue=value.queue, began=now, **measured)


def alerts(mill: Tidemill) -> dict[str, Alert]:
    found = [msgspec.json.decode(note.body, type=Alert) for note in _kept(mill).list()]
    return {alert.key: alert for alert in found}


def keep(mill: Tidemill, alert: Alert) -> None:
    _kept(mill).put(alert.key, msgspec.json.encode(alert))


def forget(mill: Tidemill, alert: Alert) -> None:
    if note := _kept(mill).get(alert.key):
        _kept(mill).delete(note)


def _kept(mill: Tidemill) -> Notes:
    return Notes(mill.broker, "alert", "an alert")
