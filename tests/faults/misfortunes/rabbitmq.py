"""RabbitMQ: one node, or a cluster of three, each node behind a line that can be cut."""

from __future__ import annotations

import time
from collections.abc import Collection

from servers import Proxy, RabbitMQ

from misfortunes import Misfortune, Rig
from misfortunes.anywhere import CutLine, Stopped


class RabbitRig(Rig):
    """Three nodes where one is to be lost, else one: three take a while to start."""

    def __init__(self, chosen: Collection[str] = ()) -> None:
        super().__init__(chosen)
        first = RabbitMQ()
        self.callback(first.close)
        self.nodes = [first]
        while self.wants(LostNode.name) and len(self.nodes) < 3:
            node = RabbitMQ(beside=first)
            self.callback(node.close)
            self.nodes.append(node)
        lines = [Proxy(node.port) for node in self.nodes]
        for line in lines:
            self.callback(line.close)
        self.servers[:] = self.nodes
        hosts = ",".join(f"127.0.0.1:{line.port}" for line in lines)
        self.url = f"amqp://guest:guest@{hosts}/%2F"
        self.misfortunes = [
            Stopped(lambda: first, "the server", redelivers=True),
            CutLine(lambda: lines, redelivers=True),
            Alarm(first),
        ]
        if len(self.nodes) > 1:
            self.misfortunes.append(LostNode(self.nodes))


class Alarm(Misfortune):
    """The server has too little memory: it reads nothing from those who publish."""

    name = "a memory alarm"

    def __init__(self, server: RabbitMQ) -> None:
        self._server = server

    def strike(self, seconds: float) -> None:
        """Raise the alarm for some seconds."""
        self._server.alarm(True)
        try:
            time.sleep(seconds)
        finally:
            self._server.alarm(False)


class LostNode(Misfortune):
    """One node of three dies, and comes back after some seconds."""

    name = "a node of three is lost"
    redelivers = True

    def __init__(self, nodes: list[RabbitMQ]) -> None:
        self._nodes = nodes
        self._next = 0

    def strike(self, seconds: float) -> None:
        """Kill the next node in turn, and start it again after some seconds."""
        node = self._nodes[self._next % len(self._nodes)]
        self._next += 1
        self._nodes[0].sync()
        node.kill()
        time.sleep(seconds)
        node.start()
