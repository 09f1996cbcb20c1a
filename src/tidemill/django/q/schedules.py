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
    "in": lambda value, given: value in given,
    "isnull": lambda value, given: (value is None) == given,
    "iexact": lambda value, given: value.lower() == given.lower(),
    "contains": operator.contains,
    "icontains": lambda value, given: given.lower() in value.lower(),
    "startswith": str.startswith,
    "endswith": str.endswith,
    "lt": operator.lt,
    "lte": operator.le,
    "gt": operator.gt,
    "gte": operator.ge,
}


class Query:
    """The schedules that match; each use reads them again."""

    def __init__(self, where: Any = None, order: tuple[str, ...] = ("next_run",)) -> None:
        self._where: Any = where or Q()
        self._matches = _test_of(self._where)
        self._order = order

    def _rows(self) -> list[Schedule]:
        found = []
        for record in self._records():
            with contextlib.suppress(CodecError):  # another version of tidemill wrote the record
                found.append(_of_record(record))
        found = [*filter(self._matches, found)]
        for name in reversed(self._order):
            value = operator.attrgetter(_field(name.removeprefix("-")))
            found.sort(key=lambda each: (value(each) is None, value(each)), reverse=name[0] == "-")
        return found

    def _records(self) -> Iterator[Record]:
        """The records that may match: the record of a given name, or all."""
        broker, where, after = _broker(), self._where, LAST_OWN
        every = where.children if where.connector == Q.AND and not where.negated else ()
        given: Values = dict(part for part in every if isinstance(part, tuple))
        for name in (given.get("name"), given.get("id"), given.get("pk")):
            if name and isinstance(name, str):
                yield from filter(None, broker.schedules([name]))
                return
        while page := broker.list_schedules(after, PAGE):
            yield from page
            after = page[-1].name

    def __iter__(self) -> Iterator[Schedule]:
        return iter(self._rows())

    def __len__(self) -> int:
        return len(self._rows())

    def __getitem__(self, index: Any) -> Any:
        return self._rows()[index]

    def all(self) -> Query:
        return self

    def filter(self, *where: Any, **lookups: Any) -> Query:
        """Those that match: ``name="a"``, ``func__in=[…]``, ``Q(name__startswith="b")``."""
        return Query(self._where & Q(*where, **lookups), self._order)

    def exclude(self, *where: Any, **lookups: Any) -> Query:
        """Those that do not match."""
        return Query(self._where & ~Q(*where, **lookups), self._order)

    def order_by(self, *names: str) -> Query:
        """The same schedules by these fields; ``-name`` is the reverse order."""
        return Query(self._where, names)

    def exists(self) -> bool:
        return bool(self._rows())

    def count(self) -> int:
        return len(self)

    def first(self) -> Schedule | None:
        return next(iter(self), None)

    def get(self, *where: Any, **lookups: Any) -> Schedule:
        """The only schedule that matches. Raises DoesNotExist or MultipleObjectsReturned."""
        found = self.filter(*where, **lookups)._rows()
        if len(found) > 1:
            raise Schedule.MultipleObjectsReturned(f"{len(found)} schedules match {lookups}")
        if not found:
            raise Schedule.DoesNotExist(f"no schedule matches {lookups}")
        return found[0]

    def values(self, *names: str) -> list[Values]:
        """The fields of each schedule as a dict."""
        names = tuple(map(_field, names)) or ("id", *_FIELDS, "task")
        return [{name: getattr(each, name) for name in names} for each in self]

    def values_list(self, *names: str, flat: bool = False) -> list[Any]:
        """The fields of each schedule as a tuple, or with ``flat`` the single field."""
        rows = [tuple(row.values()) for row in self.values(*names)]
        return [row[0] for row in rows] if flat else rows

    def update(self, **values: Any) -> int:
        """Set these fields of each schedule, and return the number of schedules."""
        return self._swap(lambda record: _changed(record, record.name, values))

    def delete(self) -> tuple[int, dict[str, int]]:
        """Remove the schedules; returns their number twice, in the form that Django returns."""
        count = self._swap(lambda record: Change(record.name, record.version, gone=True))
        return count, {"django_q.Schedule": count}

    def _swap(self, make: Callable[[Record], Change]) -> int:
        """Change each record that still matches when it is changed; returns their number."""

        def change(record: Record | None) -> Change | None:
            return make(record) if record and self._matches(_of_record(record)) else None

        return sum(_swap(str(each.id), change) is not None for each in self)

    def create(self, **values: Any) -> Schedule:
        """Add a schedule. Raises IntegrityError if a schedule has this name."""
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
        except IntegrityError:
            if found := self.filter(**lookups).first():  # another process has just added it
                return found, False
            raise

    def update_or_create(
        self, defaults: Any = None, create_defaults: Any = None, **lookups: Any
    ) -> tuple[Schedule, bool]:
        """Set fields of the schedule that matches, or make it; True if this call has made it."""
        first = defaults if create_defaults is None else create_defaults
        while True:
            found, is_new = self.get_or_create(first, **lookups)
            if is_new or Schedule.objects.filter(id=found.id).update(**(defaults or {})):
                return (found if is_new else Schedule.objects.get(id=found.id)), is_new


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

    objects: ClassVar[Query]

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
        self.id: str | None = None  # the name in the store
        self.task: str | None = None  # the id of the latest task
        self._values: Values = {}  # the stored fields: arguments as values, times with a zone
        self._shown: Values = {}  # the stored fields as the attributes had them
        self._kept: Values = {}  # what the job keeps for this module; empty for plain tidemill

    pk = property(operator.attrgetter("id"))

    def __str__(self) -> str:
        return str(self.func)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and (self.id or id(self)) == (other.id or id(other))

    def __hash__(self) -> int:
        return hash(self.id)

    def save(self, *_: Any, update_fields: Iterable[str] | None = None, **__: Any) -> None:
        """Store the fields that this object has changed; all others stay as they are stored.

        Raises:
            IntegrityError: a new schedule has the name of another.
            Schedule.DoesNotExist: the schedule has ended, or somebody has deleted it.
            InvalidOption: a value is wrong.
        """
        name = self.id or self.name or f"{path_of(self.func)}-{new_id()[-8:]}"
        fields = _FIELDS if update_fields is None or self.id is None else [*update_fields]
        given = {field: getattr(self, field) for field in fields}
        if self.id is None:
            given["name"] = check_name("schedule name", name)
        else:
            given = {field: v for field, v in given.items() if v != self._shown.get(field)}

        def change(record: Record | None) -> Change:
            if self.id is None and record is not None:
                raise IntegrityError(f"there is a schedule {name!r} already")
            if self.id is not None and record is None:
                raise Schedule.DoesNotExist(f"schedule {name!r} is gone: nothing is saved")
            return _changed(record, name, given)

        if saved := _swap(name, change):
            vars(self).update(vars(_of_record(saved)))

    def delete(self) -> tuple[int, dict[str, int]]:
        """Remove the schedule; returns 1, or 0 if it is gone, in the form that Django returns."""
        done, self.id = Schedule.objects.filter(id=self.id).delete(), None
        return done

    def refresh_from_db(self) -> None:
        vars(self).update(vars(Schedule.objects.get(id=self.id)))


