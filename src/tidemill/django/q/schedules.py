"""``schedule``: enqueue a call at times, with the arguments of django-q."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.utils import timezone

from tidemill.core.clock import new_id
from tidemill.django.project import project_mill
from tidemill.django.q.calls import async_task, call_of, path_of, split_options
from tidemill.errors import InvalidOption
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
