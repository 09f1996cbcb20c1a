"""The Lua files as one library of server functions, named after a hash of its text.

A script would define all its parts again at every call. A process loads the library when the server
lacks it, and removes libraries that were loaded more than a day before (:func:`outdated`). A
process that still uses such a library loads it again: ``docs/design/redis.md``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import Any

LIBRARIES = b"tidemill_*"  # the pattern of the names of all tidemill libraries, of any version
_YOUNG = 86400.0  # seconds for which a library stays: another version may run beside this one

_PARTS = (
    *("layout", "limiter", "transitions", "unique", "limits", "partitions"),
    *("limit_changes", "partition_claim", "workflows", "wakeup", "handoff", "put_accept"),
    *("backoff", "settle", "leases", "due", "schedules"),
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
    },
    ("owners",): {"owners": "'allow-oom'"},
    ("admin_retry", "admin_alter", "admin"): {"admin": "'allow-oom'"},
    ("admin_retry", "job_numbers"): {"job_numbers": "'allow-oom'"},
    ("set_limit",): {"set_limit": "'allow-oom'"},
    ("transfer",): {"transfer": "'allow-oom'"},
    ("history", "housekeeping"): {
        "history": "'no-writes'",
        "history_change": "'allow-oom'",
        "housekeeping": "'allow-oom'",
    },
    ("waits",): {"waits": "'allow-oom'"},
}
"""Files, and the server functions that they make, with their flags.

A server that is out of memory must still settle jobs, but accepts no new jobs. It refuses a step
with verdicts or notes. The client then sends a shorter step by ``exchange``: see
``out_of_memory.py``.
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
    """The text of the library, and the names of its functions."""

    def __init__(self) -> None:
        files = resources.files("tidemill.brokers.redis") / "lua"
        verbs = {name: flags for made in _VERBS.values() for name, flags in made.items()}
        names = dict.fromkeys((*_PARTS, *(name for some in _VERBS for name in some)))
        texts = {name: (files / f"{name}.lua").read_text("utf-8") for name in names}
        whole = "".join(texts.values()) + repr(_VERBS) + _FUNCTION
        self.name = "tidemill_" + hashlib.sha256(whole.encode()).hexdigest()[:12]
        parts = [f"#!lua name={self.name}\n", *(texts[name] for name in _PARTS)]
        for some, made in _VERBS.items():
            # Each file is a block of Lua, since a Lua function has at most 200 local names.
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
        """The text to load, with a function that tells the time of loading."""
        return (self._text + _LOADED.format(name=self.name, time=time)).encode()


def outdated(listed: Sequence[Sequence[Any]], time: float) -> list[bytes]:
    """The names of the libraries to remove, from the answer to FUNCTION LIST."""
    found = []
    for library in map(_pairs, listed):
        name = library[b"library_name"]
        loaded = [
            float(function[b"description"] or 0)
            for function in map(_pairs, library[b"functions"])
            if function[b"name"] == name + b"_loaded"
        ]
        # Libraries of old versions of tidemill have no time of loading, and are removed.
        if name != LIBRARY.name.encode() and time - max(loaded, default=0.0) > _YOUNG:
            found.append(name)
    return found


def _pairs(flat: Sequence[Any]) -> dict[bytes, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


LIBRARY = Library()