_FIELDS = tuple(field.name for field in dataclasses.fields(Schedule))
_OWN = {*_FIELDS} - {"func", "args", "kwargs"}
_CALL = {"func", "hook", "args", "kwargs", "cluster", "intended_date_kwarg"}
_TIMES = {"schedule_type", "minutes", "cron"}
_PERIODS = {
    (1, "day"): Schedule.DAILY,
    (1, "week"): Schedule.WEEKLY,
    (2, "week"): Schedule.BIWEEKLY,
    (1, "month"): Schedule.MONTHLY,
    (2, "month"): Schedule.BIMONTHLY,
    (3, "month"): Schedule.QUARTERLY,
    (1, "year"): Schedule.YEARLY,
}


# -- records ---------------------------------------------------------------------------------------


def _broker() -> Any:
    runtime = project_mill().runtime
    runtime.features.need(Feature.SCHEDULES, "a schedule")
    return runtime.broker


def _swap(name: str, make: Callable[[Record | None], Change | None]) -> Record | None:
    """Change a record, also when others change it at the same time; None for no change."""
    broker = _broker()
    while change := make(broker.schedules([name])[0]):
        (changed,) = broker.change_schedules([change])
        if changed.done:
            return Record(name, changed.version, change.due, change.body)
    return None


def _of_record(record: Record) -> Schedule:
    """The schedule of a record. Raises CodecError if another version of tidemill wrote it."""
    stored = decode(record.body)
    job, kept, func = stored.job, Values(), stored.job.task
    args, kwargs = list[Any](), Values()
    # Perhaps only a worker can read the arguments.
    with contextlib.suppress(CodecError, TypeError, ValueError):
        if job.pickled:
            verify(job, project_mill().runtime.keys)
        args, kwargs = arguments_of(job)
        if func == RUN:
            func, args, kwargs, kept = *args, kwargs.get("schedule", kept)
    options = dict(kept.get("options", {}))
    if options.get("group") == record.name:
        del options["group"]
    is_off = stored.paused and kept.get("repeats") == 0
    next_run = stored.planned if is_off or not stored.paused else 0.0
    values: Values = {
        **{field: kept.get(field) for field in _FIELDS},
        "name": record.name,
        "func": func,
        "hook": options.pop("hook", None),
        "cluster": options.pop("cluster", None),
        "args": tuple(args),
        "kwargs": {**options, **kwargs},
        "repeats": 0 if is_off else stored.repeats - stored.fired if stored.repeats else -1,
        "next_run": dt.datetime.fromtimestamp(next_run, dt.UTC) if next_run else None,
        **_type_of(stored.rule, kept),
    }
    values |= {"id": record.name, "pk": record.name, "task": stored.last_job or None}
    shown: Values = {**{field: values[field] for field in _FIELDS}, "next_run": moment_of(next_run)}
    for field in ("args", "kwargs"):
        shown[field] = kept.get(field) or (repr(values[field]) if values[field] else None)
    made = Schedule(**shown)
    made.id, made.task = record.name, values["task"]
    made._values, made._shown, made._kept = values, shown, kept
    return made


