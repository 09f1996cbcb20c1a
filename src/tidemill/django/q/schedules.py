"""``schedule`` and the class ``Schedule``: enqueue a call at times, as with django-q.

schedule("shop.tasks.clean", name="clean", schedule_type=Schedule.DAILY)
Schedule.objects.update_or_create(name="clean", defaults={"func": "shop.tasks.clean", …})
Schedule.objects.filter(func="shop.tasks.clean").delete()

``Schedule`` is no model: its objects are schedules of tidemill, on every store. A header of their
jobs keeps the fields of django-q. Schedules without this header are not among ``Schedule.objects``.
"""

from __future__ import annotations

import ast
import dataclasses
import datetime as dt
import json
import operator
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, ClassVar

from django.conf import settings
from django.core import exceptions
from django.db import IntegrityError
from django.utils import timezone

from tidemill.brokers.contract.schedules import LAST_OWN
from tidemill.brokers.contract.schedules import Schedule as Record
from tidemill.client.task import Call
from tidemill.core.clock import new_id
from tidemill.django.project import project_mill
from tidemill.django.q.calls import async_task, call_of, path_of, split_options
from tidemill.errors import InvalidOption, ScheduleExists, ScheduleNotFound
from tidemill.schedules.declare import PAGE, matches
from tidemill.schedules.parse import When
from tidemill.schedules.record import decode
from tidemill.schedules.rules import moment_of

HEADER = "django_q"
"""The header with the fields of a schedule that tidemill does not have, as JSON."""

SOON = dt.timedelta(milliseconds=50)
"""The delay of a first job that is due at once."""


