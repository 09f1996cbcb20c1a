"""The outbox of a worker process."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tidemill.core.envelope import Envelope, encode_envelope
from tidemill.core.job import Lease, Outcome, Verdict
from tidemill.worker.child_protocol import Up
from tidemill.worker.counting import Counting
from tidemill.worker.outbox import Outbox
from tidemill.worker.slots import Slots


class Wire:
    """Keeps the frames that are sent."""

    def __init__(self) -> None:
        self.frames: list[Up] = []

    def send(self, up: Up) -> None:
        self.frames.append(up)


def test_verdicts_are_sent_although_their_numbers_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # given an outbox whose sums need more memory than there is
    wire = Wire()
    outbox = Outbox(cast("Any", wire), Slots(1, 1, 0, pytest.fail), pytest.fail, Counting())
    envelope = Envelope(id="1", task="t")
    lease = Lease(7, 1, 0, 0, 1, 0, 0, 0, encode_envelope(envelope))

    def lacks_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Counting, "_count_failure", lacks_memory)
    # when a job fails
    outbox.conclude(Verdict(7, Outcome.FAIL, error="E: x"), lease, envelope)
    outbox.flush(wait=True)
    # then its verdict is sent, without rows of history
    (frame,) = wire.frames
    assert [verdict.token for verdict in frame.verdicts] == [7]
    assert not frame.history
    assert "the history lacks numbers of 1 ended jobs" in caplog.text