def _changed(record: Record | None, name: str, given: Values) -> Change:
    """The change that sets these fields of a record, and leaves all others as they are stored."""
    broker, was = _broker(), _of_record(record) if record else Schedule()
    now = broker.wall()
    given = {_field(field, ()): value for field, value in given.items()}
    values = was._values | {field: _clean(field, value) for field, value in given.items()}
    changed = {f for f in given if f not in was._values or repr(values[f]) != repr(was._values[f])}
    for field in ("args", "kwargs"):  # a text stays as it was given
        text = (given if field in changed else was._kept).get(field)
        values[f"{field} as text"] = text if isinstance(text, str) else None
    if record and "name" in changed:
        raise InvalidOption(
            f"a schedule keeps its name {name!r}; create another one, and delete this one"
        )
    if record and changed & _CALL and not was._kept:
        raise InvalidOption(
            f"schedule {name!r} is not from tidemill.django.q, so only its times can change; "
            "delete it, and create another one"
        )
    blank = Stored(rule=Rule(), job=Envelope(id=""), planned=now)
    stored = decode(record.body) if record else blank
    if was._kept or not record:
        stored.job = _job(name, values)
    _set_times(stored, values, changed, now)
    if record is None and stored.rule.cron:  # django-q computes the first time of a new cron, too
        stored.planned, stored.paused = next_time(stored.rule, now), values["repeats"] == 0
    due = due_of(stored) if changed & {"next_run", "repeats"} or not record else record.due
    return Change(name, record.version if record else 0, due, encode(stored))


def _set_times(stored: Stored, values: Values, changed: set[str], now: float) -> None:
    """Set the changed times. The next time stays, even if it is past, unless it is given."""
    moment, left = values["next_run"], values["repeats"]
    moved = moment if "next_run" in changed else None
    if moved:
        stored.planned = moved.timestamp()
    was = stored.rule
    if changed & _TIMES:
        rule = _rule(values)
        bare = msgspec.structs.replace(was, at=1.0 if was.at else 0.0, start=0.0)
        stored.rule = was if rule == bare else rule  # a monthly schedule keeps its day
    if moved or stored.rule is not was:
        field = "at" if stored.rule.at else "start"
        stored.rule = msgspec.structs.replace(stored.rule, **{field: stored.planned})
        stored.unanchored, stored.said = False, now
    if "repeats" in changed and left:
        stored.repeats = stored.fired + left if left > 0 else 0
    if changed & {"next_run", "repeats"}:
        stored.paused = moment is None or left == 0


