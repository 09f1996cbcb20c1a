"""The description of the API (OpenAPI 3.1), made of the declarations that it is served by."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import msgspec

from tidemill import __version__
from tidemill.server.endpoints import Document, Endpoint, Raw, Stream
from tidemill.server.problems import KINDS, ProblemBody

__all__ = ["describe"]

_REF = "#/components/schemas/{name}"

_ALWAYS = (400, 401, 403, 429, 503)
"""What any endpoint may answer, besides what it says itself."""


def describe(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The whole document."""
    types: list[Any] = [ProblemBody]
    for endpoint in endpoints:
        types += [endpoint.query] if endpoint.query else []
        types += [endpoint.body] if endpoint.body not in (None, Raw) else []
        types += [endpoint.answer] if _is_schema(endpoint.answer) else []
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    known = dict(zip(map(repr, types), schemas, strict=True))
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        operation = _operation(endpoint, known, components)
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tidemill",
            "version": __version__,
            "description": "Jobs over HTTP. Durations are seconds, times epoch seconds.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def _is_schema(answer: Any) -> bool:
    return answer is not None and answer not in (Stream, Document, type(None))


def _operation(
    endpoint: Endpoint, known: dict[str, Any], components: dict[str, Any]
) -> dict[str, Any]:
    summary, _, more = (inspect.getdoc(endpoint.handler) or "").partition("\n")
    operation: dict[str, Any] = {
        "operationId": endpoint.handler.__name__,
        "summary": summary.rstrip("."),
        "tags": [endpoint.handler.__module__.rpartition(".")[2]],
        "x-role": endpoint.role.name.lower(),
        "parameters": [_in_path(name) for name in endpoint.names],
        "responses": {str(endpoint.status): _answer(endpoint, known)},
    }
    if more.strip():
        operation["description"] = " ".join(more.split())
    if endpoint.query is not None:
        operation["parameters"] += _in_query(endpoint.query, components)
    if endpoint.body is Raw:
        content: dict[str, Any] = {"application/json": {"schema": {}}}
        content["application/octet-stream"] = {}
        operation["requestBody"] = {"required": True, "content": content}
    elif endpoint.body is not None:
        schema = known[repr(endpoint.body)]
        operation["requestBody"] = {
            "required": not _may_be_empty(endpoint.body),
            "content": {"application/json": {"schema": schema}},
        }
    always = (*_ALWAYS, 413, 415, 408) if endpoint.body is not None else _ALWAYS
    for status in sorted({*always, *endpoint.also, *((404,) if endpoint.names else ())}):
        if status < 300:
            operation["responses"][str(status)] = operation["responses"][str(endpoint.status)]
        else:
            operation["responses"][str(status)] = _problem(status)
    return operation


def _may_be_empty(body: Any) -> bool:
    return not any(field.required for field in msgspec.structs.fields(body))


def _in_path(name: str) -> dict[str, Any]:
    schema = {"type": "string", "minLength": 1, "maxLength": 200}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _in_query(query: Any, components: dict[str, Any]) -> list[dict[str, Any]]:
    shape = components[query.__name__]
    return [
        {"name": name, "in": "query", "required": name in shape.get("required", ()), "schema": part}
        for name, part in shape["properties"].items()
    ]


def _answer(endpoint: Endpoint, known: dict[str, Any]) -> dict[str, Any]:
    if endpoint.answer is Stream:
        return {"description": "Server-sent events", "content": {"text/event-stream": {}}}
    if not _is_schema(endpoint.answer):
        if endpoint.answer is Document:
            return {"description": "Done", "content": {"application/json": {}}}
        return {"description": "Done"}
    schema = known[repr(endpoint.answer)]
    return {"description": "Done", "content": {"application/json": {"schema": schema}}}


def _problem(status: int) -> dict[str, Any]:
    titles = [kind.title for kind in KINDS.values() if kind.status == status]
    schema = {"$ref": _REF.format(name=ProblemBody.__name__)}
    return {
        "description": "; ".join(titles),
        "content": {"application/problem+json": {"schema": schema}},
    }
