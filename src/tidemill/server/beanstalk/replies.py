"""The replies of the beanstalk port."""

from __future__ import annotations

BURIED = b"BURIED\r\n"
DEADLINE_SOON = b"DEADLINE_SOON\r\n"
DELETED = b"DELETED\r\n"
DRAINING = b"DRAINING\r\n"
INTERNAL_ERROR = b"INTERNAL_ERROR\r\n"
KICKED = b"KICKED\r\n"
NOT_FOUND = b"NOT_FOUND\r\n"
NOT_IGNORED = b"NOT_IGNORED\r\n"
OUT_OF_MEMORY = b"OUT_OF_MEMORY\r\n"
PAUSED = b"PAUSED\r\n"
RELEASED = b"RELEASED\r\n"
TIMED_OUT = b"TIMED_OUT\r\n"
TOUCHED = b"TOUCHED\r\n"


def job_reply(word: bytes, number: int, body: bytes) -> bytes:
    """The reply with a job: the word ``RESERVED`` or ``FOUND``, the job's number, and its body."""
    return b"%b %d %d\r\n%b\r\n" % (word, number, len(body), body)


def yaml_reply(connections: list[str]) -> bytes:
    """The reply with lines of YAML."""
    text = "".join(f"{line}\n" for line in ("---", *connections)).encode()
    return b"OK %d\r\n%b\r\n" % (len(text), text)
