"""Declarations of tasks: the options that a call by name takes from the store.

A worker stores the options of its tasks (:mod:`tidemill.worker.declarations`). A producer without
the task's code reads the options when it enqueues a call of the task by name. The store keeps a
declaration as a record among the records of schedules, with plain data as its body. No store can
hold a function that computes a key or a limit. So ``computed`` lists the options that a function
computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.schedules import DECLARATION
from tidemill.client.options import CALL_OPTIONS, Key, Options
from tidemill.client.threads import is_in_event_loop
from tidemill.core.clock import clock
from tidemill.core.retry import RetryPolicy
from tidemill.core.suggest import did_you_mean
from tidemill.errors import FeatureMissing, InvalidOption, TaskNotFound, TidemillError
from tidemill.limits.declare import Limit

if TYPE_CHECKING:
    from tidemill.runtime import Runtime

FRESH = 10.0  # seconds for which a producer uses a declaration that it has read

ABSENT = 1.0
"""Seconds for which a producer remembers missing declarations, and names of declared tasks."""

AHEAD = 0.5
"""An event loop reads declarations again this many seconds before they get too old for use."""

MOST = 1000  # the most declarations that a producer remembers, or reads for a suggestion


class _Body(msgspec.Struct, kw_only=True):
    """The body of a declaration's record: options, and arguments of a Key and a Limit."""

    queue: str
    rank: int
    retries: RetryPolicy
    timeout: float
    expires: float
    key: dict[str, Any] | None
    result_ttl: float
    limit: dict[str, Any] | None
    tags: tuple[str, ...]
    computed: tuple[str, ...]


_SAME = tuple(set(_Body.__struct_fields__) - {"key", "limit", "computed"})
_LIMIT = ("rate", "burst", "window", "concurrency", "key", "cost", "name")
_decode = msgspec.msgpack.Decoder(_Body).decode


class _Declared(NamedTuple):
    """Declared options, the names of computed options, and the time to read the options again."""

    options: Options | None
    computed: tuple[str, ...]
    until: float  # machine time