def schedule(func: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Schedule:
    """Add a schedule, and return it; times are in the time zone of the project.

    Keywords: ``name hook schedule_type minutes repeats next_run cron cluster intended_date_kwarg
    q_options``; all other keywords are arguments of the function. The default is once, now.

    Raises:
        IntegrityError: a schedule has this name.
        InvalidOption: a value is wrong.
    """
    own = {name: kwargs.pop(name) for name in _FIELDS if name in kwargs}
    options, kwargs = split_options(kwargs)
    if options:
        kwargs["q_options"] = options
    return Schedule.objects.create(func=func, args=args, kwargs=kwargs, **own)


def validate_cron(value: str) -> None:
    """Check a cron text, as the validator of a form field.

    Raises:
        ValidationError: the text is no cron.
    """
    try:
        When(cron=value)
    except InvalidOption as error:
        raise exceptions.ValidationError(str(error)) from error


def enqueue_with_hook(func: str, args: list[Any], kwargs: Any, options: Any) -> str:
    """Enqueue the call of a schedule with its hook."""
    return async_task(func, *args, q_options=options, **kwargs)


# -- Schedule.objects ------------------------------------------------------------------------------

_LOOKUPS: dict[str, Callable[[Any, Any], Any]] = {
    "": operator.eq,
    "exact": operator.eq,
    "in": lambda value, given: value in given,
    "startswith": lambda value, given: value.startswith(given),
    "endswith": lambda value, given: value.endswith(given),
    "contains": operator.contains,
    "icontains": lambda value, given: given.lower() in value.lower(),
    "isnull": lambda value, given: (value is None) == given,
    "lt": operator.lt,
    "lte": operator.le,
    "gt": operator.gt,
    "gte": operator.ge,
}

Test = Callable[["Schedule"], bool]


class Some:
    """Some schedules: those that pass all tests, in an order."""

    def __init__(self, tests: tuple[Test, ...] = (), order: tuple[str, ...] = ()) -> None:
        self._tests = tests
        self._order = order

    def _read(self) -> list[Schedule]:
        found = [each for each in _stored_schedules() if all(test(each) for test in self._tests)]
        for name in reversed(self._order):
            found.sort(key=lambda each: _sortable(each, name), reverse=name.startswith("-"))
        return found

    def __iter__(self) -> Iterator[Schedule]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __getitem__(self, index: Any) -> Any:
        return self._read()[index]

    def filter(self, **lookups: Any) -> Some:
        """Those whose fields match: ``name="a"``, ``func__in=[…]``, ``name__startswith="b"``."""
        return Some((*self._tests, *_tests_of(lookups)), self._order)

    def exclude(self, **lookups: Any) -> Some:
        """Those whose fields do not all match."""
        tests = _tests_of(lookups)
        return Some((*self._tests, lambda each: not all(t(each) for t in tests)), self._order)

    def order_by(self, *names: str) -> Some:
        """The same schedules by these fields; ``-name`` is the reverse order."""
        return Some(self._tests, names)

    def all(self) -> Some:
        """These schedules."""
        return self

    def exists(self) -> bool:
        """True when there is at least one of these schedules."""
        return len(self) > 0

    def count(self) -> int:
        """The number of the schedules."""
        return len(self)

    def first(self) -> Schedule | None:
        """The first of the schedules, or None."""
        return next(iter(self), None)

    def last(self) -> Schedule | None:
        """The last of the schedules, or None."""
        return next(reversed(self._read()), None)

    def get(self, **lookups: Any) -> Schedule:
        """The only schedule whose fields match.

        Raises:
            Schedule.DoesNotExist: there is none.
            Schedule.MultipleObjectsReturned: there are several.
        """
        found = self.filter(**lookups)._read()
        if len(found) > 1:
            raise Schedule.MultipleObjectsReturned(f"{len(found)} schedules match {lookups}")
        if not found:
            raise Schedule.DoesNotExist(f"no schedule matches {lookups}")
        return found[0]

    def values(self, *names: str) -> list[dict[str, Any]]:
        """The fields of each schedule as a dict."""
        return [{name: getattr(each, name) for name in names or _FIELDS} for each in self]

    def values_list(self, *names: str, flat: bool = False) -> list[Any]:
        """The fields of each schedule as a tuple, or with ``flat`` the single field."""
        rows = [tuple(row.values()) for row in self.values(*names)]
        return [row[0] for row in rows] if flat else rows

    def update(self, **values: Any) -> int:
        """Set fields of each schedule, and return the number of schedules."""
        found = self._read()
        for each in found:
            each._set(values).save()
        return len(found)

    def delete(self) -> tuple[int, dict[str, int]]:
        """Remove the schedules; returns their number twice, in the form that Django returns."""
        count = sum(each.delete()[0] for each in self._read())
        return count, {"django_q.Schedule": count}


class Objects(Some):
    """All schedules, and the methods that make a schedule."""

    def create(self, **values: Any) -> Schedule:
        """Add a schedule.

        Raises:
            IntegrityError: a schedule has this name.
        """
        made = Schedule(**values)
        made.save()
        return made

    def get_or_create(self, defaults: Any = None, **lookups: Any) -> tuple[Schedule, bool]:
        """The schedule that matches, and True if this call has made it."""
        try:
            return self.get(**lookups), False
        except Schedule.DoesNotExist:
            values = {name: value for name, value in lookups.items() if "__" not in name}
        try:
            return self.create(**{**values, **(defaults or {})}), True
        except IntegrityError:  # another process has just added the schedule
            return self.get(**lookups), False

    def update_or_create(self, defaults: Any = None, **lookups: Any) -> tuple[Schedule, bool]:
        """Set fields of the schedule that matches, or make it; True if this call has made it."""
        found, is_new = self.get_or_create(defaults, **lookups)
        if not is_new:
            found._set(defaults or {}).save()
        return found, is_new


# -- Schedule --------------------------------------------------------------------------------------


@dataclasses.dataclass(kw_only=True, eq=False)
class Schedule:
    """A schedule with the fields of django-q's model. Its name is its key, also as ``id``."""

    ONCE, MINUTES, HOURLY, DAILY, WEEKLY = "O", "I", "H", "D", "W"
    BIWEEKLY, MONTHLY, BIMONTHLY, QUARTERLY, YEARLY, CRON = "BW", "M", "BM", "Q", "Y", "C"
    TYPE = (
        *((ONCE, "Once"), (MINUTES, "Minutes"), (HOURLY, "Hourly"), (DAILY, "Daily")),
        *((WEEKLY, "Weekly"), (BIWEEKLY, "Biweekly"), (MONTHLY, "Monthly")),
        *((BIMONTHLY, "Bimonthly"), (QUARTERLY, "Quarterly"), (YEARLY, "Yearly"), (CRON, "Cron")),
    )

    class DoesNotExist(exceptions.ObjectDoesNotExist):
        """No schedule matches."""

    class MultipleObjectsReturned(exceptions.MultipleObjectsReturned):
        """Several schedules match."""

    objects: ClassVar[Objects] = Objects()

    name: str | None = None
    func: Any
    hook: Any = None
    args: Any = None
    kwargs: Any = None
    schedule_type: str = ONCE
    minutes: int | None = None
    repeats: int = -1
    next_run: dt.datetime | None = dataclasses.field(default_factory=timezone.now)
    cron: str | None = None
    cluster: str | None = None
    intended_date_kwarg: str | None = None

    def __post_init__(self) -> None:
        self.id: str | None = None  # the name in the store
        self.func = path_of(self.func)
        self.hook = path_of(self.hook) if self.hook else None

    def __str__(self) -> str:
        return str(self.func)

    @property
    def pk(self) -> str | None:
        """The name in the store; None for a schedule that is not saved."""
        return self.id

    def save(self, **_: Any) -> None:
        """Store the schedule with its fields as they are.

        Raises:
            IntegrityError: another schedule has this name.
            InvalidOption: a value is wrong.
        """
        schedules, call, timing = project_mill().schedules, self._call(), self._timing()
        name = self.name = self.name or f"{self.func}-{new_id()[-8:]}"
        old, self.id = self.id, name
        with suppress(ScheduleNotFound):  # a schedule that would stay the same is not touched
            if old == name and not matches(project_mill().runtime, name, call, **timing):
                schedules.remove(name)
        try:
            schedules.add(name, call, **timing)
        except ScheduleExists as error:
            if old != name:
                self.id = old
                raise IntegrityError(str(error)) from error
        if old and old != name:
            schedules.remove(old)
        if self.next_run is None:
            schedules.pause(name)

    def delete(self) -> tuple[int, dict[str, int]]:
        """Remove the schedule; returns 1, or 0 if it is gone, in the form that Django returns."""
        with suppress(ScheduleNotFound):
            project_mill().schedules.remove(str(self.id))
            return 1, {"django_q.Schedule": 1}
        return 0, {}

    def refresh_from_db(self) -> None:
        """Read all fields again."""
        vars(self).update(vars(Schedule.objects.get(id=self.id)))

    def _set(self, values: dict[str, Any]) -> Schedule:
        vars(self).update(vars(dataclasses.replace(self, **values)), id=self.id)
        return self

    def _call(self) -> Call[Any]:
        """The call of the jobs, with the fields that tidemill does not have in a header."""
        args, (options, kwargs) = _arguments(self.args), split_options(_keywords(self.kwargs))
        if self.cluster:
            options["cluster"] = self.cluster
        if self.hook:
            # The call of a schedule has no hook. So this call enqueues the call with the hook.
            options["hook"] = self.hook
            call = call_of(enqueue_with_hook, (self.func, [*args], kwargs, options), {}, {})
        else:
            call = call_of(self.func, args, kwargs, options)
        kept = {name: _text(getattr(self, name)) for name in _KEPT}
        call = call.using(headers={HEADER: json.dumps(kept)})
        if self.intended_date_kwarg and not self.hook:
            call.kwargs = {"planned_as": self.intended_date_kwarg}
        return call

    def _timing(self) -> Any:
        """The times, in the words of tidemill. A first time that has just passed is now."""
        kind, start, now = self.schedule_type, self.next_run, timezone.now()
        if start is not None and timezone.is_naive(start):
            start = timezone.make_aware(start)
        if kind == Schedule.ONCE:
            return {"at": max(start or now, now + SOON)}
        if start is not None and dt.timedelta(0) <= now - start < dt.timedelta(minutes=1):
            start = now + SOON
        timing: dict[str, Any] = {"start": start}
        if kind == Schedule.CRON:
            timing["cron"] = self.cron
        elif kind == Schedule.MINUTES:
            timing["every"] = 60 * (self.minutes or 1)
        elif kind in _EVERY:
            timing["every"] = _EVERY[kind]
        else:
            known = ", ".join(name for name, _ in Schedule.TYPE)
            raise InvalidOption(f"schedule_type must be one of {known}, not {kind!r}")
        if kind not in (Schedule.MINUTES, Schedule.HOURLY):
            timing["zone"] = settings.TIME_ZONE
        if self.repeats > 0:
            timing["repeats"] = self.repeats
        return {name: value for name, value in timing.items() if value is not None}


_FIELDS = tuple(field.name for field in dataclasses.fields(Schedule) if field.name != "func")
_KEPT = (
    *("func", "hook", "args", "kwargs", "schedule_type", "minutes", "cron", "cluster"),
    "intended_date_kwarg",
)
_EVERY = {
    Schedule.HOURLY: "1 hour",
    Schedule.DAILY: "1 day",
    Schedule.WEEKLY: "1 week",
    Schedule.BIWEEKLY: "2 weeks",
    Schedule.MONTHLY: "1 month",
    Schedule.BIMONTHLY: "2 months",
    Schedule.QUARTERLY: "3 months",
    Schedule.YEARLY: "1 year",
}


def _stored_schedules() -> Iterator[Schedule]:
    broker, after = project_mill().broker, LAST_OWN
    while page := broker.list_schedules(after, PAGE):
        yield from filter(None, map(_of_record, page))
        after = page[-1].name


def _of_record(record: Record) -> Schedule | None:
    """The schedule of a record; None for a record that this module did not store."""
    stored = decode(record.body)
    if HEADER not in stored.job.headers:
        return None
    kept = json.loads(stored.job.headers[HEADER])
    if stored.rule.cron:  # somebody may have given other times in the admin
        kept |= {"schedule_type": Schedule.CRON, "cron": stored.rule.cron}
    fires = stored.planned and not stored.paused
    found = Schedule(
        **kept,
        name=record.name,
        repeats=stored.repeats - stored.fired if stored.repeats else -1,
        next_run=moment_of(stored.rule, stored.planned) if fires else None,
    )
    found.id = record.name
    return found


def _tests_of(lookups: dict[str, Any]) -> list[Test]:
    return [_test(lookup, given) for lookup, given in lookups.items()]


def _test(lookup: str, given: Any) -> Test:
    field, _, how = lookup.partition("__")
    if how not in _LOOKUPS or field not in (*_FIELDS, "func", "id", "pk"):
        raise InvalidOption(f"Schedule.objects has no lookup {lookup!r}")
    if field == "func" and callable(given):
        given = path_of(given)
    elif field in ("args", "kwargs") and how != "in":
        given = _text(given)

    def test(each: Schedule) -> bool:
        value = getattr(each, field)
        if value is None and how not in ("", "exact", "in", "isnull"):
            return False
        return bool(_LOOKUPS[how](value, given))

    return test


def _sortable(each: Schedule, name: str) -> tuple[bool, Any]:
    value = getattr(each, name.lstrip("-"))
    return value is not None, value


def _text(value: Any) -> Any:
    """Arguments as django-q stores them: a text."""
    return repr(value) if isinstance(value, (tuple, list, dict)) else value


def _arguments(text: Any) -> tuple[Any, ...]:
    """Arguments as django-q takes them: a sequence, or a text such as ``1, 'x'``."""
    value = ast.literal_eval(text or "()") if isinstance(text, str) else text or ()
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _keywords(text: Any) -> dict[str, Any]:
    """Keywords as django-q takes them: a dict, its text, or ``a=1, b='x'``."""
    if not isinstance(text, str):
        return dict(text or {})
    try:
        return dict(ast.literal_eval(text or "{}"))
    except (SyntaxError, ValueError):
        call: Any = ast.parse(f"f({text})", mode="eval").body
        return {word.arg: ast.literal_eval(word.value) for word in call.keywords}
