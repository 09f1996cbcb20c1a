"""Private parts of dependencies: the installed releases have them, and none is indispensable."""

from __future__ import annotations

import asyncio
import contextvars
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rabbitmq_desk import LiveOwner, ids_of, job, open_rabbit
from servers import rabbitmq_url

from tidemill.brokers.lmdb.engine import environment
from tidemill.brokers.rabbitmq.amqp import channel, connection, connection_thread, short_connection
from tidemill.brokers.redis.failover import socket_of
from tidemill.brokers.registry import open_broker
from tidemill.client.context import running_job
from tidemill.core.clock import new_id
from tidemill.core.envelope import Envelope
from tidemill.core.job import Outcome
from tidemill.errors import BrokerUnavailable
from tidemill.worker import event_loop

# -- py-lmdb: environments that are open twice ---------------------------------------------------


def in_a_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a fork; its exit code."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        except BrokerUnavailable as error:
            code = 3 if "open the store after the fork" in str(error) else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(("has_guard", "code"), [(True, 0), (False, 3)])
def test_a_forked_child_opens_the_store_of_its_parent_or_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_guard: bool, code: int
) -> None:
    # case M13
    assert callable(environment._envid.env_keys)
    if not has_guard:
        monkeypatch.setattr(environment, "_envid", None)
    broker = open_broker(f"lmdb://{tmp_path}/store")
    broker.put([Envelope(id="parent", task="t")])
    assert in_a_child(lambda: broker.put([Envelope(id="child", task="t")])) == code
    assert (broker.get("child") is not None) == has_guard
    broker.close()


# -- redis-py: the socket of a connection --------------------------------------------------------


def test_the_socket_of_a_connection_is_found_under_any_name() -> None:
    # case M13
    with socket.socket() as sock:
        assert socket_of(SimpleNamespace(host="h", _plug=sock)) is sock  # type: ignore[arg-type]
    with pytest.raises(OSError, match="closed"):
        socket_of(SimpleNamespace(host="h", _sock=None))  # type: ignore[arg-type]


# -- pika: frames that pika does not see ---------------------------------------------------------


@pytest.mark.everyday
@pytest.mark.parametrize("has_parts", [True, False])
def test_rabbitmq_works_with_and_without_the_private_parts_of_pika(
    monkeypatch: pytest.MonkeyPatch, has_parts: bool
) -> None:
    # case M13
    quick: list[bool] = []
    if not has_parts:
        for module in (connection, channel, connection_thread, short_connection):
            monkeypatch.setattr(module, "part", lambda *_: None)
    opened = channel.ConsumerChannel.opened

    def note(self: Any, new: Any) -> None:
        quick.append(new.is_quick)
        opened(self, new)

    monkeypatch.setattr(channel.ConsumerChannel, "opened", note)
    broker = open_rabbit(rabbitmq_url().partition("?")[0], f"p{new_id()[-12:]}")
    # when jobs are put, taken, given back and settled; one of them comes in many frames
    jobs = [job(id=f"j{n}", body=b"x" * (300_000 if n == 7 else 10)) for n in range(40)]
    broker.put(jobs)
    worker, done = LiveOwner(broker), set[str]()
    for lease in worker.await_all(20)[:5]:
        worker.settle(lease, Outcome.RELEASE)
    for _ in range(2):
        for lease in worker.await_all(10):
            done.add(lease.open().id)
            worker.settle(lease)
    broker.detach(worker.id)
    # then another worker gets all that are left
    other = LiveOwner(broker)
    for lease in other.await_all(20):
        done.add(lease.open().id)
        other.settle(lease)
    assert done == set(ids_of(jobs))
    assert sum(row.ready for row in broker.stats()) == 0
    broker.close()
    assert set(quick) == {has_parts}


# -- Python: the context of a handle, and the text of an exception -------------------------------


@pytest.mark.parametrize("is_hidden", [False, True])
def test_the_job_of_a_callback_is_found_if_python_tells_its_context(is_hidden: bool) -> None:
    # case M13
    mine: Any = object()
    context = contextvars.copy_context()
    context.run(running_job.set, mine)

    class Handle(asyncio.Handle):
        def __getattribute__(self, name: str) -> Any:
            if is_hidden and name in ("get_context", "_context"):
                raise AttributeError(name)
            return super().__getattribute__(name)

    def fail(self: object) -> None:
        raise ValueError("wrong")

    loop = asyncio.new_event_loop()
    try:
        fail(Handle(print, (), loop, context))
    except ValueError as error:
        found = event_loop._job_of(error)
    finally:
        loop.close()
    assert found is (None if is_hidden else mine)


def test_signals_are_deferred_if_python_hides_its_module_of_signals() -> None:
    # case M13
    code = """if True:
        import os, signal, sys
        sys.modules["_signal"] = None
        from tidemill.core.signals import SignalsDeferred
        came = []
        signal.signal(signal.SIGTERM, lambda *_: came.append(1))
        with SignalsDeferred():
            os.kill(os.getpid(), signal.SIGTERM)
            assert not came
        assert came
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
