"""``Schedule.objects`` of django-q, with the methods that projects call when they start.

Schedule.objects.update_or_create(name="clean", defaults={"func": "shop.tasks.clean", …})
Schedule.objects.filter(name="clean").delete()
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from tidemill.django.project import project_mill
from tidemill.django.q.calls import path_of
from tidemill.django.q.schedules import Kinds, schedule
from tidemill.errors import InvalidOption, ScheduleExists, ScheduleNotFound
from tidemill.schedules.declare import Schedule as Stored


class Some:
    """Some schedules: the schedules of a name, of a function, or all."""

    def __init__(self, name: str | None = None, func: str | None = None) -> None:
        self._name = name
        self._func = func

    def __iter__(self) -> Iterator[Stored]:
        for each in project_mill().schedules:
            of_func = self._func is None or _function_of(each) == self._func
            if of_func and self._name in (None, each.name):
                yield each

    def filter(self, *, name: str | None = None, func: Any = None) -> Some:
        """These schedules, narrowed to a name or a function."""
        path = None if func is None else path_of(func)
        return Some(name if name is not None else self._name, path or self._func)

    def all(self) -> Some:
        """These schedules."""
        return self

    def exists(self) -> bool:
        """True when there is at least one of these schedules."""
        return self.first() is not None

    def first(self) -> Stored | None:
        """One of the schedules, or None."""
        return next(iter(self), None)

    def count(self) -> int:
        """The number of the schedules."""
        return sum(1 for _ in self)

    def delete(self) -> tuple[int, dict[str, int]]:
        """Remove the schedules; returns their number twice, in the form that Django returns."""
        names = [each.name for each in self]
        for name in names:
            project_mill().schedules.remove(name)
        return len(names), {"django_q.Schedule": len(names)}


class Objects(Some):
    """All schedules, and the methods that make a schedule."""

    def create(self, **values: Any) -> Stored:
        """Add a schedule.

        Raises:
            ScheduleExists: a schedule has this name.
        """
        return _make(values)

    def get(self, *, name: str) -> Stored:
        """The schedule of a name.

        Raises:
            ScheduleNotFound: no schedule has this name.
        """
        return project_mill().schedules.get(name)

    def get_or_create(self, defaults: Any = None, **values: Any) -> tuple[Stored, bool]:
        """The schedule of this name or function, and True if this call has made the schedule."""
        found = self._like(values)
        if found is not None:
            return found, False
        try:
            return _make({**values, **(defaults or {})}), True
        except ScheduleExists:  # another process has just added the schedule
            return self.get(name=values["name"]), False

    def update_or_create(self, defaults: Any = None, **values: Any) -> tuple[Stored, bool]:
        """Make the schedule of this name or function again; return it, and True if none existed."""
        found = self._like(values)
        given = {**values, **(defaults or {})}
        if found is not None:
            given.setdefault("name", found.name)
            given.setdefault("func", _function_of(found))
            try:
                project_mill().schedules.remove(found.name)
            except ScheduleNotFound:
                pass  # another process has removed the schedule
        return _make(given), found is None

    def _like(self, values: dict[str, Any]) -> Stored | None:
        if not values.keys() & {"name", "func"}:
            raise InvalidOption("a schedule is found by its name= or func=")
        by_name = values.get("name")
        return self.filter(name=by_name, func=None if by_name else values["func"]).first()


class Schedule(Kinds):
    """The kinds of schedules, and ``Schedule.objects``."""

    objects = Objects()


def _make(values: dict[str, Any]) -> Stored:
    """Add a schedule from the fields of django-q's model, where arguments are texts."""
    given = dict(values)
    func = given.pop("func")
    args = _literal(given.pop("args", None) or "()")
    kwargs = given.pop("kwargs", None) or {}
    args = args if isinstance(args, tuple) else (args,)
    return schedule(func, *args, **_keywords(kwargs), **given)


def _literal(text: Any) -> Any:
    return ast.literal_eval(text) if isinstance(text, str) else text


def _keywords(text: Any) -> dict[str, Any]:
    """Keywords as django-q writes them: a dict, its text, or ``a=1, b='x'``."""
    if not isinstance(text, str):
        return dict(text)
    try:
        return dict(ast.literal_eval(text))
    except (SyntaxError, ValueError):
        call: Any = ast.parse(f"f({text})", mode="eval").body
        return {word.arg: ast.literal_eval(word.value) for word in call.keywords}


def _function_of(each: Stored) -> str:
    """The dotted path of the function, which is the first argument of the job."""
    text = each.arguments
    return text[1 : text.index(text[0], 1)] if text[:1] in ("'", '"') else ""
