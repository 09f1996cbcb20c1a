"""Connections to the server, and the search for the master when the server falls silent.

A silent server may be slow, or its machine may be gone. Only Sentinel or the other nodes of a
cluster know which. A connection leaves a silent server when one of them names another master.
"""

from __future__ import annotations

import random
import re
import socket
import time
from collections.abc import Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection
from redis.crc import key_slot
from redis.retry import Retry
from redis.sentinel import Sentinel

from tidemill.brokers.redis.errors import Away, is_broken, translate
from tidemill.brokers.redis.settings import Address
from tidemill.core.signals import InterruptibleWait, Unkilled, raised_by_handler

CONNECT_TIMEOUT = 2.0  # seconds in which a server must accept a connection
SILENCE = 1.0  # seconds without an answer before Sentinel or the cluster is asked for the master

_BACKOFF, _BACKOFF_MOST = 0.05, 1.0
_MOVED = re.compile(r"MOVED \d+ (\S*):(\d+)")

_Node = tuple[str, int]


class Replaced(redis.ConnectionError):
    """The silent server is no longer the master: the call goes to the new master."""


class Server:
    """The present address of one store's server, and the way to connect to it."""

    def __init__(self, address: Address, key: bytes) -> None:
        self.address = address
        # How often Sentinel or the cluster has named a new master in place of a silent server. A
        # connection that is older than the last change does not lead to the master.
        self.changes = 0
        self.loaded = False  # whether this process has loaded the library of functions
        self._slot = key_slot(key)
        self.nodes = list(address.hosts)  # the sentinels, or all known nodes of the cluster
        self._node: _Node | None = None  # the node that has the slot of the store
        self._next_ask = 0.0
        self._failures = 0
        self._next_try = 0.0
        self._trouble = ""

    @property
    def where(self) -> str:
        """The address as text for a message."""
        return f"{self._node[0]}:{self._node[1]}" if self._node else self.address.where

    @property
    def has_others(self) -> bool:
        """Whether Sentinel or other nodes can name the master."""
        return bool(self.address.service) or len(self.nodes) > 1

    def pause(self) -> float:
        """Seconds until the next attempt to connect."""
        return max(0.0, self._next_try - time.monotonic())

    def connect(self, timeout: float) -> Connection:
        """Make an authenticated connection. After a failure, a pause precedes the next attempt."""
        if self.pause() > 0:
            raise Away(self._trouble)
        if self.has_others:
            timeout = min(timeout, CONNECT_TIMEOUT)
        try:
            with Unkilled(), InterruptibleWait():
                connection = self._connect(timeout)
        except Exception as error:
            if raised_by_handler(error):
                raise
            self._node = None
            self._failures += 1
            most = min(_BACKOFF * 2 ** min(self._failures, 10), _BACKOFF_MOST)
            self._next_try = time.monotonic() + most * random.uniform(0.5, 1.0)
            translated = translate(error, self.where)
            self._trouble = str(translated)
            raise translated from error
        self._failures = 0
        return connection

    def _connect(self, timeout: float) -> Connection:
        failed: Exception | None = None
        for node in self._candidates():
            connection = self._make(node, timeout)
            try:
                connection.connect()
            except Exception as error:
                refused = isinstance(error, redis.AuthenticationError)
                if raised_by_handler(error) or refused or not is_broken(error):
                    raise
                failed = error
                self._ask_later(node)
                continue
            self._node = node
            return connection
        raise failed or redis.ConnectionError("no address")

    def _candidates(self) -> list[_Node]:
        if self.address.service:
            return [self._ask_sentinels(time.monotonic() + CONNECT_TIMEOUT * len(self.nodes))]
        known = [node for node in self.nodes if node != self._node]
        return [self._node, *known] if self._node else known

    def _ask_later(self, node: _Node) -> None:
        """Move a node that does not answer to the end of the list."""
        if node in self.nodes:
            self.nodes = [*(other for other in self.nodes if other != node), node]

    def _make(self, node: _Node, timeout: float) -> Connection:
        a = self.address
        options: dict[str, Any] = {
            "host": node[0],
            "port": node[1],
            "db": a.db,
            "username": a.user or None,
            "password": a.password or None,
            "socket_timeout": timeout,
            "socket_connect_timeout": min(timeout, CONNECT_TIMEOUT),
            "socket_keepalive": True,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        if a.tls is not None:
            return SSLConnection(**(options | a.tls))
        return Connection(**options)

    def moved(self, message: str) -> bool:
        """Follow a MOVED error to the node that has the slot; False for another error."""
        found = _MOVED.match(message)
        if not found:
            return False
        host = found[1] or (self._node[0] if self._node else self.nodes[0][0])
        self._node = host, int(found[2])
        self.learn([self._node])
        return True

    def learn(self, nodes: Sequence[_Node]) -> None:
        """Remember nodes of the cluster: they know the master when the present node is dead."""
        self.nodes += [node for node in nodes if node not in self.nodes]

    def look_again(self) -> None:
        """Forget the present node, which is no longer the master."""
        self._node = None

    # -- finding the master ---------------------------------------------------------------------

    def is_replaced(self, silent: Connection, until: float) -> bool:
        """Ask for the master, once a second at most; True when another server is the master."""
        # The silent server counts as slow, not as dead, until Sentinel or a node names another
        # master.
        now = time.monotonic()
        if not self.has_others or now < self._next_ask:
            return False
        self._next_ask = now + SILENCE
        try:
            if self.address.service:
                named = self._ask_sentinels(until)
            else:
                named = self._ask_cluster(silent, until)
        except Exception as error:
            if raised_by_handler(error):
                raise
            return False
        if _leads_to(silent, named):
            return False
        self._node = named
        self._next_try = 0.0
        self.changes += 1
        return True

    def _ask_sentinels(self, until: float) -> _Node:
        """Ask the sentinels in turn, until one names a living master."""
        failed: Exception | None = None
        for host in list(self.nodes):
            left = until - time.monotonic()
            if left <= 0:
                break
            try:
                return self._ask_sentinel(host, min(left, SILENCE))
            except Exception as error:
                if raised_by_handler(error):
                    raise
                failed = error
                self._ask_later(host)
        raise failed or redis.TimeoutError("no sentinel answers")

    def _ask_sentinel(self, host: _Node, timeout: float) -> _Node:
        a = self.address
        options: dict[str, Any] = {
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "retry": Retry(NoBackoff(), 0),
            "username": a.sentinel_user or None,
            "password": a.sentinel_password or None,
        }
        if a.tls is not None:
            options |= {"ssl": True, **a.tls}
        sentinel = Sentinel([host], sentinel_kwargs=options)
        [client] = sentinel.sentinels
        try:
            masters: Any = client.sentinel_masters()
        finally:
            client.close()
        state = masters.get(a.service)
        if not state or not sentinel.check_master_state(state, a.service):
            raise redis.ConnectionError(f"it knows no living master {a.service!r}")
        return str(state["ip"]), int(state["port"])

    def _ask_cluster(self, silent: Connection, until: float) -> _Node:
        """Ask the other nodes in turn, until one names the master of our slot."""
        failed: Exception | None = None
        for node in [node for node in self.nodes if node != (silent.host, silent.port)]:
            left = until - time.monotonic()
            if left <= 0:
                break
            connection = self._make(node, min(left, SILENCE))
            try:
                connection.connect()
                connection.send_command("CLUSTER", "SLOTS")
                named = self.learn_slots(connection.read_response(), node)
                if named is not None:
                    return named
            except Exception as error:
                if raised_by_handler(error):
                    raise
                failed = error
                self._ask_later(node)
            finally:
                connection.disconnect()
        raise failed or redis.TimeoutError("no other node answers")

    def learn_slots(self, slots: Sequence[Any], asked: _Node) -> _Node | None:
        """Remember the nodes that CLUSTER SLOTS names; return the node of the slot."""
        self.learn([_node(node, asked) for row in slots for node in row[2:]])
        for first, last, master, *_ in slots:
            if first <= self._slot <= last:
                return _node(master, asked)
        return None


def _node(told: Sequence[Any], asked: _Node) -> _Node:
    """The node in an answer of another node. Without an address it is the node that answers."""
    host = told[0].decode() if told[0] else ""
    return (asked[0] if host in ("", "?") else host), int(told[1])


def socket_of(connection: Connection) -> socket.socket:
    """The socket of a connection of redis-py, which has no public name for it."""
    for value in vars(connection).values():
        if isinstance(value, socket.socket):
            return value
    raise OSError("the connection is closed")


def _leads_to(connection: Connection, node: _Node) -> bool:
    """Whether a connection leads to a node, under any of the node's names."""
    if (connection.host, connection.port) == node:
        return True
    try:
        peer = socket_of(connection).getpeername()[:2]
        found = socket.getaddrinfo(*node, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(place[4][:2] == peer for place in found)
