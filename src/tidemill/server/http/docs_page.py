"""The documentation page of the API, in plain HTML, with examples for curl."""

from __future__ import annotations

import datetime as dt
import html
import inspect
import types
import typing
from collections.abc import Sequence
from typing import Any

import msgspec

from tidemill import __version__
from tidemill.server.http.endpoints import Endpoint, Raw

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


def docs_page(endpoints: Sequence[Endpoint]) -> bytes:
    """The whole page."""
    sections: dict[str, list[Endpoint]] = {}
    for endpoint in endpoints:
        section = endpoint.handler.__module__.rpartition(".")[2]
        sections.setdefault(section, []).append(endpoint)
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width'><title>tidemill</title>",
        f"<style>{_STYLE}</style><h1>tidemill {html.escape(__version__)}</h1>",
        "<p>A job server. Machines read <a href=/v1/openapi.json>/v1/openapi.json</a>; ",
        "with tokens, every request has the header <code>Authorization: Bearer TOKEN</code>.</p>",
        f"<pre>{html.escape(_START)}</pre>",
    ]
    for section, found in sections.items():
        parts.append(f"<h2>{html.escape(section)}</h2>")
        parts += [_entry(endpoint) for endpoint in found]
    return "".join([*parts, "</html>"]).encode()


def _entry(endpoint: Endpoint) -> str:
    summary, _, more = (inspect.getdoc(endpoint.handler) or "").partition("\n")
    rows = _rows("query", endpoint.query)
    if endpoint.body is Raw:
        rows += "<tr><td>body<td>any JSON, or any bytes with another Content-Type"
    else:
        rows += _rows("body", endpoint.body)
    return (
        f"<details><summary><code><b>{endpoint.method}</b> {html.escape(endpoint.path)}</code> "
        f"{html.escape(summary)} <span class=role>{endpoint.role.name.lower()}</span></summary>"
        f"<p>{html.escape(' '.join(more.split()))}</p><table>{rows}</table></details>"
    )


def _rows(what: str, struct: type[msgspec.Struct] | None) -> str:
    if struct is None:
        return ""
    rows = []
    for field in msgspec.structs.fields(struct):
        need = " (required)" if field.required else ""
        rows.append(
            f"<tr><td>{what}<td><code>{html.escape(field.encode_name)}</code>{need}"
            f"<td>{html.escape(_kind_text(field.type))}"
        )
    return "".join(rows)


_PLAIN = {
    Any: "any JSON",
    bool: "true or false",
    float: "number",
    int: "whole number",
    str: "text",
    dt.datetime: "time (RFC 3339)",
}


def _kind_text(kind: Any) -> str:
    """The values of a field, in plain words."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        kind = int if any(meta.multiple_of == 1 for meta in parts[1:]) else parts[0]
        return _kind_text(kind) + "".join(map(_bounds, parts[1:]))
    if origin is typing.Literal:
        return ", ".join(map(str, parts))
    if origin in (typing.Union, types.UnionType):
        kinds = [_kind_text(part) for part in parts if part not in (type(None), msgspec.UnsetType)]
        return " or ".join(kinds) + (" or null" if msgspec.UnsetType in parts else "")
    if origin is list:
        return f"list of: {_kind_text(parts[0])}"
    return _PLAIN.get(kind, "object")


def _bounds(meta: msgspec.Meta) -> str:
    if meta.le is not None:
        return f", {meta.ge or 0:,.12g} to {meta.le:,.12g}"
    if meta.ge is not None:
        return f", {meta.ge:,.12g} at least"
    return f", {meta.max_length:,} at most" if meta.max_length is not None else ""
