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
    *("store", "gate", "moves", "room", "keys", "limits", "lanes", "changes", "hands", "carry"),
    *("flows", "wake", "puts", "backoff", "unknown", "verdicts", "timers", "schedules"),
)
_VERBS = {
    "put": "",
    "put_one": "",
    "adopt": "",
    "schedule": "",
    "unschedule": "'allow-oom'",
    "look": "'no-writes'",
    "open": "'allow-oom'",
    "exchange": "'allow-oom'",
    "exchange_kept": "",
    "exchange_pressed": "'allow-oom'",
    "owner": "'allow-oom'",
    "act": "'allow-oom'",
    "named": "'allow-oom'",
    "limit": "'allow-oom'",
    "move": "'allow-oom'",
    "tick": "'allow-oom'",
    "watch": "'allow-oom'",
}
"""Flags. Settling must go on when the server is out of memory; accepting must not.

A step that has something to keep is refused then, and done once more under pressure: see room.lua.
"""
_EXCHANGE = ("exchange", "taking", "answer")
_FILES = {
    "exchange": _EXCHANGE,
    "exchange_kept": _EXCHANGE,
    "exchange_pressed": ("pressed", *_EXCHANGE),
    "unschedule": ("schedule",),
    "act": ("kick", "purge", "act"),
    "named": ("kick", "named"),
}
"""What a verb is made of, if not of the file of its name."""

_FUNCTION = """
redis.register_function{{function_name = '{name}_{verb}', flags = {{{flags}}}, callback = function(keys, args)
{begin}(keys, args)
{body}
end}}
"""  # noqa: E501 - one line, so that line numbers in the server's errors are easily told


_LOADED = """
redis.register_function{{function_name = '{name}_loaded', description = '{time:.0f}',
callback = function() return '{time:.0f}' end}}
"""


class Library:
    """The text, and the names of its functions."""

    def __init__(self) -> None:
        files = resources.files("tidemill.brokers.redis") / "lua"
        bodies = {verb: _FILES.get(verb, (verb,)) for verb in _VERBS}
        names = dict.fromkeys((*_PARTS, *(name for body in bodies.values() for name in body)))
        texts = {name: (files / f"{name}.lua").read_text("utf-8") for name in names}
        whole = "".join(texts.values()) + repr(_VERBS)
        self.name = "tidemill_" + hashlib.sha256(whole.encode()).hexdigest()[:12]
        parts = [f"#!lua name={self.name}\n", *(texts[name] for name in _PARTS)]
        for verb, flags in _VERBS.items():
            begin = "begin_lightly" if verb == "put_one" else "begin"
            facts = {"name": self.name, "verb": verb, "flags": flags, "begin": begin}
            body = "".join(texts[name] for name in bodies[verb])
            parts.append(_FUNCTION.format(**facts, body=body))
        self._text = "".join(parts)
        self._functions = {verb: f"{self.name}_{verb}".encode() for verb in _VERBS}

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
