"""Redis: a master and its replica, each behind a line that can be cut, and their sentinel.

Sentinel makes the replica the master when a misfortune tells it to, and never by itself. So a node
that is killed comes back in the role that it had. Both sync every write to disk.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Collection

from excuses import Span, forgets_from
from harness import eventually
from servers import Proxy, Redis, Sentinel

from misfortunes import Misfortune, Rig
from misfortunes.anywhere import CutLine, OldImage, Stopped

FOLLOWS = "master_link_status:up"


class RedisRig(Rig):
    """A master and its replica, which change their roles, and a sentinel."""

    def __init__(self, chosen: Collection[str] = ()) -> None:
        super().__init__(chosen)
        self.nodes = [self._node(), self._node()]
        self.servers = [node for node, _ in self.nodes]
        self.follow()
        sentinel = Sentinel(self.nodes[0][1].port, down_after=3600)
        self.callback(sentinel.close)
        self.sentinel = sentinel
        self.url = f"redis+sentinel://127.0.0.1:{sentinel.port}/mymaster/0"
        self.misfortunes = [
            LaggingFailover(self),
            HangingMaster(self),
            Stopped(lambda: self.master, "the master"),
            Paused(self),
            OutOfMemory(self),
            CutLine(lambda: [self.nodes[0][1]]),
            OldImage(lambda: self.master),
        ]

    @property
    def master(self) -> Redis:
        """The master of this moment."""
        return self.nodes[0][0]

    @property
    def replica(self) -> Redis:
        """The replica of this moment."""
        return self.nodes[1][0]

    def _node(self) -> tuple[Redis, Proxy]:
        node = Redis(durable=True)
        self.callback(node.close)
        line = Proxy(node.port)
        self.callback(line.close)
        self._set(node, "replica-announce-port", str(line.port))
        return node, line

    def _set(self, node: Redis, name: str, value: str) -> None:
        """Set it for now, and for each start to come."""
        node.run("CONFIG", "SET", name, value)
        node.options += [f"--{name}", value]

    def follow(self) -> None:
        """Have the replica follow the master, now and after each start."""
        (master, line), (replica, _) = self.nodes
        if "--replicaof" in master.options:
            at = master.options.index("--replicaof")
            del master.options[at : at + 3]
        replica.options += ["--replicaof", "127.0.0.1", str(line.port)]
        if replica.process is None:
            replica.start()
        replica.run("REPLICAOF", "127.0.0.1", str(line.port))
        self.await_replica()

    def await_replica(self) -> None:
        """Until the replica has what the master has."""
        offset = r"master_repl_offset:(\d+)"
        wanted = int(re.findall(offset, self.master.run("INFO", "replication"))[0])
        found = r"slave_repl_offset:(\d+)"

        def follows() -> bool:
            told = self.replica.run("INFO", "replication")
            return FOLLOWS in told and int(re.findall(found, told)[0]) >= wanted

        eventually(follows, "the replica follows", pause=0.05)

    def promote(self) -> None:
        """Have Sentinel make the replica the master. The old one is not asked."""
        line = self.nodes[1][1]
        fail_over = ("SENTINEL", "FAILOVER", "mymaster")
        eventually(lambda: self.sentinel.run(*fail_over) == "OK", "a fail-over", pause=0.2)
        named = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster")
        eventually(lambda: str(line.port) in self.sentinel.run(*named), "another master", pause=0.1)
        self.nodes.reverse()


class LaggingFailover(Misfortune):
    """The replica hears nothing for some seconds, then the master dies, and the replica follows.

    What the master answered meanwhile is lost.
    """

    name = "fail-over to a replica that lags"

    def __init__(self, rig: RedisRig) -> None:
        self._rig = rig

    def strike(self, seconds: float) -> Span:
        """Let the replica lag for some seconds, and fail over to it."""
        rig = self._rig
        rig.await_replica()
        began = forgets_from(time.time())
        os.kill(rig.replica.pid, signal.SIGSTOP)
        try:
            rig.master.run("CLIENT", "KILL", "TYPE", "replica")
            time.sleep(seconds)
            rig.master.kill()
        finally:
            os.kill(rig.replica.pid, signal.SIGCONT)
        lost = Span(began, time.time())
        rig.promote()
        rig.follow()
        return lost


class HangingMaster(Misfortune):
    """The master is stopped, Sentinel fails over, and the old master comes back as a replica.

    It forgets what it had answered in the last moment, and what it answers before it is told.
    """

    name = "fail-over from a master that hangs"

    def __init__(self, rig: RedisRig) -> None:
        self._rig = rig

    def strike(self, seconds: float) -> Span:
        """Stop the master for some seconds; fail over after the first third of them."""
        rig = self._rig
        rig.await_replica()
        began = forgets_from(time.time())
        with rig.master.stalled():
            time.sleep(seconds / 3)
            rig.promote()
            time.sleep(seconds * 2 / 3)
        rig.follow()
        return Span(began, time.time())


class Paused(Misfortune):
    """``CLIENT PAUSE``: the master answers pings, and keeps every step waiting."""

    name = "CLIENT PAUSE"

    def __init__(self, rig: RedisRig) -> None:
        self._rig = rig

    def strike(self, seconds: float) -> None:
        """Keep the steps waiting for some seconds."""
        self._rig.master.run("CLIENT", "PAUSE", f"{seconds * 1000:.0f}", "WRITE")
        time.sleep(seconds)
        self._rig.master.run("CLIENT", "UNPAUSE")


class OutOfMemory(Misfortune):
    """``maxmemory`` is reached: puts are refused, and large results are not kept."""

    name = "`maxmemory`"

    def __init__(self, rig: RedisRig) -> None:
        self._rig = rig

    def strike(self, seconds: float) -> None:
        """Allow no byte more than there is for some seconds."""
        master = self._rig.master
        used = re.findall(r"used_memory:(\d+)", master.run("INFO", "memory"))[0]
        master.run("CONFIG", "SET", "maxmemory", used)
        try:
            time.sleep(seconds)
        finally:
            master.run("CONFIG", "SET", "maxmemory", "0")
