"""The effect of the server's settings on jobs: facts for ``tidemill info`` and ``doctor``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_AOF = {
    "always": "accepted jobs survive a power cut: appendfsync is always",
    "everysec": "accepted jobs survive kill -9; a power cut may lose the jobs of the last "
    "second (appendfsync is everysec)",
    "no": "accepted jobs survive kill -9 of the server; a power cut may lose the jobs that the "
    "system has not written yet (appendfsync is no)",
    "": "the append-only file is on; the server does not tell how often it is synced",
}
_NO_AOF = (
    "the append-only file is off: when the server restarts, jobs since the last snapshot are lost"
)


def read_info(text: bytes) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in text.decode(errors="replace").splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def evicts(info: Mapping[str, str]) -> bool:
    """True when the server throws keys away once its memory is full."""
    has_limit = int(info.get("maxmemory", "0")) > 0
    return has_limit and info.get("maxmemory_policy", "noeviction") != "noeviction"


def server_facts(
    info: Mapping[str, str], settings: Mapping[str, str], wanted: int
) -> dict[str, Any]:
    """Collect facts from INFO, and from CONFIG GET where the server allows it."""
    # ``wanted`` is the number of replicas that puts wait for.
    on = info.get("aof_enabled") == "1"
    every = settings.get("appendfsync", "")
    facts: dict[str, Any] = {
        "server": f"{info.get('server_name', 'redis')} {version_of(info)}",
        "durable": on,
        "durability": _AOF.get(every, _AOF[""]) if on else _NO_AOF,
        "appendonly": "yes" if on else "no",
        "appendfsync": every or "unknown",
        "memory_bytes": int(info.get("used_memory", "0")),
        "maxmemory_bytes": int(info.get("maxmemory", "0")),
        "clients": int(info.get("connected_clients", "0")),
        "replicas": int(info.get("connected_slaves", "0")),
    }
    advice = []
    if wanted:
        facts["replicas_wanted"] = wanted
        facts["durability"] += f"; puts wait for replicas: {wanted}"
    if facts["replicas"] < wanted:
        facts["durable"] = False
        facts["durability"] = (
            f"replicas={wanted} in the url, and {facts['replicas']} of them connected: "
            "every put is refused"
        )
        advice.append("replicas that follow this server, or a smaller replicas= in the url")
    if not on:
        advice.append("appendonly yes in redis.conf")
    if evicts(info):
        policy = info.get("maxmemory_policy")
        facts["durable"] = False
        facts["durability"] = f"maxmemory-policy is {policy}: the server may throw jobs away"
        advice.insert(0, "maxmemory-policy noeviction in redis.conf")
    if advice:
        facts["durability_advice"] = ", ".join(advice)
    return facts


def version_of(info: Mapping[str, str]) -> str:
    """The server's version. Valkey also reports a Redis version, with which it is compatible."""
    return info.get("valkey_version") or info.get("redis_version", "0")
