"""Rules between the fields of a request, as JSON Schema for the OpenAPI description.

Types of single fields cannot express these rules. The server checks them where it uses the fields,
and names the broken rule. Rules beyond JSON Schema are in the descriptions of fields.
"""

from __future__ import annotations

from typing import Any

_NULL = {"type": "null"}
_TEXT = {"type": "string"}
_NOTHING = {"type": ["number", "null"], "maximum": 0}  # the same as a missing field
_HOLDING = {"anyOf": [_NULL, {"type": "string", "enum": ["keep", "reject", "merge"]}]}
_REPLACING = {"on_conflict": {"const": "replace"}, "hold": _NOTHING}

BASE64 = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"


def _fields(*needed: str, **fields: Any) -> dict[str, Any]:
    """An object with the needed fields, and with these schemas of fields."""
    return {"required": list(needed), "properties": fields} if needed else {"properties": fields}


def _decoded(field: str, *needed: str) -> dict[str, Any]:
    """A field with any JSON, or with bytes in base64, as the field ``encoding`` says."""
    text = {"type": "string", "pattern": BASE64, "contentEncoding": "base64"}
    as_bytes = _fields(field, "encoding", **{field: text}, encoding={"const": "base64"})
    return {"anyOf": [_fields(*needed, encoding={"const": "json"}), as_bytes]}


_KEYED = {
    "anyOf": [
        _fields(on_conflict=_NULL, hold=_NOTHING, max_wait=_NOTHING),
        _fields("key", key=_TEXT, on_conflict=_HOLDING, max_wait=_NOTHING),
        _fields("key", "on_conflict", key=_TEXT, **_REPLACING),
    ]
}

_MESSAGE = {
    "title": "A message",
    **_fields(
        "queue",
        "body",
        queue=_TEXT,
        task=_NULL,
        args={"maxItems": 0},
        kwargs={"maxProperties": 0},
        timeout=_NULL,
        result_ttl=_NULL,
    ),
    "allOf": [_decoded("body", "body"), _KEYED],
}

_CALL = {
    "title": "A call of a task",
    **_fields("task", task=_TEXT, body=False, ttr=_NULL),
    **_KEYED,
}

_MOMENT = {"type": ["number", "string"]}
_IN_UTC = {"anyOf": [_NULL, {"type": "number"}, {"pattern": "([Zz]|[+-]00:00)$"}]}
_IN_A_ZONE = {"anyOf": [_NULL, {"type": "number"}, {"pattern": "([Zz]|[+-][0-9]{2}:[0-9]{2})$"}]}

_LIMIT: list[dict[str, Any]] = [
    {"minProperties": 1},
    {"anyOf": [_fields(burst=_NULL), _fields(rate=_TEXT)]},
]

_ALTER: list[dict[str, Any]] = [
    {
        "anyOf": [
            _fields("to_priority", to_priority={"type": "number"}),
            _fields("to_queue", to_queue=_TEXT),
        ]
    }
]

RULES: dict[str, list[dict[str, Any]]] = {
    "JobIn": [{"oneOf": [_MESSAGE, _CALL]}, {"anyOf": [_fields(delay=_NULL), _fields(at=_NULL)]}],
    "AlterIn": _ALTER,
    "AlterMany": _ALTER,
    "AlterMatching": _ALTER,
    "CompleteIn": [_decoded("result")],
    "Completed": [_decoded("result", "receipt")],
    "LimitIn": _LIMIT,
    "QueueLimitIn": _LIMIT,
    "ScheduleIn": [
        {
            "oneOf": [
                _fields("cron", cron=_TEXT, every=_NULL, at=_NULL),
                _fields("every", every=_MOMENT, cron=_NULL, at=_NULL),
                _fields(
                    "at", at=_MOMENT, cron=_NULL, every=_NULL, start=_NULL, end=_NULL, repeats=_NULL
                ),
            ]
        },
        {
            "anyOf": [
                _fields("zone", zone=_TEXT),
                _fields(at=_IN_A_ZONE, start=_IN_UTC, end=_IN_A_ZONE),
                _fields("every", every={"type": "number"}, start=_IN_A_ZONE, end=_IN_A_ZONE),
            ]
        },
    ],
}
"""The rules of each schema. All rules must hold."""

NEVER_EMPTY = frozenset({"AlterIn"})
"""Schemas without a required field whose rules refuse an empty object."""