def _job(name: str, values: Values) -> Envelope:
    """The job of a schedule. Its argument ``schedule`` has what neither call nor rule tells."""
    options, kwargs = split_options(values["kwargs"])
    own = {"hook": values["hook"], "cluster": values["cluster"]}
    options = {"group": name, **options, **{key: value for key, value in own.items() if value}}
    kept = {field: values[field] for field in ("minutes", "cron", "intended_date_kwarg")}
    kept |= {"schedule_type": values["schedule_type"], "options": options}
    kept |= {field: values[f"{field} as text"] for field in ("args", "kwargs")}
    kept |= {"repeats": 0} if values["repeats"] == 0 else {}
    # A schedule's job has no hook. So the job of a call with a hook enqueues this call.
    used = {"cluster": options.get("cluster")} if options.get("hook") else options
    call = call_of(values["func"], values["args"], kwargs, used)
    call.kwargs = {"schedule": {key: value for key, value in kept.items() if value is not None}}
    return signed_job(project_mill().runtime, name, call)


def _rule(values: Values) -> Rule:
    """The rule of a type, without its first time."""
    kind = values["schedule_type"]
    if kind == Schedule.ONCE:
        return Rule(at=1.0)
    if kind == Schedule.CRON:
        return When(cron=values["cron"] or "", zone=settings.TIME_ZONE).rule
    if kind in (Schedule.MINUTES, Schedule.HOURLY):
        return Rule(every=3600.0 if kind == Schedule.HOURLY else 60.0 * (values["minutes"] or 1))
    for (count, unit), its_kind in _PERIODS.items():
        if kind == its_kind:
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
    return {"schedule_type": Schedule.ONCE if rule.at else _PERIODS.get((rule.count, rule.unit))}


# -- fields ----------------------------------------------------------------------------------------


def _field(name: str, others: tuple[str, ...] = ("id", "pk", "task")) -> str:
    if name not in (*_FIELDS, *others):
        raise InvalidOption(f"a schedule has no field {name!r}; it has {', '.join(_FIELDS)}")
    return name


_JOINED: dict[str, Callable[[Iterable[bool]], bool]] = {Q.AND: all, Q.OR: any}


def _test_of(where: Any) -> Test:
    tests = [_test_of(part) if isinstance(part, Q) else _test(*part) for part in where.children]
    if where.connector not in _JOINED:
        raise InvalidOption("Schedule.objects joins conditions by & and |, not by ^")
    joined, negated = _JOINED[where.connector], where.negated
    return lambda each: not tests or joined(test(each) for test in tests) != negated


def _test(lookup: str, given: Any) -> Test:
    name, _, how = lookup.partition("__")
    field, how = _field(name), how or "exact"
    if how not in _LOOKUPS:
        raise InvalidOption(
            f"Schedule.objects has no lookup {lookup!r}; after {name}__ can follow: "
            f"{', '.join(_LOOKUPS)}"
        )
    as_values = how in ("exact", "in", "lt", "lte", "gt", "gte")
    if as_values:
        given = [_clean(field, each) for each in given] if how == "in" else _clean(field, given)

    def test(each: Schedule) -> bool:
        value = each._values[field] if as_values else getattr(each, field)
        unknown = value is None and how not in ("exact", "in", "isnull")
        return not unknown and bool(_LOOKUPS[how](value, given))

    return test


def _clean(field: str, value: Any) -> Any:
    """A field as a value: arguments that are no text, times in UTC."""
    if field == "repeats":
        return max(int(value), -1)
    if field == "func" or (field == "hook" and value):
        return path_of(value)
    if field == "minutes" and value is not None:
        return check_count("minutes", int(value), 0)
    if field == "next_run" and (moment := DateTimeField().to_python(value)):
        return moment.astimezone(dt.UTC)  # the local zone is that of the project
    if field == "args":
        value = () if value in (None, "") else _literal(field, value)
        return tuple(map(to_key, value if isinstance(value, tuple) else (value,)))
    if field == "kwargs":
        given = _literal(field, value or {})
        if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
            raise InvalidOption(f"kwargs of a schedule must have names, not {value!r}")
        options, kwargs = split_options(given)
        return {**options, **{name: to_key(each) for name, each in kwargs.items()}}
    return value or None


def _literal(field: str, value: Any) -> Any:
    """The value of a text as django-q takes it: ``1, 'x'``, a dict, or ``a=1, b='x'``."""
    try:
        if not isinstance(value, str):
            return value
        if field == "args" or value.strip().startswith("{"):
            return ast.literal_eval(value)
        call: Any = ast.parse(f"f({value})", mode="eval").body
        words = [*call.args, *call.keywords]  # a positional argument has no attribute ``arg``
        return {word.arg: ast.literal_eval(word.value) for word in words}
    except (SyntaxError, ValueError, TypeError, AttributeError) as error:
        raise InvalidOption(f"{field} of a schedule cannot be read: {value!r}") from error


Schedule.objects = Query()