class Declarations:
    """The declarations of tasks in the store of an app."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._known: dict[str, _Declared] = {}
        self._names: list[str] = []  # of declared tasks, for suggestions
        self._listed_until = 0.0  # machine time

    def own(self) -> list[tuple[str, bytes]]:
        """The tasks of this app: names, and bodies of their records."""
        return [(name, _body_of(task.options)) for name, task in list(self._runtime.tasks.items())]

    def complete(self, task: str, options: Options) -> Options:
        """The options of a call by name: the declared or default options, and the given ones."""
        given = options.given or {}
        base = self._base(task, given)
        return base.changed(f"a call of {task}", given, CALL_OPTIONS) if given else base

    def stale(self, tasks: Iterable[str]) -> list[str]:
        """The tasks whose declarations an event loop should first read in a thread."""
        if self._runtime.sync:
            return []
        soon = clock.machine() + AHEAD
        mine, known = self._runtime.tasks, self._known
        return [
            name
            for name in dict.fromkeys(tasks)
            if name not in mine and (name not in known or known[name].until < soon)
        ]

    def read(self, tasks: Iterable[str]) -> None:
        """Read declarations in one call of the store, and the names that an error may suggest."""
        if names := list(tasks):
            found = self._read(names)
            if any(declared.options is None for declared in found.values()):
                self._list_names()

    def known(self, tasks: Iterable[str]) -> set[str]:
        """Those of the tasks that this app has or may find, or that a worker has declared."""
        names, runtime = set(tasks), self._runtime
        own = {name for name in names if name in runtime.tasks or runtime.may_find(name)}
        return own | {name for name, body in self._bodies([*names - own]) if body is not None}

    def _bodies(self, names: Sequence[str]) -> list[tuple[str, bytes | None]]:
        """Each name with the body of its record, if the store has one."""
        broker = self._runtime.broker
        if not names or Feature.SCHEDULES not in broker.features:
            return [(name, None) for name in names]
        records = broker.schedules([f"{DECLARATION}{name}" for name in names])
        bodies = [record.body if record is not None else None for record in records]
        return list(zip(names, bodies, strict=True))

    def _read(self, names: Sequence[str]) -> dict[str, _Declared]:
        if len(self._known) > MOST:
            self._known.clear()
        now = clock.machine()
        found = {name: _opened(name, body, now) for name, body in self._bodies(names)}
        self._known.update(found)
        return found

    def _base(self, task: str, given: Mapping[str, Any]) -> Options:
        mine = self._runtime.tasks.get(task)
        if mine is not None:
            return mine.options
        if not self._runtime.sync:
            declared = self._known.get(task)
            if declared is None or declared.until < clock.machine():
                declared = self._read([task])[task]
            if declared.options is not None:
                _check_computed(task, declared.computed, given)
                return declared.options
        if (found := self._runtime.declared(task)) is not None:
            return found.options
        if given.get("queue") is not None or self._runtime.may_import(task):
            return self._runtime.defaults
        self._known.pop(task, None)  # a worker with the task may start at any moment
        raise self._refusal(task)

    def _list_names(self) -> None:
        """Read the names of declared tasks, for a suggestion."""
        broker, now = self._runtime.broker, clock.machine()
        if now < self._listed_until or Feature.SCHEDULES not in broker.features:
            return
        try:
            records = broker.list_schedules(DECLARATION, MOST)
        except TidemillError:  # such as missing rights
            return
        self._listed_until = now + ABSENT
        names = [record.name for record in records if record.name.startswith(DECLARATION)]
        self._names = [name.removeprefix(DECLARATION) for name in names]

    def _refusal(self, task: str) -> TaskNotFound | FeatureMissing:
        """The error for a call of a task that nobody has declared."""
        runtime = self._runtime
        if not runtime.sync and not is_in_event_loop():
            self._list_names()
        near = did_you_mean(task, [*runtime.tasks, *self._names])
        if runtime.sync:
            how = near or "import the module that declares it"
            return TaskNotFound(
                f"{task!r} is no task of this app and matches none of allow_imports; {how}"
            )
        broker = runtime.broker
        if Feature.SCHEDULES not in broker.features:
            scheme = broker.url.partition("://")[0]
            return FeatureMissing(
                f"{task!r} is no task of this app, and {scheme}:// keeps no options of tasks; "
                "give queue= and the task's other options, or import its module"
            )
        hint = f"{near} Else start" if near else "start"
        return TaskNotFound(
            f"{task!r} is no task of this app, and no worker on {broker.url} has declared it; "
            f"{hint} its worker first, give the call a queue= to use this app's defaults, "
            "or allow the path by allow_imports"
        )


def _body_of(options: Options) -> bytes:
    key, limit = options.key, options.limit
    computes = {
        "key": key is not None and callable(key.name),
        "limit": limit is not None and (callable(limit.key) or callable(limit.cost)),
    }
    body = _Body(
        **{name: getattr(options, name) for name in _SAME},
        key=None if key is None or computes["key"] else dataclasses.asdict(key),
        limit=None
        if limit is None or computes["limit"]
        else {name: getattr(limit, name) for name in _LIMIT},
        computed=tuple(name for name, computed in computes.items() if computed),
    )
    return msgspec.msgpack.encode(body)


def _opened(task: str, body: bytes | None, now: float) -> _Declared:
    if body is None:
        return _Declared(None, (), now + ABSENT)
    try:
        stored = _decode(body)
    except msgspec.MsgspecError as error:
        raise InvalidOption(
            f"task {task!r} was declared by another version of tidemill; install the version of "
            f"its worker here, too ({error})"
        ) from error
    options = Options(
        **{name: getattr(stored, name) for name in _SAME},
        key=Key(**stored.key) if stored.key is not None else None,
        limit=Limit(**stored.limit) if stored.limit is not None else None,
    )
    return _Declared(options, stored.computed, now + FRESH)


def _check_computed(task: str, computed: tuple[str, ...], given: Mapping[str, Any]) -> None:
    """Refuse a call without an option that only a function of the task can compute."""
    for option in computed:
        if given.get(option) is None:
            raise InvalidOption(
                f"the {option} of task {task!r} is computed by a function, which only its own app "
                f"has; give {option}= with the call, or import the task's module"
            )
