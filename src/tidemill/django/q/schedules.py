"""``schedule`` and the class ``Schedule``: enqueue a call at times, as with django-q.

schedule("shop.tasks.clean", name="clean", schedule_type=Schedule.DAILY)
Schedule.objects.update_or_create(name="clean", defaults={"func": "shop.tasks.clean", …})
Schedule.objects.filter(func="shop.tasks.clean").delete()

``Schedule`` is no model: its objects are the schedules of tidemill, on every store. A change names
the version of the record that it was made for. If a worker or another process has changed the
record meanwhile, the change is made again, for the new record.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import datetime as dt
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import msgspec
from django.conf import settings
from django.core import exceptions
from django.db import IntegrityError
from django.db.models import DateTimeField, Q
from django.utils import timezone

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.limits import declare_limit
from tidemill.brokers.contract.schedules import LAST_OWN, Change
from tidemill.brokers.contract.schedules import Schedule as Record
from tidemill.core.clock import new_id
from tidemill.core.codec import verify
from tidemill.core.config import check_count, check_name
from tidemill.core.envelope import Envelope
from tidemill.django.framework.results import arguments_of, moment_of
from tidemill.django.model_arguments import to_key
from tidemill.django.project import project_mill
from tidemill.django.q.calls import RUN, call_of, path_of, split_options
from tidemill.django.q.results import schedule_tag
from tidemill.errors import CodecError, InvalidOption
from tidemill.schedules.declare import PAGE, signed_job
from tidemill.schedules.parse import When
from tidemill.schedules.record import Stored, decode, due_of, encode
from tidemill.schedules.rules import Rule, next_time

Values = dict[str, Any]


def schedule(func: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Schedule:
    """Add a schedule, and return it; times are in the time zone of the project.

    Keywords: ``name hook schedule_type minutes repeats next_run cron cluster intended_date_kwarg``
    and the options of ``async_task``; all other keywords are arguments of the function. The default
    is once, now.

    Raises:
        IntegrityError: a schedule has this name.
        InvalidOption: a value is wrong.
    """
    own = {name: kwargs.pop(name) for name in _OWN if name in kwargs}
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


# -- Schedule.objects ------------------------------------------------------------------------------

Test = Callable[["Schedule"], bool]

_LOOKUPS: dict[str, Callable[[Any, Any], Any]] = {
    "exact": operator.eq,
    "iexact": lambda value, given: value.lower() == given.lower(),
    "in": lambda value, given: value in given,
    "contains": operator.contains,
    "icontains": lambda value, given: given.lower() in value.lower(),
    "startswith": lambda value, given: value.startswith(given),
    "endswith": lambda value, given: value.endswith(given),
    "isnull": lambda value, given: (value is None) == given,
    "lt": operator.lt,
    "lte": operator.le,
    "gt": operator.gt,
    "gte": operator.ge,
}
_JOINED: dict[str, Callable[[Iterable[bool]], bool]] = {Q.AND: all, Q.OR: any}


class Query:
    """The schedules that match; each use reads them again."""

    def __init__(self, where: Any = None, order: tuple[str, ...] = ("next_run",)) -> None:
        self._where: Any = where or Q()
        self._matches = _test_of(self._where)
        self._order = order

    def _read_all(self) -> list[Schedule]:
        found = [each for each in _readable(self._records()) if self._matches(each)]
        for name in reversed(self._order):
            field = _field(name.removeprefix("-"))
            found.sort(
                key=lambda each: ((value := getattr(each, field)) is None, value),
                reverse=name.startswith("-"),
            )
        return found

    def _records(self) -> Iterator[Record]:
        """The records that may match: all, or the record of a given name."""
        broker, where, after = _broker(), self._where, LAST_OWN
        is_all = where.connector == Q.AND and not where.negated
        for part in filter(lambda part: isinstance(part, tuple), where.children if is_all else ()):
            if part[0] in ("name", "id", "pk") and isinstance(part[1], str):
                yield from filter(None, broker.schedules([part[1]]) if part[1] else ())
                return
        while page := broker.list_schedules(after, PAGE):
            yield from page
            after = page[-1].name

    def __iter__(self) -> Iterator[Schedule]:
        return iter(self._read_all())

    def __len__(self) -> int:
        return len(self._read_all())

    def __getitem__(self, index: Any) -> Any:
        return self._read_all()[index]

    def filter(self, *where: Any, **lookups: Any) -> Query:
        """Those that match: ``name="a"``, ``func__in=[…]``, ``Q(name__startswith="b")``."""
        return Query(self._where & Q(*where, **lookups), self._order)

    def exclude(self, *where: Any, **lookups: Any) -> Query:
        """Those that do not match."""
        return Query(self._where & ~Q(*where, **lookups), self._order)

    def order_by(self, *names: str) -> Query:
        """The same schedules by these fields; ``-name`` is the reverse order."""
        return Query(self._where, names)

    def all(self) -> Query:
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

    def get(self, *where: Any, **lookups: Any) -> Schedule:
        """The only schedule that matches.

        Raises:
            Schedule.DoesNotExist: there is none.
            Schedule.MultipleObjectsReturned: there are several.
        """
        found = self.filter(*where, **lookups)._read_all()
        if len(found) > 1:
            raise Schedule.MultipleObjectsReturned(f"{len(found)} schedules match {lookups}")
        if not found:
            raise Schedule.DoesNotExist(f"no schedule matches {lookups}")
        return found[0]

    def values(self, *names: str) -> list[Values]:
        """The fields of each schedule as a dict."""
        fields = [*map(_field, names)] or ["id", *_FIELDS, "task"]
        return [{name: getattr(each, name) for name in fields} for each in self]

    def values_list(self, *names: str, flat: bool = False) -> list[Any]:
        """The fields of each schedule as a tuple, or with ``flat`` the single field."""
        rows = [tuple(row.values()) for row in self.values(*names)]
        return [row[0] for row in rows] if flat else rows

    def update(self, **values: Any) -> int:
        """Set these fields of each schedule, and return the number of schedules."""
        given = {_field(name): value for name, value in values.items()}
        return self._swap_each(lambda record: _changed(record, record.name, given))

    def delete(self) -> tuple[int, dict[str, int]]:
        """Remove the schedules; returns their number twice, in the form that Django returns."""
        return _deleted(self._swap_each(_gone))

    def _swap_each(self, make: Callable[[Record], Change]) -> int:
        """Change each record that still matches when it is changed."""

        def make_if_matches(record: Record) -> Change | None:
            return make(record) if self._matches(_of_record(record)) else None

        return sum(_swap(each.id, make_if_matches) is not None for each in self)


class Objects(Query):
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
        except IntegrityError:  # another process may just have added the schedule
            if found := self.filter(**lookups).first():
                return found, False
            raise

    def update_or_create(
        self, defaults: Any = None, create_defaults: Any = None, **lookups: Any
    ) -> tuple[Schedule, bool]:
        """Set fields of the schedule that matches, or make it; True if this call has made it."""
        first = defaults if create_defaults is None else create_defaults
        found, is_new = self.get_or_create(first, **lookups)
        if not is_new:
            for name, value in (defaults or {}).items():
                setattr(found, _field(name), value)
            try:
                found.save(update_fields=defaults or ())
            except Schedule.DoesNotExist:  # it has just ended, or another process has deleted it
                return self.update_or_create(defaults, create_defaults, **lookups)
        return found, is_new


# -- Schedule --------------------------------------------------------------------------------------


@dataclasses.dataclass(kw_only=True, eq=False)
class Schedule:
    """A schedule with the fields of django-q's model. Its name is its key, also as ``id``.

    ``next_run`` is None for a schedule that somebody has paused.
    """

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

    objects: ClassVar[Objects]

    name: str | None = None
    func: Any = None
    hook: Any = None
    args: Any = None
    kwargs: Any = None
    schedule_type: str | None = ONCE
    minutes: int | None = None
    repeats: int = -1
    next_run: Any = dataclasses.field(default_factory=timezone.now)
    cron: str | None = None
    cluster: str | None = None
    intended_date_kwarg: str | None = None

    def __post_init__(self) -> None:
        self._read: Any = None  # a _Read, once the schedule is stored

    def __str__(self) -> str:
        return str(self.func)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Schedule) and self.id is not None and self.id == other.id
        )

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def id(self) -> Any:
        """The name in the store; None for a schedule that is not saved."""
        return self._read and self._read.name

    pk = id

    @property
    def task(self) -> str | None:
        """The id of the latest task, while tidemill keeps the task."""
        found = (
            next(iter(project_mill().jobs(tag=schedule_tag(self.id))), None) if self.id else None
        )
        return found.id if found else None

    def save(self, *_: Any, update_fields: Iterable[str] | None = None, **__: Any) -> None:
        """Store the fields that this object has changed; all others stay as they are stored.

        Raises:
            IntegrityError: a new schedule has the name of another.
            Schedule.DoesNotExist: the schedule has ended, or somebody has deleted it.
            InvalidOption: a value is wrong.
        """
        given = {name: getattr(self, name) for name in _FIELDS}
        read: _Read | None = self._read
        if read is None:
            name = self.name or f"{path_of(self.func)}-{new_id()[-8:]}"
            given["name"] = check_name("schedule name", name)
            change = _changed(None, name, given)
            (changed,) = _broker().change_schedules([change])
            if not changed.done:
                raise IntegrityError(f"there is a schedule {name!r} already")
            saved: Record | None = Record(name, changed.version, change.due, change.body)
        else:
            names = _FIELDS if update_fields is None else [*map(_field, update_fields)]
            given = {name: given[name] for name in names if given[name] != read.shown[name]}
            saved = _swap(read.name, lambda record: _changed(record, read.name, given))
        if saved is None:
            raise Schedule.DoesNotExist(
                f"schedule {self.id!r} has ended, or somebody has deleted it: nothing is saved"
            )
        vars(self).update(vars(_of_record(saved)))

    def delete(self) -> tuple[int, dict[str, int]]:
        """Remove the schedule; returns 1, or 0 if it is gone, in the form that Django returns."""
        name, self._read = self.id, None
        return _deleted(int(name is not None and _swap(name, _gone) is not None))

    def refresh_from_db(self) -> None:
        """Read all fields again."""
        vars(self).update(vars(Schedule.objects.get(id=self.id or "")))


_FIELDS = tuple(field.name for field in dataclasses.fields(Schedule))
_OWN = tuple(name for name in _FIELDS if name not in ("func", "args", "kwargs"))
_CALL = {"func", "hook", "args", "kwargs", "cluster", "intended_date_kwarg"}
_TIMES = {"schedule_type", "minutes", "cron"}
_KEPT = ("schedule_type", "minutes", "cron", "intended_date_kwarg")
_PERIODS = {
    Schedule.DAILY: (1, "day"),
    Schedule.WEEKLY: (1, "week"),
    Schedule.BIWEEKLY: (2, "week"),
    Schedule.MONTHLY: (1, "month"),
    Schedule.BIMONTHLY: (2, "month"),
    Schedule.QUARTERLY: (3, "month"),
    Schedule.YEARLY: (1, "year"),
}


# -- records ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Read:
    """A schedule as its record has it.

    ``values`` are the fields as values, ``shown`` the fields as ``Schedule`` shows them, ``texts``
    the arguments that were given as text. ``is_ours`` is False for a schedule of plain tidemill.
    """

    name: str
    values: Values
    shown: Values
    texts: dict[str, str]
    is_ours: bool


def _broker() -> Any:
    runtime = project_mill().runtime
    runtime.features.need(Feature.SCHEDULES, "a schedule")
    return runtime.broker


def _swap(name: str, make: Callable[[Record], Change | None]) -> Record | None:
    """Change a record, also when others change it at the same time; None if it is gone."""
    broker = _broker()
    while (record := broker.schedules([name])[0]) is not None:
        if (change := make(record)) is None:
            return None
        (changed,) = broker.change_schedules([change])
        if changed.done:
            return Record(name, changed.version, change.due, change.body)
    return None


def _gone(record: Record) -> Change:
    return Change(record.name, record.version, gone=True)


def _deleted(count: int) -> tuple[int, dict[str, int]]:
    return count, {"django_q.Schedule": count}


def _of_record(record: Record) -> Schedule:
    read = _read(record)
    made = Schedule(**read.shown)
    made._read = read
    return made


def _readable(records: Iterable[Record]) -> Iterator[Schedule]:
    """The schedules of records, without those that another version of tidemill wrote."""
    for record in records:
        with contextlib.suppress(CodecError):
            yield _of_record(record)


def _read(record: Record) -> _Read:
    """The fields of a schedule.

    Raises:
        CodecError: another version of tidemill wrote the record.
    """
    stored = decode(record.body)
    job, kept = stored.job, Values()
    func: str = job.task
    args, kwargs = list[Any](), Values()
    with contextlib.suppress(CodecError):  # perhaps only a worker can read the arguments
        if job.pickled:
            verify(job, project_mill().runtime.keys)
        args, kwargs = arguments_of(job)
        if func == RUN:
            kept = kwargs.get("schedule", kept)
            func, args, kwargs = args
    options = dict(kept.get("options", {}))
    hook, cluster = options.pop("hook", None), options.pop("cluster", None)
    if options.get("group") == record.name:
        del options["group"]
    left = stored.repeats - stored.fired if stored.repeats else -1
    is_off = stored.paused and kept.get("repeats") == 0
    next_run = stored.planned if is_off or not stored.paused else 0.0
    values = {
        **{name: kept.get(name) for name in _FIELDS},
        "name": record.name,
        "func": func,
        "hook": hook,
        "cluster": cluster,
        "args": tuple(args),
        "kwargs": {**options, **kwargs},
        "repeats": 0 if is_off else left,
        "next_run": dt.datetime.fromtimestamp(next_run, dt.UTC) if next_run else None,
        **_type_of(stored.rule, kept),
    }
    texts: dict[str, str] = {name: kept[name] for name in ("args", "kwargs") if name in kept}
    written: Values = {f: repr(values[f]) if values[f] else None for f in ("args", "kwargs")}
    shown = {**values, **written, **texts, "next_run": moment_of(next_run)}
    return _Read(record.name, values, shown, texts, "options" in kept)


def _changed(record: Record | None, name: str, given: Values) -> Change:
    """The change that sets these fields of a record, and leaves all others as they are stored."""
    broker = _broker()
    now = broker.wall()
    values = {field: _clean(field, value) for field, value in given.items()}
    if record is None:
        changed, texts, is_ours = {*values}, {}, True
        stored = Stored(rule=Rule(), job=Envelope(id=""), planned=now)
    else:
        stored, read = decode(record.body), _read(record)
        changed = {field for field in values if _differs(values[field], read.values[field])}
        values, texts, is_ours = {**read.values, **values}, read.texts, read.is_ours
        if "name" in changed:
            raise InvalidOption(
                f"a schedule keeps its name {name!r}; create another one, and delete this one"
            )
        if changed & _CALL and not is_ours:
            raise InvalidOption(
                f"schedule {name!r} is not from tidemill.django.q, so only its times can change; "
                "delete it, and create another one"
            )
    texts = {field: text for field, text in texts.items() if field not in changed}
    texts |= {f: given[f] for f in changed & {"args", "kwargs"} if isinstance(given[f], str)}
    if is_ours:
        stored.job = _job(name, values, texts)
        declare_limit(broker, stored.job.limit)
    _set_times(stored, values, changed, now)
    if record is None and stored.rule.cron:  # django-q computes the first time of a new cron, too
        stored.planned, stored.paused = next_time(stored.rule, now), values["repeats"] == 0
    if record is None:
        return Change(name, 0, due_of(stored), encode(stored))
    due = due_of(stored) if changed & {"next_run", "repeats"} else record.due
    return Change(name, record.version, due, encode(stored))


def _set_times(stored: Stored, values: Values, changed: set[str], now: float) -> None:
    """Set the changed times. The next time stays, even if it is past, unless it is given."""
    moment, left = values["next_run"], values["repeats"]
    is_moved = "next_run" in changed and moment is not None
    if is_moved:
        stored.planned = moment.timestamp()
    if changed & _TIMES:
        stored.rule = _rule(values)
    if is_moved or changed & _TIMES:
        field = "at" if stored.rule.at else "start"
        stored.rule = msgspec.structs.replace(stored.rule, **{field: stored.planned})
        stored.unanchored, stored.said = False, now
    if "repeats" in changed and left:
        stored.repeats = stored.fired + left if left > 0 else 0
    if changed & {"next_run", "repeats"}:
        stored.paused = moment is None or left == 0


def _job(name: str, values: Values, texts: dict[str, str]) -> Envelope:
    """The job of a schedule. One of its arguments keeps the fields that tidemill does not have."""
    options, kwargs = split_options(values["kwargs"])
    options = {"group": name, **options}
    for option in ("hook", "cluster"):
        if values[option]:
            options[option] = values[option]
    kept = {field: values[field] for field in _KEPT if values[field] is not None}
    if values["repeats"] == 0:
        kept["repeats"] = 0
    # The job with a hook enqueues the call with its options, since a schedule's job has no hook.
    own = {"cluster": options.get("cluster")} if options.get("hook") else options
    call = call_of(values["func"], values["args"], kwargs, own)
    call.kwargs = {"schedule": {**kept, **texts, "options": options}}
    call = call.using(tags=[*call.options.tags, schedule_tag(name)])
    return signed_job(project_mill().runtime, name, call)


# -- fields ----------------------------------------------------------------------------------------


def _rule(values: Values) -> Rule:
    """The rule of a type, without its first time."""
    kind = values["schedule_type"]
    if kind == Schedule.ONCE:
        return Rule(at=1.0)
    if kind == Schedule.CRON:
        return When(cron=values["cron"] or "", zone=settings.TIME_ZONE).rule
    if kind in (Schedule.MINUTES, Schedule.HOURLY):
        return Rule(every=3600.0 if kind == Schedule.HOURLY else 60.0 * (values["minutes"] or 1))
    if kind in _PERIODS:
        count, unit = _PERIODS[kind]
        return Rule(count=count, unit=unit, zone=settings.TIME_ZONE)
    known = ", ".join(name for name, _ in Schedule.TYPE)
    raise InvalidOption(f"schedule_type must be one of {known}, not {kind!r}")


def _type_of(rule: Rule, kept: Values) -> Values:
    """The type of a rule, which somebody may have changed in the admin; None for no such type."""
    if rule.cron:
        return {"schedule_type": Schedule.CRON, "cron": rule.cron}
    if rule.every == 3600 and kept.get("schedule_type") != Schedule.MINUTES:
        return {"schedule_type": Schedule.HOURLY}
    if rule.every and rule.every % 60 == 0:
        return {"schedule_type": Schedule.MINUTES, "minutes": int(rule.every // 60)}
    kinds = {period: kind for kind, period in _PERIODS.items()}
    return {"schedule_type": Schedule.ONCE if rule.at else kinds.get((rule.count, rule.unit))}


def _field(name: str) -> str:
    if name not in (*_FIELDS, "id", "pk", "task"):
        raise InvalidOption(f"a schedule has no field {name!r}; it has {', '.join(_FIELDS)}")
    return name


def _test_of(where: Any) -> Test:
    """The test of a ``Q``."""
    tests = [_test_of(part) if isinstance(part, Q) else _test(*part) for part in where.children]
    joined, negated = _JOINED[where.connector], where.negated
    return lambda each: not tests or joined(test(each) for test in tests) != negated


def _test(lookup: str, given: Any) -> Test:
    name, _, how = lookup.partition("__")
    field, how = "name" if name in ("id", "pk") else _field(name), how or "exact"
    if how not in _LOOKUPS:
        raise InvalidOption(
            f"Schedule.objects has no lookup {lookup!r}; after {name}__ can follow: "
            f"{', '.join(_LOOKUPS)}"
        )
    of_values = field != "task" and how in ("exact", "in", "lt", "lte", "gt", "gte")
    if of_values:
        given = [_clean(field, each) for each in given] if how == "in" else _clean(field, given)

    def test(each: Schedule) -> bool:
        value = each._read.values[field] if of_values else getattr(each, field)
        if value is None and how not in ("exact", "in", "isnull"):
            return False
        return bool(_LOOKUPS[how](value, given))

    return test


def _clean(field: str, value: Any) -> Any:
    """A field as a value: arguments that are no text, times with a zone."""
    if field == "func" or (field == "hook" and value):
        return path_of(value)
    if field == "minutes" and value is not None:
        return check_count("minutes", int(value), 0)
    if field == "repeats":
        return max(int(value), -1)
    if field == "next_run":
        moment = DateTimeField().to_python(value)
        is_naive = moment is not None and timezone.is_naive(moment)
        return timezone.make_aware(moment) if is_naive else moment
    try:
        if field == "args":
            return tuple(map(to_key, _arguments(value)))
        if field == "kwargs":
            options, kwargs = split_options(_keywords(value))
            return {**options, **{name: to_key(each) for name, each in kwargs.items()}}
    except (SyntaxError, ValueError, TypeError) as error:
        raise InvalidOption(f"{field} of a schedule cannot be read: {value!r}") from error
    return value or None


def _differs(one: Any, other: Any) -> bool:
    """True when two values differ, also as 1 and True differ."""
    is_data = isinstance(one, (tuple, dict))
    return bool(one != other or (is_data and repr(one) != repr(other)))


def _arguments(value: Any) -> tuple[Any, ...]:
    """Arguments as django-q takes them: a tuple, a text such as ``1, 'x'``, or one argument."""
    if value is None or value == "":
        return ()
    value = ast.literal_eval(value) if isinstance(value, str) else value
    return value if isinstance(value, tuple) else (value,)


def _keywords(value: Any) -> Values:
    """Keywords as django-q takes them: a dict, its text, or ``a=1, b='x'``."""
    if not isinstance(value, str):
        return dict(value or {})
    try:
        return dict(ast.literal_eval(value or "{}"))
    except (SyntaxError, ValueError):
        call: Any = ast.parse(f"f({value})", mode="eval").body
        return {word.arg: ast.literal_eval(word.value) for word in call.keywords}


Schedule.objects = Objects()
