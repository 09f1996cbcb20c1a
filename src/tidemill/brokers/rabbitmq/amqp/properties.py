"""The properties of a job that was just put, which all look alike: written and read as bytes.

They stand in the order of their flags. What a job has been through (:mod:`.message`) makes them
others, which are pika's to read and write.
"""

from __future__ import annotations

__all__ = ["CONTENT_TYPE", "plain_properties", "plain_run"]

CONTENT_TYPE = "application/vnd.tidemill.job+msgpack"

_HAS_TYPE, _HAS_MODE, _HAS_RUN, _HAS_ID, _HAS_TASK = (1 << bit for bit in (15, 12, 10, 7, 5))
_FLAGS = _HAS_TYPE | _HAS_MODE | _HAS_RUN | _HAS_ID | _HAS_TASK
_KEPT = b"\x02"

_START = (
    _FLAGS.to_bytes(2, "big") + len(CONTENT_TYPE).to_bytes(1, "big") + CONTENT_TYPE.encode() + _KEPT
)
_RUN = len(_START)


def plain_properties(run: str, job_id: str, task: str) -> bytes:
    """Those of a job that nothing has happened to; ``run`` tells its message from every other."""
    first, second, third = run.encode(), job_id.encode(), task.encode()
    said = len(first), first, len(second), second, len(third), third
    return _START + b"%c%b%c%b%c%b" % said


def plain_run(properties: bytes) -> str:
    """The ``run`` of a message with such properties; empty where they are others."""
    if not properties.startswith(_START):
        return ""
    return properties[_RUN + 1 : _RUN + 1 + properties[_RUN]].decode()
