"""The properties of new jobs, which all have the same form, written and read as bytes.

The properties stand in the order of their flags. A job with a history (``message.py``) has further
properties, which pika reads and writes.
"""

from __future__ import annotations

CONTENT_TYPE = "application/vnd.tidemill.job+msgpack"

_HAS_TYPE, _HAS_MODE, _HAS_RUN, _HAS_ID, _HAS_TASK = (1 << bit for bit in (15, 12, 10, 7, 5))
_FLAGS = _HAS_TYPE | _HAS_MODE | _HAS_RUN | _HAS_ID | _HAS_TASK
_KEPT = b"\x02"

_START = (
    _FLAGS.to_bytes(2, "big") + len(CONTENT_TYPE).to_bytes(1, "big") + CONTENT_TYPE.encode() + _KEPT
)
_RUN = len(_START)


def plain_properties(run: str, job_id: str, task: str) -> bytes:
    """The properties of a new job. ``run`` is the unique name of its message."""
    first, second, third = run.encode(), job_id.encode(), task.encode()
    values = len(first), first, len(second), second, len(third), third
    return _START + b"%c%b%c%b%c%b" % values


def plain_run(properties: bytes) -> str:
    """The ``run`` in the properties of a new job; empty for other properties."""
    if not properties.startswith(_START):
        return ""
    return properties[_RUN + 1 : _RUN + 1 + properties[_RUN]].decode()
