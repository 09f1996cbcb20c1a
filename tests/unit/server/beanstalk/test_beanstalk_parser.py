"""Bytes to commands at the beanstalk port."""

from __future__ import annotations

import os
import random

import pytest

from tidemill.server.beanstalk.parser import (
    BAD_FORMAT,
    HANG_UP,
    LINE_MOST,
    Command,
    PutJob,
    Reader,
    Refused,
)


def read_all(data: bytes, *, pieces: list[int] | None = None) -> list[Command | Refused]:
    """What comes of some bytes, fed at once or in pieces of these sizes."""
    reader, found = Reader(100), list[Command | Refused]()
    at = 0
    for size in pieces or [len(data)]:
        reader.feed(data[at : at + size])
        at += size
        while (what := reader.next()) is not None:
            found.append(what)
    return found


def one(line: bytes) -> Command | Refused:
    [found] = read_all(line + b"\r\n")
    return found


@pytest.mark.parametrize(
    ("line", "verb", "args"),
    [
        (b"reserve", "reserve", ()),
        (b"reserve-with-timeout 0", "reserve-with-timeout", (0,)),
        (b"reserve-with-timeout  2147483647 x", "reserve-with-timeout", (2147483647,)),
        (b"reserve-job 7", "reserve-job", (7,)),
        (b"delete 18446744073709551615", "delete", (2**64 - 1,)),
        (b"release 1 4294967295 5", "release", (1, 2**32 - 1, 5)),
        (b"bury  1  2", "bury", (1, 2)),
        (b"kick -1", "kick", (2**32 - 1,)),
        (b"kick \t+3x", "kick", (3,)),
        (b"use $();+/_.-", "use", ("$();+/_.-",)),
        (b"watch " + b"n" * 200, "watch", ("n" * 200,)),
        (b"pause-tube a 4294967295", "pause-tube", ("a", 2**32 - 1)),
        (b"quit whatever", "quit", ()),
    ],
)
def test_commands_with_their_arguments(line: bytes, verb: str, args: tuple[object, ...]) -> None:
    assert one(line) == Command(verb, args)


@pytest.mark.parametrize(
    "line",
    [
        *(b"reserve ", b"reserve-with-timeout x", b"reserve-with-timeout -1"),
        *(b"reserve-with-timeout 2147483648", b"delete", b"delete x", b"delete 1 ", b"kick x"),
        *(b"delete 18446744073709551616", b"release 1 2", b"release 1 4294967296 0", b"use "),
        *(b"use -a", b"use " + b"n" * 201, b"use a b", b"stats\0", b"put 1 2 3", b"put 1 0 1 1 x"),
        *(b"put 1 0 1 1 id=", b"put 1 0 1 1 id=a;b owner=c", b"put 1 0 1 1 id=\xff"),
        *(b"pause-tube a", b"pause-tube a 1 2", b"pause-tube -a 1"),
    ],
)
def test_arguments_that_are_invalid_are_refused(line: bytes) -> None:
    found = one(line)
    assert isinstance(found, Refused)
    assert found.reply == (b"UNKNOWN_COMMAND\r\n" if line == b"delete" else BAD_FORMAT)


@pytest.mark.parametrize("line", [b"", b"PUT 1 0 1 1", b" stats", b"put", b"list-tube", b"x\r" * 9])
def test_unknown_commands_are_refused(line: bytes) -> None:
    assert read_all(line + b"\r\n")[:1] in ([Refused(b"UNKNOWN_COMMAND\r\n")], [])


def test_a_put_with_its_body_and_a_later_command() -> None:
    data = b"put 5 6 7 4\r\na\r\nb\r\nstats\r\nput 0 0 0 0\r\n\r\n"
    assert read_all(data) == [
        Command("put", job=PutJob(5, 6, 7, b"a\r\nb")),
        Command("stats"),
        Command("put", job=PutJob(0, 0, 1, b"")),
    ]


def test_a_put_with_tags() -> None:
    [command] = read_all("put 0 0 1 1 key=user:7 id=größe\r\nx\r\n".encode())
    assert command == Command("put", job=PutJob(0, 0, 1, b"x", "größe", "user:7"))


def test_a_body_without_its_end_or_too_large_is_refused() -> None:
    assert read_all(b"put 0 0 1 2\r\nabcdstats\r\n") == [
        Refused(b"EXPECTED_CRLF\r\n", "put", produces=True),
        Command("stats"),
    ]
    data = b"put 0 0 1 101\r\n" + b"z" * 103 + b"stats\r\n"
    assert read_all(data) == [Refused(b"JOB_TOO_BIG\r\n", "put"), Command("stats")]


def test_a_line_that_is_too_long_is_skipped_to_its_end() -> None:
    for size in range(LINE_MOST - 4, LINE_MOST + 300):
        found = read_all(b"x" * size + b"\r\nstats\r\n")
        expected = Refused(b"UNKNOWN_COMMAND\r\n" if size + 2 <= LINE_MOST else BAD_FORMAT)
        if size % LINE_MOST == LINE_MOST - 1:  # its CR is dropped with what is before it
            assert found == [Refused(BAD_FORMAT)], size
        else:
            assert found == [expected, Command("stats")], size


_PARTS = (
    *(
        b"put 0 0 1 3\r\nabc\r\n",
        b"put 1 2 3 101\r\n",
        b"use a\r\n",
        b"stats",
        b"\r",
        b"\n",
        b"\r\n",
    ),
    *(b"reserve-with-timeout 5\r\n", b"x" * 250, b"\0", b"delete 1\r\n", b"put 0 0 1 9\r\n", b" "),
)


def test_random_bytes_parse_alike_however_they_are_cut() -> None:
    for seed in range(int(os.environ.get("TIDEMILL_EXAMPLES", "300"))):
        r = random.Random(seed)
        data = b"".join(
            r.choice(_PARTS) if r.random() < 0.8 else r.randbytes(r.randint(1, 30))
            for _ in range(r.randint(1, 40))
        )
        left, pieces = len(data), list[int]()
        while left > 0:
            pieces.append(min(left, r.randint(1, 60)))
            left -= pieces[-1]
        assert read_all(data, pieces=pieces) == read_all(data), f"seed {seed}"


def test_an_endless_line_takes_bounded_memory() -> None:
    reader = Reader(100)
    for _ in range(1000):
        reader.feed(b"x" * 1000)
        assert reader.next() is None
        assert reader.size < LINE_MOST
    reader.feed(b"put 0 0 1 1000000\r\n")
    assert isinstance(reader.next(), Refused)  # the end of the long line


@pytest.mark.parametrize(
    "data",
    [
        *(b"POST / HTTP/1.1\r\n", b"GET /x HTTP/1.0\r\n", b"OPTIONS * HTTP/1.1\r\n"),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /" + b"x" * 300 + b" HTTP/1.1\r\n",
        b"POST /" + b"x" * 435 + b" HTTP/1.1\r\nHost: localhost\r\n",  # its end is cut in two
        b"stats\r\nHost: 127.0.0.1:11300\r\n",
        b"\x16\x03\x01\r\nput 0 0 1 1\r\nx\r\n",
    ],
)
def test_a_line_of_http_or_tls_closes_the_connection(data: bytes) -> None:
    found = read_all(data + b"put 0 0 1 1\r\nx\r\n")
    first_command = next(i for i, one in enumerate(found) if one == Command(HANG_UP))
    assert not any(isinstance(one, Command) and one.verb == "put" for one in found[:first_command])
