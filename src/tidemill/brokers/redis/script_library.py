"""The Lua files as one library of functions, which the server keeps under a name of its contents.

Functions rather than scripts: a script defines anew at every call all that it is made of, which
took the server 45 of the 65 microseconds of a put. They are loaded when a server has none.

Each version of tidemill has a library of its own. Who loads one removes those that were loaded
more than a day before, see :func:`outdated`. A process that still uses one loads it again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import Any

__all__ = ["LIBRARIES", "LIBRARY", "Library", "outdated"]

LIBRARIES = b"tidemill_*"
"""The names of all libraries of tidemill's, of any version."""

_YOUNG = 86400.0
"""Seconds for which a library stays: an earlier version may run beside this one meanwhile."""

_PARTS = (
    *("layout", "limiter", "transitions", "out_of_memory", "unique", "limits", "partitions"),
    *("limit_changes", "partition_claim", "carrier", "workflows", "wakeup", "put_accept"),
    *("backoff", "unknown_tasks", "settle", "leases", "due", "schedules"),
)
"""Files that all verbs use, in the order of loading."""

_VERBS = {
    ("put",): {"put": ""},
    ("put_one",): {"put_one": ""},
    ("transfer_in",): {"transfer_in": ""},
    ("schedules_change",): {"schedules_change": "", "schedules_drop": "'allow-oom'"},
    ("inspect",): {"inspect": "'no-writes'"},
    ("open",): {"open": "'allow-oom'"},
    ("request", "report", "reply", "claim", "claim_queues", "exchange"): {
        "exchange": "'allow-oom'",
        "exchange_kept": "",
        "exchange_pressed": "'allow-oom'",
    },
    ("owners",): {"owners": "'allow-oom'"},
    ("admin_kick", "admin_purge", "admin"): {"admin": "'allow-oom'"},
    ("admin_kick", "job_numbers"): {"job_numbers": "'allow-oom'"},
    ("set_limit",): {"set_limit": "'allow-oom'"},
    ("transfer",): {"transfer": "'allow-oom'"},
    ("housekeeping",): {"housekeeping": "'allow-oom'"},
    ("waits",): {"waits": "'allow-oom'"},
}
"""Files, and the functions of the server that they make, with their flags.

Settling must go on when the server is out of memory; accepting must not. A step that has something
to keep is refused then, and is done once more under pressure: see ``out_of_memory.lua``.
"""

_FUNCTION = """
redis.register_function{{function_name = '{name}_{verb}', flags = {{{flags}}},
callback = function(keys, args) {begin}(keys, args) return Verbs.{verb}() end}}
"""


_LOADED = """
redis.register_function{{function_name = '{name}_loaded', description = '{time:.0f}',
callback = function() return '{time:.0f}' end}}
"""


class Library:
    """The text, and the names of its functions."""

    def __init__(self) -> None:
        files = resources.files("tidemill.brokers.redis") / "lua"
        verbs = {name: flags for made in _VERBS.values() for name, flags in made.items()}
        names = dict.fromkeys((*_PARTS, *(name for some in _VERBS for name in some)))
        texts = {name: (files / f"{name}.lua").read_text("utf-8") for name in names}
        whole = "".join(texts.values()) + repr(_VERBS) + _FUNCTION
        self.name = "tidemill_" + hashlib.sha256(whole.encode()).hexdigest()[:12]
        parts = [f"#!lua name={self.name}\n", *(texts[name] for name in _PARTS)]
        for some, made in _VERBS.items():
            # A block: one Lua function has room for 200 local names, and the library is one.
            parts += ["do\n", *(texts[name] for name in some), "end\n"]
            for verb, flags in made.items():
                begin = "begin_lightly" if verb == "put_one" else "begin"
                parts.append(_FUNCTION.format(name=self.name, verb=verb, flags=flags, begin=begin))
        self._text = "".join(parts)
        self._functions = {verb: f"{self.name}_{verb}".encode() for verb in verbs}

    def function(self, verb: str) -> bytes:
        """The name of a verb's function on the server."""
        return self._functions[verb]

    def text(self, time: float) -> bytes:
        """The text to load, with a function that tells when that was."""
        return (self._text + _LOADED.format(name=self.name, time=time)).encode()


def outdated(listed: Sequence[Sequence[Any]], time: float) -> list[bytes]:
    """The names of libraries to remove, of those that FUNCTION LIST tells."""
    found = []
    for library in map(_pairs, listed):
        name = library[b"library_name"]
        loaded = [
            float(function[b"description"] or 0)
            for function in map(_pairs, library[b"functions"])
            if function[b"name"] == name + b"_loaded"
        ]
        # libraries of versions before this rule do not tell when they were loaded
        if name != LIBRARY.name.encode() and time - max(loaded, default=0.0) > _YOUNG:
            found.append(name)
    return found


def _pairs(flat: Sequence[Any]) -> dict[bytes, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


LIBRARY = Library()
