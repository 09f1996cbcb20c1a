"""Routes: the function that answers each method and path."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple
from urllib.parse import quote

from starlette.responses import Response
from starlette.routing import compile_path

from tidemill.dashboard.roles import Role

Handler = Callable[..., Response]


class Route(NamedTuple):
    """A method, a path such as ``/queues/{name}/pause``, and the function that answers."""

    method: str
    pattern: re.Pattern[str]
    path: str
    handler: Handler
    role: Role | None  # the least role; None allows requests without a user, too


class Routes:
    """The routes of one module of pages.

    Each function takes a :class:`~tidemill.dashboard.page.Page` and the parts of its path by name.
    ``{name}`` is one part of a path, decoded; ``{name:path}`` is the rest, with slashes.
    """

    def __init__(self) -> None:
        self.list: list[Route] = []

    def get(self, path: str, role: Role | None = Role.VIEWER) -> Callable[[Handler], Handler]:
        """Declare the function that shows a page; it changes nothing."""
        return self._add("GET", path, role)

    def post(self, path: str, role: Role | None = Role.OPERATOR) -> Callable[[Handler], Handler]:
        """Declare the function of an action."""
        return self._add("POST", path, role)

    def _add(self, method: str, path: str, role: Role | None) -> Callable[[Handler], Handler]:
        def declare(handler: Handler) -> Handler:
            self.list.append(Route(method, compile_path(path)[0], path, handler, role))
            return handler

        return declare


def routes_at(routes: Iterable[Route], path: str) -> dict[str, tuple[Route, dict[str, str]]]:
    """The first route for each method of a path, with the values in the path."""
    found: dict[str, tuple[Route, dict[str, str]]] = {}
    for route in routes:
        if match := route.pattern.fullmatch(path):
            values = {name: _name_of(value) for name, value in match.groupdict().items()}
            found.setdefault(route.method, (route, values))
    return found


def part_of(name: str) -> str:
    """A name as one part of a path.

    Servers decode ``%2F`` before they match paths, so this module has its own escape for a slash.
    """
    text = name.replace("~", "~7E").replace("/", "~2F")
    return quote(text.replace(".", "~2E") if set(name) == {"."} else text, safe="@:+,~")


def _name_of(part: str) -> str:
    """The name in a decoded part of a path."""
    return part.replace("~2F", "/").replace("~2E", ".").replace("~7E", "~")
