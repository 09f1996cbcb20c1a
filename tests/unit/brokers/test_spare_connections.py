"""A closed broker keeps no connection, whatever other threads do at that moment."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from servers import Redis

from tidemill.brokers.http.address import check_url
from tidemill.brokers.http.connections import Server, ServerConnection
from tidemill.brokers.network.spare_connections import Spares
from tidemill.brokers.registry import open_broker
from tidemill.core.config import parse_url
from tidemill.errors import TidemillError


class Connection:
    """Counts how often it is closed."""

    def __init__(self) -> None:
        self.closings = 0

    def close(self) -> None:
        self.closings += 1


class ClosedMeanwhile(list[Connection]):
    """The spare connections of a broker that another thread closes at each step."""

    spares: Spares[Connection]

    def append(self, connection: Connection) -> None:
        self.spares.close()
        super().append(connection)


def test_a_connection_is_taken_again() -> None:
    spares = Spares(Connection)
    connection = spares.take()
    assert spares.take() is not connection
    spares.give_back(connection)
    assert spares.take() is connection
    assert connection.closings == 0


def test_close_closes_the_spare_connections_and_later_those_in_use() -> None:
    spares = Spares(Connection)
    spare, used = spares.take(), spares.take()
    spares.give_back(spare)
    spares.close()
    assert (spare.closings, used.closings) == (1, 0)
    spares.give_back(used)
    assert used.closings == 1


def test_a_connection_given_back_while_another_thread_closes_is_closed() -> None:
    spares = Spares(Connection)
    connection = spares.take()
    spares._spare = found = ClosedMeanwhile()
    found.spares = spares
    spares.give_back(connection)
    assert connection.closings == 1


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_a_line_that_ends_while_it_connects_stays_closed(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = parse_url(f"http://127.0.0.1:{listener.getsockname()[1]}")
    server = Server(check_url(url))
    connection = ServerConnection(server, 1.0)
    connect = server.connect

    def connect_late() -> socket.socket:
        sock = connect()
        connection.end()  # as another thread would
        return sock

    monkeypatch.setattr(server, "connect", connect_late)
    with pytest.raises(TidemillError, match="closed"):
        connection.send("hello", b"")
    assert connection.fileno() == -1


@pytest.mark.everyday
def test_a_broker_that_a_redis_refuses_leaves_no_connection() -> None:
    server = Redis("--requirepass", "secret")
    try:
        with pytest.raises(TidemillError, match="password") as refusal:
            open_broker(server.url)
        clients = server.run("-a", "secret", "client", "list").splitlines()
        assert len(clients) == 1, (clients, refusal)  # redis-cli; the error is still held here
    finally:
        server.close()
