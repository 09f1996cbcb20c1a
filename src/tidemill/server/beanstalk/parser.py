"""The texts of the protocol: parses bytes into commands, exactly as beanstalkd does, and replies.

A line ends with CR LF and has at most 224 bytes. A longer line is skipped to its end and answered
with BAD_FORMAT, and so is a line with a lone CR. The first bytes of a line tell its command.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

LINE_MOST = 224  # the most bytes of a line, with its CR LF

TUBE_MOST = 200

BAD_FORMAT = b"BAD_FORMAT\r\n"
DRAINING = b"DRAINING\r\n"
INTERNAL_ERROR = b"INTERNAL_ERROR\r\n"
KICKED = b"KICKED\r\n"
NOT_FOUND = b"NOT_FOUND\r\n"
OUT_OF_MEMORY = b"OUT_OF_MEMORY\r\n"
TIMED_OUT = b"TIMED_OUT\r\n"


HANG_UP = "hang-up"
"""The verb of input of another protocol (HTTP, TLS): the port closes the connection."""

_HTTP = re.compile(rb"[A-Z]+ \S+ HTTP/[0-9.]+ *|(?i:host|origin|content-length|user-agent) *:.*")
"""An HTTP request line or header. A browser sends both before a body that a web page chose."""
_HTTP_VERSIONS = (b" HTTP/1.1", b" HTTP/1.0")  # after a path that was too long for a line
_TLS_HANDSHAKE = 0x16

_NUMBER = re.compile(rb" *([0-9]+)")
_LIKE_STRTOUL = re.compile(rb"[ \t\n\v\f\r]*([+-]?[0-9]+)")
_NAME = re.compile(rb"[A-Za-z0-9+/;.$_()-]+")
_TAGS = re.compile(r"( (id|key)=\S+)+ *")
_U32, _U64, _INT = 2**32 - 1, 2**64 - 1, 2**31 - 1


def job_reply(word: bytes, number: int, body: bytes) -> bytes:
    """The reply with a job: the word ``RESERVED`` or ``FOUND``, the job's number, and its body."""
    return b"%b %d %d\r\n%b\r\n" % (word, number, len(body), body)


def yaml_reply(connections: list[str]) -> bytes:
    text = "".join(f"{line}\n" for line in ("---", *connections)).encode()
    return b"OK %d\r\n%b\r\n" % (len(text), text)


class PutJob(NamedTuple):
    """The job of a put. Times are seconds; ``id`` and ``key`` are the user's, or empty."""

    rank: int
    delay: int
    ttr: int
    body: bytes
    id: str = ""
    key: str = ""


class Command(NamedTuple):
    """One command of a client, with its arguments in order."""

    verb: str
    args: tuple[int | str, ...] = ()
    job: PutJob | None = None


class Refused(NamedTuple):
    """Refused input and its reply; it counts as ``verb``, if ``produces`` by a producer."""

    reply: bytes
    verb: str = ""
    produces: bool = False


class Reader:
    def __init__(self, max_body: int) -> None:
        self._max_body = max_body
        self._buffer = bytearray()
        self._head: tuple[PutJob, int] | None = None  # a put whose body of this size is to come
        self._skip = 0  # bytes of a refused body that are still to come
        self._too_long = False  # the rest of the line is skipped
        self._begun = False  # the first byte has been checked

    def feed(self, data: bytes) -> None:
        if self._skip > len(data) and not self._buffer:
            self._skip -= len(data)
        else:
            self._buffer += data

    @property
    def size(self) -> int:
        """Bytes that are not parsed yet."""
        return len(self._buffer)

    def next(self) -> Command | Refused | None:
        """The next command; None when it is incomplete."""
        if not self._buffer:
            return None
        if not self._begun:
            self._begun = True
            if self._buffer[0] == _TLS_HANDSHAKE:
                return Command(HANG_UP)
        if self._skip:
            return self._skip_body()
        if self._head is not None:
            return self._body(*self._head)
        end = self._line_end()
        if not end:
            return None
        line = bytes(self._buffer[: end - 2])
        del self._buffer[:end]
        if self._too_long:
            self._too_long = False
            return Command(HANG_UP) if line.endswith(_HTTP_VERSIONS) else Refused(BAD_FORMAT)
        if 0 in line:
            return Refused(BAD_FORMAT)
        try:
            return self._command(line)
        except _Malformed as error:
            return Refused(BAD_FORMAT, error.verb)

    def _line_end(self) -> int:
        """The end of the next line; 0 if it is incomplete. A line that is too long is dropped."""
        buffer = self._buffer
        while True:
            at = buffer.find(b"\r", 0, min(len(buffer), LINE_MOST) - 1)
            if at >= 0 and buffer[at + 1] == 10:
                return at + 2
            if len(buffer) < LINE_MOST:
                return 0
            del buffer[:LINE_MOST]
            self._too_long = True

    def _skip_body(self) -> Refused | None:
        few = min(self._skip, len(self._buffer))
        del self._buffer[:few]
        self._skip -= few
        return None if self._skip else Refused(b"JOB_TOO_BIG\r\n", "put")

    def _body(self, job: PutJob, size: int) -> Command | Refused | None:
        buffer = self._buffer
        if len(buffer) < size + 2:
            return None
        self._head = None
        body, end = bytes(buffer[:size]), bytes(buffer[size : size + 2])
        del buffer[: size + 2]
        if end != b"\r\n":
            return Refused(b"EXPECTED_CRLF\r\n", "put", produces=True)
        return Command("put", job=job._replace(body=body))

    def _command(self, line: bytes) -> Command | Refused | None:
        if line.startswith(b"put "):
            return self._put(line)
        for prefix, verb, read in _BY_LETTER.get(line[:1], ()):
            if line.startswith(prefix):
                return Command(verb, read(line, len(prefix)))
        return Command(HANG_UP) if _HTTP.fullmatch(line) else Refused(b"UNKNOWN_COMMAND\r\n")

    def _put(self, line: bytes) -> Command | Refused | None:
        rank, at = _number(line, 4, _U32)
        delay, at = _number(line, at, _U32)
        ttr, at = _number(line, at, _U32)
        size, at = _number(line, at, _U32)
        if size > self._max_body:
            self._skip = size + 2
            return self._skip_body()
        job_id = key = ""
        if at < len(line):
            job_id, key = _tags(line[at:])
        self._head = PutJob(rank, delay, max(1, ttr), b"", job_id, key), size
        return self._body(*self._head)


