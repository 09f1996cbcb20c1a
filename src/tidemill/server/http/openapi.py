"""The description of the API, made from the declarations of its endpoints.

Programs read it as OpenAPI 3.1. People read it as a page in plain HTML, with examples for curl.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from html import escape
from typing import Any

import msgspec

from tidemill import __version__
from tidemill.server.http.endpoints import Endpoint, Raw, Stream
from tidemill.server.http.problems import KINDS, PREFIX, ProblemBody
from tidemill.server.http.schemas.rules import RULES
from tidemill.server.http.schemas.types import BINDING, NAME, TOPIC

_REF = "#/components/schemas/{name}"

_ALWAYS = (400, 401, 403, 429, 500, 501, 503)
"""Statuses that every endpoint may answer, besides the statuses that the endpoint declares."""


_DONE = {200: "Done", 201: "Created", 202: "The job has not ended yet", 204: "Done"}
_NOT_CREATED = "Nothing was created: the job exists already, or another job replaces it"


def describe(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The document for programs."""
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


# -- the page for people -------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 20%, transparent) }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code, pre { font: 14px/1.45 ui-monospace, monospace }
pre { padding: .7rem 1rem; border: 1px solid var(--line); border-radius: 6px; overflow-x: auto }
h2 { margin-top: 2.5rem; text-transform: capitalize; border-bottom: 1px solid var(--line) }
summary { cursor: pointer; padding: .25rem 0 }
summary code b { display: inline-block; min-width: 4.2em }
td { padding: .15rem 1rem .15rem 0; vertical-align: top }
.role { opacity: .7; font-size: .85em }
"""

_START = """\
# put a message, take it, say that it is done
curl --json '{"order": 17}' localhost:8333/v1/queues/orders/messages
curl --json '{"queues": ["orders"], "timeout": 30}' localhost:8333/v1/reserve
curl -X POST localhost:8333/v1/reservations/RECEIPT/ack

# call a task by its name, and wait for its result
curl --json '{"task": "shop.thumbnail", "args": ["a.png"]}' localhost:8333/v1/jobs
curl 'localhost:8333/v1/jobs/ID/result?wait=30'
"""


def docs_page(description: dict[str, Any]) -> bytes:
    """The page for people."""
    schemas = description["components"]["schemas"]
    sections: dict[str, list[str]] = {}
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            entry = _entry(f"<b>{method.upper()}</b> {escape(path)}", operation, schemas)
            sections.setdefault(operation["tags"][0], []).append(entry)
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width'><title>tidemill</title>",
        f"<style>{_STYLE}</style><h1>tidemill {escape(description['info']['version'])}</h1>",
        "<p>A job server. Machines read <a href=/v1/openapi.json>/v1/openapi.json</a>; ",
        "with tokens, every request has the header <code>Authorization: Bearer TOKEN</code>.</p>",
        f"<pre>{escape(_START)}</pre>",
    ]
    for section, entries in sections.items():
        parts += [f"<h2>{escape(section)}</h2>", *entries]
    return "".join([*parts, "</html>"]).encode()


def _entry(call: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    given = [it for it in operation["parameters"] if it["in"] == "query"]
    rows = [_row("query", it["name"], it["schema"], it["required"]) for it in given]
    if body := operation.get("requestBody"):
        schema = body["content"]["application/json"]["schema"]
        fields = schemas[schema["$ref"].rpartition("/")[2]] if schema else {}
        for name, part in fields.get("properties", {}).items():
            rows.append(_row("body", name, part, name in fields.get("required", ())))
        if not schema:
            rows.append("<tr><td>body<td>any JSON, or any bytes with another Content-Type")
    return (
        f"<details><summary><code>{call}</code> {escape(operation['summary'])} "
        f"<span class=role>{operation['x-role']}</span></summary>"
        f"<p>{escape(operation.get('description', ''))}</p><table>{''.join(rows)}</table></details>"
    )


def _row(where: str, name: str, schema: dict[str, Any], needed: bool) -> str:
    need = " (required)" if needed else ""
    return f"<tr><td>{where}<td><code>{escape(name)}</code>{need}<td>{escape(_values(schema))}"


_KINDS = {"boolean": "true or false", "integer": "whole number", "string": "text"}
_BOUNDS = {"minimum": "at least"} | dict.fromkeys(("maximum", "maxLength", "maxItems"), "at most")


def _values(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(schema["enum"])
    if "type" not in schema:
        kinds = schema.get("anyOf", ())
        if "default" in schema:  # null is the same as a missing field
            kinds = [kind for kind in kinds if kind != {"type": "null"}]
        return " or ".join(map(_values, kinds)) or "any JSON"
    text = str(_KINDS.get(schema["type"], schema["type"]))
    if "items" in schema:
        text = f"list of: {_values(schema['items'])}"
    elif schema.get("format") == "date-time":
        text = "time (RFC 3339)"
    bounds = [f"{word} {schema[key]:,.12g}" for key, word in _BOUNDS.items() if key in schema]
    return ", ".join([text, *bounds])
