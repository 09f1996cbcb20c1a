"""Which errors of a connection are final: those of the server, not a connection that was lost."""

from __future__ import annotations

import pytest
from pika.exceptions import (
    ConnectionClosedByBroker,
    IncompatibleProtocolError,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
    StreamLostError,
)

from tidemill.brokers.rabbitmq.errors import is_final, sentence
from tidemill.brokers.rabbitmq.settings import check_url
from tidemill.core.config import parse_url

GUESSES = (IncompatibleProtocolError, ProbableAuthenticationError, ProbableAccessDeniedError)


@pytest.mark.parametrize("guess", GUESSES)
def test_a_connection_that_a_starting_server_resets_is_tried_again(guess: type[Exception]) -> None:
    # given the exception that pika makes of a lost connection before the connection is open
    error = guess(repr(StreamLostError("Connection reset by peer")))

    assert not is_final(error)
    assert sentence(error, check_url(parse_url("amqp://localhost"))).startswith(
        "cannot reach rabbitmq at"
    )


@pytest.mark.parametrize("guess", GUESSES[1:])
def test_a_refusal_by_the_server_is_final(guess: type[Exception]) -> None:
    error = guess(repr(ConnectionClosedByBroker(403, "ACCESS_REFUSED")))

    assert is_final(error)
    assert "rabbitmq at localhost" in sentence(error, check_url(parse_url("amqp://localhost")))


def test_a_vhost_that_is_not_up_yet_is_tried_again() -> None:
    closed = ConnectionClosedByBroker(541, "INTERNAL_ERROR - vhost '/' is down")

    assert not is_final(ProbableAccessDeniedError(repr(closed)))
