"""The Lua files as one library of functions, which the server keeps under a name of its contents.

Functions rather than scripts: a script defines anew at every call all that it is made of, which
took the server 45 of the 65 microseconds of a put. They are loaded when a server has none.
"""

from __future__ import annotations

import hashlib
from importlib import resources

__all__ = ["LIBRARY", "Library"]

_PARTS = (
    *("store", "gate", "moves", "keys", "limits", "lanes", "hands", "carry", "flows"),
    *("wake", "puts", "verdicts", "timers", "schedules"),
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
    "owner": "'allow-oom'",
    "act": "'allow-oom'",
    "named": "'allow-oom'",
    "limit": "'allow-oom'",
    "move": "'allow-oom'",
    "tick": "'allow-oom'",
    "watch": "'allow-oom'",
}
"""Flags. Settling must go on when the server is out of memory; accepting must not."""
_FILES = {
    "exchange": ("exchange", "taking", "answer"),
    "unschedule": ("schedule",),
    "act": ("kick", "act"),
    "named": ("kick", "named"),
}
"""What a verb is made of, if not of the file of its name."""

_FUNCTION = """
redis.register_function{{function_name = '{name}_{verb}', flags = {{{flags}}}, callback = function(keys, args)
{begin}(keys, args)
{body}
end}}
"""  # noqa: E501 - one line, so that line numbers in the server's errors are easily told


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
        self.text = "".join(parts).encode()
        self._functions = {verb: f"{self.name}_{verb}".encode() for verb in _VERBS}

    def function(self, verb: str) -> bytes:
        """The name of a verb's function on the server."""
        return self._functions[verb]


LIBRARY = Library()