class _Malformed(Exception):
    def __init__(self, verb: str = "") -> None:
        super().__init__()
        self.verb = verb


def _tags(text: bytes) -> tuple[str, str]:
    """The tags `` id=…`` and `` key=…`` in the line of a put. beanstalkd has no such tags."""
    try:
        tags = text.decode()
    except UnicodeDecodeError:
        raise _Malformed("put") from None
    if not _TAGS.fullmatch(tags):
        raise _Malformed("put")
    found = dict(tag.split("=", 1) for tag in tags.split())
    return found.get("id", ""), found.get("key", "")


def _number(line: bytes, at: int, most: int) -> tuple[int, int]:
    found = _NUMBER.match(line, at)
    if found is None or (value := int(found[1])) > most:
        raise _Malformed
    return value, found.end()


def _nothing(line: bytes, at: int) -> tuple[int | str, ...]:
    if at != len(line):
        raise _Malformed
    return ()


def _anything(line: bytes, at: int) -> tuple[int | str, ...]:
    return ()


def _timeout(line: bytes, at: int) -> tuple[int | str, ...]:
    value, _ = _number(line, at, _INT)
    return (value,)


def _id_and_more(*most: int) -> Callable[[bytes, int], tuple[int | str, ...]]:
    def read(line: bytes, at: int) -> tuple[int | str, ...]:
        values = []
        for each in (_U64, *most):
            value, at = _number(line, at, each)
            values.append(value)
        return (*values, *_nothing(line, at))

    return read


def _count(line: bytes, at: int) -> tuple[int | str, ...]:
    """A number as C's strtoul reads it, cut to 32 bits; it may have a sign, and text after it."""
    found = _LIKE_STRTOUL.match(line, at)
    if found is None or abs(value := int(found[1])) > _U64:
        raise _Malformed
    return (value & _U32,)


def _tube(line: bytes, at: int) -> tuple[int | str, ...]:
    name = line[at:]
    if not _NAME.fullmatch(name) or len(name) > TUBE_MOST or name.startswith(b"-"):
        raise _Malformed
    return (name.decode(),)


def _pause(line: bytes, at: int) -> tuple[int | str, ...]:
    rest = line[at:].lstrip(b" ")
    found = _NAME.match(rest)
    if found is None:
        raise _Malformed
    delay, end = _number(rest, found.end(), _U32)
    _nothing(rest, end)
    try:
        return (*_tube(found[0], 0), delay)
    except _Malformed:
        raise _Malformed("pause-tube") from None


_id = _id_and_more()

_Known = tuple[bytes, str, Callable[[bytes, int], tuple[int | str, ...]]]

_COMMANDS: tuple[_Known, ...] = (
    (b"peek ", "peek", _id),
    (b"peek-ready", "peek-ready", _nothing),
    (b"peek-delayed", "peek-delayed", _nothing),
    (b"peek-buried", "peek-buried", _nothing),
    (b"reserve-with-timeout ", "reserve-with-timeout", _timeout),
    (b"reserve-job ", "reserve-job", _id),
    (b"reserve", "reserve", _nothing),
    (b"delete ", "delete", _id),
    (b"release ", "release", _id_and_more(_U32, _U32)),
    (b"bury ", "bury", _id_and_more(_U32)),
    (b"kick ", "kick", _count),
    (b"kick-job ", "kick-job", _id),
    (b"touch ", "touch", _id),
    (b"stats-job ", "stats-job", _id),
    (b"stats-tube ", "stats-tube", _tube),
    (b"stats", "stats", _nothing),
    (b"use ", "use", _tube),
    (b"watch ", "watch", _tube),
    (b"ignore ", "ignore", _tube),
    (b"list-tubes-watched", "list-tubes-watched", _nothing),
    (b"list-tube-used", "list-tube-used", _nothing),
    (b"list-tubes", "list-tubes", _nothing),
    (b"quit", "quit", _anything),
    (b"pause-tube", "pause-tube", _pause),
)
"""The beginnings of lines, in the order in which they are tried."""

_BY_LETTER: dict[bytes, list[_Known]] = {}
for _known in _COMMANDS:
    _BY_LETTER.setdefault(_known[0][:1], []).append(_known)
