"""``schedule`` and ``Schedule.objects``: enqueue a call at times, as with django-q.

schedule("shop.tasks.clean", name="clean", schedule_type=Schedule.DAILY)
Schedule.objects.update_or_create(name="clean", defaults={"func": "shop.tasks.clean", …})
Schedule.objects.filter(name="clean").delete()
"""

from __future__ import annotations

import ast
import datetime as dt
from collections.abc import Callable, Iterator
from typing import Any

from django.conf import settings
from django.utils import timezone

from tidemill.core.clock import new_id
from tidemill.django.project import project_mill
from tidemill.django.q.calls import async_task, call_of, path_of, split_options
from tidemill.errors import InvalidOption, ScheduleExists, ScheduleNotFound
from tidemill.schedules.declare import Schedule as Declared


class Kinds:
    """The kinds of schedules, by the letters of django-q."""

    ONCE, MINUTES, HOURLY, DAILY, WEEKLY = "O", "I", "H", "D", "W"
    BIWEEKLY, MONTHLY, BIMONTHLY, QUARTERLY, YEARLY, CRON = "BW", "M", "BM", "Q", "Y", "C"


_EVERY = {
    Kinds.HOURLY: "1 hour",
    Kinds.DAILY: "1 day",
    Kinds.WEEKLY: "1 week",
    Kinds.BIWEEKLY: "2 weeks",
    Kinds.MONTHLY: "1 month",
    Kinds.BIMONTHLY: "2 months",
    Kinds.QUARTERLY: "3 months",
    Kinds.YEARLY: "1 year",
}

_OWN = (
    *("name", "hook", "schedule_type", "minutes", "repeats", "next_run", "cron", "cluster"),
    *("intended_date_kwarg", "group"),
)


def schedule(func: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Declared:
    """Add a schedule, and return it; times are in the time zone of the project.

    Keywords: ``name hook schedule_type minutes repeats next_run cron cluster intended_date_kwarg
    q_options``; all other keywords are arguments of the function. The default is once, now.

    Raises:
        ScheduleExists: a schedule has this name.
        InvalidOption: a value is wrong.
    """
    own = {name: kwargs.pop(name) for name in _OWN if name in kwargs}
    options, kwargs = split_options(kwargs)
    options |= {key: own[key] for key in ("hook", "cluster", "group") if own.get(key)}
    name = own.get("name") or f"{path_of(func)}-{new_id()[-8:]}"
    mill = project_mill()
    if options.get("hook"):
        # The call of a schedule has no hook. So this call enqueues the real call with the hook.
        options["hook"] = path_of(options["hook"])
        arguments = (path_of(func), list(args), dict(kwargs), options)
        call = call_of(enqueue_with_hook, arguments, {}, {})
    else:
        call = call_of(func, args, kwargs, options)
        if planned_as := own.get("intended_date_kwarg"):
            call.kwargs = {"planned_as": planned_as}
    return mill.schedules.add(name, call, **_timing(own))


def enqueue_with_hook(func: str, args: list[Any], kwargs: Any, options: Any) -> str:
    """Enqueue the call of a schedule with its hook."""
    return async_task(func, *args, q_options=options, **kwargs)


def _timing(own: dict[str, Any]) -> dict[str, Any]:
    """The times of a schedule, in the words of tidemill."""
    kind, start = own.get("schedule_type", Kinds.ONCE), own.get("next_run")
    if isinstance(start, dt.datetime) and timezone.is_naive(start):
        start = timezone.make_aware(start)
    if kind == Kinds.ONCE:
        return {"at": start or timezone.now() + dt.timedelta(milliseconds=50)}
    timing: dict[str, Any] = {"zone": settings.TIME_ZONE, "start": start}
    if kind == Kinds.CRON:
        timing["cron"] = own.get("cron")
    elif kind == Kinds.MINUTES:
        timing |= {"every": 60 * (own.get("minutes") or 1), "zone": None}
    elif kind in _EVERY:
        timing["every"] = _EVERY[kind]
        if kind == Kinds.HOURLY:
            timing["zone"] = None
    else:
        known = ", ".join([*_EVERY, Kinds.ONCE, Kinds.MINUTES, Kinds.CRON])
        raise InvalidOption(f"schedule_type must be one of {known}, not {kind!r}")
    if (own.get("repeats") or -1) > 0:
        timing["repeats"] = own["repeats"]
    return {name: value for name, value in timing.items() if value is not None}


# -- Schedule.objects ------------------------------------------------------------------------------


class Some:
    """Some schedules: the schedules of a name, of a function, or all."""

    def __init__(self, name: str | None = None, func: str | None = None) -> None:
        self._name = name
        self._func = func

    def __iter__(self) -> Iterator[Declared]:
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

    def first(self) -> Declared | None:
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

    def create(self, **values: Any) -> Declared:
        """Add a schedule.

        Raises:
            ScheduleExists: a schedule has this name.
        """
        return _make(values)

    def get(self, *, name: str) -> Declared:
        """The schedule of a name.

        Raises:
            ScheduleNotFound: no schedule has this name.
        """
        return project_mill().schedules.get(name)

    def get_or_create(self, defaults: Any = None, **values: Any) -> tuple[Declared, bool]:
        """The schedule of this name or function, and True if this call has made the schedule."""
        found = self._like(values)
        if found is not None:
            return found, False
        try:
            return _make({**values, **(defaults or {})}), True
        except ScheduleExists:  # another process has just added the schedule
            return self.get(name=values["name"]), False

    def update_or_create(self, defaults: Any = None, **values: Any) -> tuple[Declared, bool]:
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

    def _like(self, values: dict[str, Any]) -> Declared | None:
        if not values.keys() & {"name", "func"}:
            raise InvalidOption("a schedule is found by its name= or func=")
        by_name = values.get("name")
        return self.filter(name=by_name, func=None if by_name else values["func"]).first()


class Schedule(Kinds):
    """The kinds of schedules, and ``Schedule.objects``."""

    objects = Objects()


def _make(values: dict[str, Any]) -> Declared:
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


def _function_of(each: Declared) -> str:
    """The dotted path of the function, which is the first argument of the job."""
    text = each.arguments
    return text[1 : text.index(text[0], 1)] if text[:1] in ("'", '"') else ""
