"""Bodies and results as JSON, which lacks some types of the stored values.

Bytes become base64. Dates, decimals, tuples and sets become strings and lists. Any other value
becomes its Python ``repr``. The field ``encoding`` names the form.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec

from tidemill.app import Tidemill
from tidemill.core.codec import unpack, unpack_pickle
from tidemill.core.envelope import Envelope
from tidemill.core.errors import CodecError, InvalidOption
from tidemill.core.signatures import trusted


def bytes_of(field: str, text: object) -> bytes:
    """Decode a text in base64.

    Raises:
        InvalidOption: the text is not base64.
    """
    try:
        if len(text) % 4:  # type: ignore[arg-type]  # refused
            raise ValueError
        return binascii.a2b_base64(text, strict_mode=True)  # type: ignore[arg-type]  # refused
    except (TypeError, ValueError):
        raise InvalidOption(f"{field} must be base64, as the field encoding says") from None


def as_json(value: Any) -> tuple[Any, str]:
    """A value for an answer, and its encoding."""
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode(), "base64"
    try:
        return msgspec.Raw(msgspec.json.encode(value)), "json"
    except (TypeError, ValueError, OverflowError, RecursionError):
        return repr(value), "repr"


def body_out(mill: Tidemill, envelope: Envelope) -> tuple[Any, str]:
    """The body of a message, or the arguments of a call as ``args`` and ``kwargs``.

    Raises:
        CodecError: the body is not signed as it should be, or cannot be decoded.
    """
    trusted(envelope, mill.runtime.keys)
    value = unpack_pickle(envelope.body) if envelope.pickled else unpack(envelope.body)
    if envelope.is_message:
        return as_json(value)
    if not (isinstance(value, (list, tuple)) and len(value) == 2):
        raise CodecError("the arguments of the call cannot be read")
    return as_json({"args": value[0], "kwargs": value[1]})
