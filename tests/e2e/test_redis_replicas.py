"""``replicas=1``: a put returns when a replica has the job, or says that none had it in time."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
from harness import SLACK, eventually, opened
from servers import Proxy, Redis

from tidemill.brokers.registry import open_broker
from tidemill.core.envelope import Envelope
from tidemill.errors import DuplicateJob, InvalidOption, NotReplicated


def pair(stack: contextlib.ExitStack) -> tuple[Redis, Redis, Proxy]:
    """A master, its replica, and the line between them."""
    master = stack.enter_context(contextlib.closing(Redis()))
    proxy = stack.enter_context(contextlib.closing(Proxy(master.port)))
    replica = Redis("--replicaof", "127.0.0.1", str(proxy.port))
    stack.callback(replica.close)
    follows = "master_link_status:up"
    eventually(lambda: follows in replica.run("INFO", "replication"), "the replica follows")
    return master, replica, proxy


def jobs(*ids: str) -> list[Envelope]:
    return [Envelope(id=name, task="t") for name in ids]


def put(broker: Any, job_id: str) -> bool:
    """Whether a put ends; False while too few replicas have the job in time."""
    with contextlib.suppress(NotReplicated):
        broker.put(jobs(job_id))
        return True
    return False


def test_a_put_returns_when_a_replica_has_the_job(stack: contextlib.ExitStack) -> None:
    # law 1: also when the call was repeated on a new line
    master, replica, _ = pair(stack)
    broker = opened(stack, f"{master.url}?replicas=1")
    for number, ids in enumerate((["a"], ["b", "c"], ["d"])):
        broker.put(jobs(*ids))
        assert replica.run("HEXISTS", "{tidemill}:job", ids[-1]) == "1"
        if number == 1:
            master.run("CLIENT", "KILL", "TYPE", "normal")
    assert broker.cancel(["a"]) == [True]
    assert broker.info()["durability"].endswith("puts wait for replicas: 1")
    # when
    master.kill()
    replica.run("REPLICAOF", "NO", "ONE")
    # then
    promoted = opened(stack, replica.url)
    assert [row.accepted for row in promoted.stats()] == [4]
    assert [row.cancelled for row in promoted.stats()] == [1]


def test_a_put_that_no_replica_has_in_time_says_so(stack: contextlib.ExitStack) -> None:
    # law 16
    master, replica, proxy = pair(stack)
    broker = opened(stack, f"{master.url}?replicas=1&patience=4")
    plain = opened(stack, master.url)
    # when
    proxy.cut()
    began = time.monotonic()
    with pytest.raises(NotReplicated, match=r"only 0 replicas .* replicas=1"):
        broker.put(jobs("a"))
    # then
    assert time.monotonic() - began < 4 + SLACK
    plain.put(jobs("b"))
    assert plain.stats()[0].ready == 2
    assert replica.run("HEXISTS", "{tidemill}:job", "a") == "0"
    # and once it follows again, the same put tells that the job is kept
    proxy.mend()
    with pytest.raises(DuplicateJob):
        eventually(lambda: put(broker, "a"), "the answer that the job is kept")
    assert replica.run("HEXISTS", "{tidemill}:job", "a") == "1"


def test_info_warns_when_fewer_replicas_follow_than_puts_wait_for(
    stack: contextlib.ExitStack,
) -> None:
    server = stack.enter_context(contextlib.closing(Redis("--appendonly", "yes")))
    info = opened(stack, f"{server.url}?replicas=2").info()
    assert (info["durable"], info["replicas"], info["replicas_wanted"]) == (False, 0, 2)
    assert "every put is refused" in info["durability"]
    assert "replicas that follow" in info["durability_advice"]
    with pytest.raises(InvalidOption, match="replicas in the url"):
        open_broker(f"{server.url}?replicas=some")
