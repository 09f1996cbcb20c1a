"""Wrong calls of ``mill.limits.hold``, and the block while its lease is renewed."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from harness import eventually
from moved_clock import MovedClock

from tidemill import InvalidOption, Limit, Tidemill
from tidemill.client.limits import LEASE, LeaseRenewal
from tidemill.client.messages import Message
from tidemill.errors import FeatureMissing, LimitTimeout

DB = Limit(name="db", concurrency=1)


@pytest.fixture
def mill() -> Iterator[Tidemill]:
    with Tidemill("memory://") as mill:

        @mill.task(name="query", limit=DB)
        def query() -> None: ...

        @mill.task(name="tenant", limit=Limit(concurrency=1, key=lambda user: user))
        def tenant(user: str) -> None: ...

        yield mill


@pytest.mark.parametrize(
    ("limit", "options", "sentence"),
    [
        ("bd", {}, r"no task of this app declares a limit 'bd'; declare it with @mill\.task"),
        (Limit(concurrency=1), {}, r"needs a name; give Limit\(name=…\)"),
        (Limit(name="db", concurrency=2), {}, "'db' has other settings in task 'query'"),
        ("db", {"key": "ada"}, "'db' has no keys; leave key= out"),
        ("tenant", {}, "'tenant' has keys; say which one with key="),
        ("tenant", {"key": ""}, "key of a limit must not be empty"),
        ("tenant", {"key": 7}, "key of a limit must be a string, not int"),
        (7, {}, "name of a limit must be a string, not int"),
        ("db", {"timeout": -1}, "timeout must be 0 or more seconds"),
    ],
)
def test_a_hold_that_cannot_be_is_refused_by_one_sentence(
    mill: Tidemill, limit: Any, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidOption, match=sentence):
        mill.limits.hold(limit, **options)


def test_a_broker_without_limits_refuses_a_hold() -> None:
    with pytest.raises(FeatureMissing, match=r"limits\.hold\(\) needs the feature limits"):
        Tidemill("amqp://localhost").limits.hold(DB)


def test_a_limit_without_a_name_has_the_name_of_its_task(mill: Tidemill) -> None:
    with mill.limits.hold("tenant", key="ada", timeout=5):
        assert [row.name for row in mill.limits.list()] == ["tenant"]


def test_inline_mode_holds_nothing() -> None:
    mill = Tidemill(sync=True)
    with mill.limits.hold(DB), mill.limits.hold(DB, timeout=0):
        pass
    with pytest.raises(InvalidOption, match="no task of this app declares"):
        mill.limits.hold("db")


@pytest.mark.parametrize("serializer", ["msgpack", "pickle"])
def test_an_app_with_keys_signs_its_holds(serializer: str) -> None:
    with (
        Tidemill("memory://", secret_keys=["key"], serializer=serializer) as mill,
        mill.limits.hold(DB, timeout=5),
        pytest.raises(LimitTimeout),
        mill.limits.hold(DB, timeout=0),
    ):
        pass


def test_a_hold_outlives_its_lease_while_the_process_runs(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch, moved_clock: MovedClock
) -> None:
    # given a lease that is renewed, and the clock of the store
    touches: list[bool] = []
    touch = Message.touch

    def counted(message: Message) -> bool:
        touches.append(touch(message))
        return touches[-1]

    monkeypatch.setattr(Message, "touch", counted)
    mill.limits._renewal = LeaseRenewal(every=0.01)
    with mill.limits.hold("db", timeout=5):
        # when the time of three leases has passed
        for _ in range(9):
            moved_clock.advance(LEASE / 3)
            seen = len(touches)
            eventually(functools.partial(_are_more, touches, seen), "a renewal")
        # then the place is still held
        assert all(touches)
        with pytest.raises(LimitTimeout), mill.limits.hold("db", timeout=0):
            pass


def _are_more(touches: list[bool], seen: int) -> bool:
    return len(touches) > seen


def test_a_lost_lease_is_logged_and_renewed_no_more(
    mill: Tidemill, caplog: pytest.LogCaptureFixture
) -> None:
    queue, renewal = mill.queue("q"), LeaseRenewal(every=0.01)
    queue.put("a")
    message = queue.get(timeout=5)
    renewal.add(message)
    mill.broker.delete([message.id])
    eventually(lambda: "was lost: its process did not run for 60 s" in caplog.text, "the log line")
    assert not renewal.remove(message)


def test_a_forked_child_does_not_free_the_place(url: str) -> None:
    with Tidemill(url) as mill:
        hold = mill.limits.hold(DB, timeout=5)
        with hold:
            child = os.fork()
            if not child:
                signal.alarm(30)  # ends the child if it waits for a lock of its parent
                hold.release()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            with pytest.raises(LimitTimeout), mill.limits.hold(DB, timeout=0):
                pass
