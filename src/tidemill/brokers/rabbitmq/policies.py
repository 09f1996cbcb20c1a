"""Policies of the server that can destroy accepted jobs: for ``tidemill doctor``.

AMQP does not report policies, so this module reads them from the management plugin.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any

from tidemill.brokers.contract.inspection import Danger, ServerPolicies
from tidemill.brokers.network.address import opener_without_redirects
from tidemill.brokers.rabbitmq.layout import Names
from tidemill.brokers.rabbitmq.settings import Settings

_PORT, _TLS_PORT = 15672, 15671

_WITHIN = 3.0  # seconds within which the management plugin must answer

_COLUMNS = "name,policy,operator_policy,effective_policy_definition"

_TAKES_OUT = ("delivery-limit", "message-ttl")

Rows = list[dict[str, Any]]


def examine(settings: Settings, names: Names) -> ServerPolicies:
    """Find dangers of loss for all queues under the prefix."""
    rows: Rows | None = None
    seen = ""
    for base in _addresses(settings):
        try:
            rows, seen = _read(settings, base, names), f"read from {base}"
            break
        except (OSError, ValueError) as error:
            seen = seen or f"cannot be read: the management plugin at {base} says: {error}"
    return ServerPolicies(seen, list(of_policies(rows or [], names)))


def _addresses(settings: Settings) -> list[str]:
    if settings.management:
        return [settings.management.rstrip("/")]
    scheme, port = ("https", _TLS_PORT) if settings.tls is not None else ("http", _PORT)
    hosts = [f"[{host}]" if ":" in host else host for host, _ in settings.hosts]
    return [f"{scheme}://{host}:{port}" for host in hosts]


def _read(settings: Settings, base: str, names: Names) -> Rows:
    """The queues under the prefix, each with its policy in force."""
    import urllib.parse
    import urllib.request

    vhost = urllib.parse.quote(settings.vhost, safe="")
    login = base64.b64encode(f"{settings.user}:{settings.password}".encode()).decode()
    request = urllib.request.Request(
        f"{base}/api/queues/{vhost}?columns={_COLUMNS}", headers={"Authorization": f"Basic {login}"}
    )
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if settings.tls is not None:
        handlers.append(urllib.request.HTTPSHandler(context=settings.context()))
    with opener_without_redirects(*handlers).open(request, timeout=_WITHIN) as answer:
        rows = json.load(answer)
    if not isinstance(rows, list):
        raise ValueError("the answer is no list of queues")
    ours = [row for row in rows if str(row.get("name")).startswith(f"{names.prefix}.")]
    if ours and not any("effective_policy_definition" in row for row in ours):
        raise ValueError("the answer has no policies; the plugin's statistics may be off")
    return ours


def of_policies(rows: Rows, names: Names) -> Iterator[Danger]:
    """The dangers of the policies in force for these queues; the rows are from the plugin."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        name, policy = str(row["name"]), str(row.get("policy") or row.get("operator_policy"))
        for key, does in _harm(row, name.removeprefix(f"{names.prefix}."), names):
            found.setdefault((policy, key, does), []).append(name)
    for (policy, key, does), places in sorted(found.items()):
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        text = f"policy {policy!r} with {key} {does}: {places[0]}{more}"
        advice = f"take {key} out of the policy, or let its pattern leave out {names.prefix}."
        yield Danger(text, advice)


_DELETES = "deletes an unused queue with all that is in it"
_FORGETS = "forgets failed jobs early"
_FAILS = "makes delayed jobs fail"


def _harm(row: Mapping[str, Any], name: str, names: Names) -> Iterator[tuple[str, str]]:
    """The harmful settings of a queue's policy, each with its harm."""
    # A queue of jobs refuses messages without room, and its other messages go to the failed jobs
    # (:func:`.layout.safe`). So a policy harms it only by ``expires``.
    policy: Mapping[str, Any] = row.get("effective_policy_definition") or {}
    kind = name.partition(".")[0]
    if "expires" in policy:
        yield "expires", _DELETES
    if kind == "failed":
        ours = names.failed.arguments
        if "delivery-limit" in policy:  # each look at the failed jobs counts as a delivery
            yield "delivery-limit", _FORGETS
        for key in ("message-ttl", "max-length"):
            if policy.get(key, ours[f"x-{key}"]) < ours[f"x-{key}"]:
                yield key, _FORGETS
        if "max-length-bytes" in policy:
            yield "max-length-bytes", _FORGETS
    elif kind in ("timer", "timers"):
        yield from ((key, _FAILS) for key in _TAKES_OUT if key in policy)
