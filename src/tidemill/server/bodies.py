"""Bodies and results between JSON and what the store has, which knows more types than JSON does.

Bytes go as base64. Dates, decimals, tuples and sets go as JSON has them; what no JSON can say is
shown as Python would write it. ``encoding`` tells which of these it was.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec

from tidemill.app import Tidemill
from tidemill.codec import unpack, unpack_pickle
from tidemill.errors import CodecError, InvalidOption
from tidemill.job import Envelope
from tidemill.trust import trusted

__all__ = ["as_json", "body_out", "bytes_of"]


def bytes_of(field: str, text: object) -> bytes:
    """The bytes that a text in base64 stands for.

    Raises:
        InvalidOption: it is none.
    """
    try:
        if len(text) % 4:  # type: ignore[arg-type]  # refused
            raise ValueError
        return binascii.a2b_base64(text, strict_mode=True)  # type: ignore[arg-type]  # refused
    except (TypeError, ValueError):
        raise InvalidOption(f"{field} must be a text in base64, as encoding says") from None


def as_json(value: Any) -> tuple[Any, str]:
    """A value as an answer has it, and in which encoding."""
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode(), "base64"
    try:
        return msgspec.Raw(msgspec.json.encode(value)), "json"
    except (TypeError, ValueError, OverflowError, RecursionError):
        return repr(value), "repr"


def body_out(mill: Tidemill, envelope: Envelope) -> tuple[Any, str]:
    """The body of a message, or the arguments of a call as ``args`` and ``kwargs``.

    Raises:
        CodecError: it is not to be trusted, or is nothing that a put of ours wrote.
    """
    trusted(envelope, mill.keys)
    value = unpack_pickle(envelope.body) if envelope.pickled else unpack(envelope.body)
    if envelope.is_message:
        return as_json(value)
    if not (isinstance(value, (list, tuple)) and len(value) == 2):
        raise CodecError("the arguments of the call cannot be read")
    return as_json({"args": value[0], "kwargs": value[1]})
