"""The documentation page of the API: its description in plain HTML, with examples for curl."""

from __future__ import annotations

from html import escape
from typing import Any

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
    """The whole page."""
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
_BOUNDS = {
    "minimum": "at least",
    "maximum": "at most",
    "maxLength": "at most",
    "maxItems": "at most",
}


def _values(schema: dict[str, Any]) -> str:
    """The values of a field, in plain words."""
    if "enum" in schema:
        return ", ".join(schema["enum"])
    if "type" not in schema:
        kinds = schema.get("anyOf", ())
        if "default" in schema:  # null is the same as a missing field
            kinds = [kind for kind in kinds if kind != {"type": "null"}]
        return " or ".join(map(_values, kinds)) or "any JSON"
    text: str = _KINDS.get(schema["type"], schema["type"])
    if "items" in schema:
        text = f"list of: {_values(schema['items'])}"
    elif schema.get("format") == "date-time":
        text = "time (RFC 3339)"
    bounds = [f"{word} {schema[key]:,.12g}" for key, word in _BOUNDS.items() if key in schema]
    return ", ".join([text, *bounds])
