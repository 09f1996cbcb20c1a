"""The OpenAPI 3.1 description of the API, made from the declarations of its endpoints."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import msgspec

from tidemill import __version__
from tidemill.server.http.call import Stream
from tidemill.server.http.endpoints import Endpoint, Raw
from tidemill.server.http.problems import KINDS, PREFIX, ProblemBody
from tidemill.server.http.schemas.rules import RULES
from tidemill.server.http.schemas.types import BINDING, NAME, TOPIC

_REF = "#/components/schemas/{name}"

_ALWAYS = (400, 401, 403, 429, 500, 501, 503)
"""Statuses that every endpoint may answer, besides the statuses that the endpoint declares."""


_DONE = {200: "Done", 201: "Created", 202: "The job has not ended yet", 204: "Done"}
_NOT_CREATED = "Nothing was created: the job exists already, or another job replaces it"


def describe(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The whole document."""
    types: list[Any] = [ProblemBody]
    for endpoint in endpoints:
        types += [endpoint.query] if endpoint.query else []
        types += [endpoint.body] if endpoint.body not in (None, Raw) else []
        types += [endpoint.answer] if _is_schema(endpoint.answer) else []
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    known = dict(zip(map(repr, types), schemas, strict=True))
    components = {name: _clear(component) for name, component in components.items()}
    for name, rules in RULES.items():
        components[name]["allOf"] = rules
    components[ProblemBody.__name__]["properties"]["type"]["examples"] = [PREFIX + k for k in KINDS]
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


def _clear(part: Any) -> Any:
    """A schema with the types that client generators need, and texts without indentation."""
    if isinstance(part, list):
        return [_clear(each) for each in part]
    if not isinstance(part, dict):
        return part
    clear = {name: _clear(value) for name, value in part.items()}
    if clear.get("format") == "name":
        clear["pattern"] = NAME
    if clear.get("multipleOf") == 1:
        del clear["multipleOf"]
        clear["type"] = "integer"
    if isinstance(clear.get("enum"), list):
        clear = {"type": "string", **clear}
    if isinstance(clear.get("description"), str):
        clear["description"] = inspect.cleandoc(clear["description"]).replace("``", "`")
    return clear


def _is_schema(answer: Any) -> bool:
    return answer is not None and answer not in (Stream, type(None))


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
        "responses": {str(endpoint.status): _answer(endpoint, known, endpoint.status)},
    }
    if more.strip():
        operation["description"] = " ".join(more.split()).replace("``", "`")
    if endpoint.query is not None:
        operation["parameters"] += _in_query(endpoint.query, components)
    if endpoint.body is Raw:
        content: dict[str, Any] = {"application/json": {"schema": {}}}
        content["application/octet-stream"] = {}
        operation["requestBody"] = {"required": True, "content": content}
    elif endpoint.body is not None:
        schema = known[repr(endpoint.body)]
        operation["requestBody"] = {
            "required": not endpoint.may_be_empty,
            "content": {"application/json": {"schema": schema}},
        }
    always = (*_ALWAYS, 413, 415, 408) if endpoint.body is not None else _ALWAYS
    for status in sorted({*always, *endpoint.also, *((404,) if endpoint.names else ())}):
        if status < 300:
            operation["responses"][str(status)] = _answer(endpoint, known, status)
        else:
            operation["responses"][str(status)] = _problem(status)
    return operation


def _in_path(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "minLength": 1}
    if name != "receipt":
        pattern = {"topic": TOPIC, "pattern": BINDING}.get(name, NAME)
        schema |= {"maxLength": 200, "format": "name", "pattern": pattern}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _in_query(query: Any, components: dict[str, Any]) -> list[dict[str, Any]]:
    shape = components[query.__name__]
    needed = shape.get("required", ())
    found = []
    for name, part in shape["properties"].items():
        parameter = {"name": name, "in": "query", "required": name in needed}
        if "description" in part:
            parameter["description"] = part["description"]
        found.append({**parameter, "schema": _given(part)})
    return found


def _given(part: dict[str, Any]) -> dict[str, Any]:
    """The schema of a query parameter, without null: a query cannot contain null."""
    kinds = [kind for kind in part.get("anyOf", ()) if kind != {"type": "null"}]
    if len(kinds) == 1:
        return dict(kinds[0])
    return {key: value for key, value in part.items() if key != "description"}


def _answer(endpoint: Endpoint, known: dict[str, Any], status: int) -> dict[str, Any]:
    done = _NOT_CREATED if status == 200 and endpoint.status == 201 else _DONE[status]
    if endpoint.answer is Stream:
        return {"description": "Server-sent events", "content": {"text/event-stream": {}}}
    if not _is_schema(endpoint.answer):
        return {"description": done}
    schema = known[repr(endpoint.answer)]
    return {"description": done, "content": {"application/json": {"schema": schema}}}


def _problem(status: int) -> dict[str, Any]:
    titles = [kind.title for kind in KINDS.values() if kind.status == status]
    schema = {"$ref": _REF.format(name=ProblemBody.__name__)}
    problem = {
        "description": "; ".join(titles),
        "content": {"application/problem+json": {"schema": schema}},
    }
    if status == 429:
        seconds = {"description": "Seconds to wait", "schema": {"type": "integer"}}
        problem["headers"] = {"Retry-After": seconds}
    return problem
