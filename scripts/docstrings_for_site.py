"""Prepare our docstrings for the site: roles become links, and lists of names become rows.

A docstring says ``:class:`Limit``` for the name of a class. On the page of the API this becomes a
link, if that page has the name, and otherwise code. A line such as ``id, queue: …`` in a section of
attributes, arguments or errors becomes one line for each name.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

import tidemill

_ROLE = re.compile(r":(?:class|meth|func|mod|data|attr|exc):`([^`]+)`")
_ROW = re.compile(r"( +)(\w+(?:, \w+)+): (.*)")
_OPTIONS = "``docs/reference/options.md``", "[Options](options.md)"
_SECTIONS = ("Args:", "Attributes:", "Raises:")
_BELOW_APP = {"Schedules": "tidemill.schedules.declare", "Limits": "tidemill.client.limits"}
"""Classes whose methods users call as ``mill.schedules`` and ``mill.limits``."""


class Docstrings(griffe.Extension):
    """Changes each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring is not None:
            text = _ROLE.sub(lambda role: _link(role, obj), obj.docstring.value)
            obj.docstring.value = _rows(text.replace(*_OPTIONS))


def _link(role: re.Match[str], obj: griffe.Object) -> str:
    """A link to a public name, or the name as code."""
    name = role[1].removeprefix("~").removeprefix("tidemill.")
    head, _, member = name.partition(".")
    if ":meth:" in role[0] and not member:  # a method of the same class
        owner = obj if obj.is_class else obj.parent
        if owner is not None and owner.is_class and name in owner.members:
            head, member = owner.name, name
    if head in tidemill.__all__:
        path = f"tidemill.{head}"
    elif head in _BELOW_APP:
        path = f"{_BELOW_APP[head]}.{head}"
    else:
        return f"``{role[1].removeprefix('.')}``"
    return f"[`{name}`][{path}{f'.{member}' if member else ''}]"


def _rows(text: str) -> str:
    """The text with one line for each name in its sections."""
    lines: list[str] = []
    names: list[str] = []  # of the row that is read, if it has several names
    row: list[str] = []
    inside = False

    def flush() -> None:
        for name in names:
            lines.extend([row[0].replace("\0", name), *row[1:]])
        names.clear()

    for line in text.splitlines():
        found = _ROW.fullmatch(line) if inside else None
        if found is not None and len(found[1]) == 4:
            flush()
            names[:], row = found[2].split(", "), [f"    \0: {found[3]}"]
        elif names and line.startswith("     "):
            row.append(line)
        else:
            flush()
            lines.append(line)
        if not line.startswith(" ") and line:
            inside = line in _SECTIONS
    flush()
    return "\n".join(lines)
