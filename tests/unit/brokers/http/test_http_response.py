"""Answers of HTTP are read in whatever pieces they come, and other bytes are refused."""

from __future__ import annotations

import pytest

from tidemill.brokers.http.response import Response

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: x/y\r\ncontent-length: 5\r\nA: b:c\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3;ext=1\r\nabc\r\nA\r\n0123456789\r\n0\r\nTrailer: t\r\n\r\n"
)
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN


def read(data: bytes, step: int) -> Response:
    response = Response()
    for at in range(0, len(data), step):
        assert not response.whole
        response.feed(data[at : at + step])
    return response


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_an_answer_is_the_same_however_it_is_cut(step: int) -> None:
    for data in (PLAIN, CONTINUED):
        response = read(data, step)
        assert response.whole
        assert (response.status, response.body, response.keeps) == (200, b"hello", True)
        assert response.headers["content-type"] == "x/y"
        assert response.headers["a"] == "b:c"
    response = read(CHUNKED, step)
    assert response.whole
    assert (response.status, response.body) == (503, b"abc0123456789")


def test_a_response_without_a_length_ends_with_the_connection() -> None:
    response = read(b"HTTP/1.0 404 Nothing\r\n\r\nall of it", 4)
    assert not response.whole
    assert response.feed(b"")
    assert (response.status, response.body, response.keeps) == (404, b"all of it", False)


def test_a_response_tells_that_its_connection_closes() -> None:
    assert not read(b"HTTP/1.1 204 No\r\nConnection: close\r\n\r\n", 100).keeps
    assert read(b"HTTP/1.1 204 No\r\n\r\n", 100).keeps


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"x" * 70_000,
    ],
)
def test_bytes_that_are_no_response_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        Response().feed(data)


@pytest.mark.parametrize("data", [PLAIN, CHUNKED])
def test_an_answer_that_breaks_off_is_refused(data: bytes) -> None:
    for at in range(len(data) - 1):
        response = Response()
        if at:
            response.feed(data[:at])
        with pytest.raises(ValueError):
            response.feed(b"")


def test_a_connection_that_closes_at_once_may_need_tls() -> None:
    with pytest.raises(ValueError, match=r"without a response; .* need https://, or a client"):
        Response().feed(b"")
