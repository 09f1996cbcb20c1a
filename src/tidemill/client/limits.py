"""``mill.limits``: list the limits of a store, and change them at run time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.limits import with_limits
from tidemill.client.limit_hold import Holds, LimitHold
from tidemill.core.config import Seconds, check_known, check_name, check_seconds
from tidemill.core.envelope import Ref
from tidemill.core.errors import InvalidOption
from tidemill.core.limit_settings import JobLimit, LimitSettings
from tidemill.limits.arithmetic import LimitStats
from tidemill.limits.declare import (
    LIMIT_TERMS,
    TERMS,
    Limit,
    LimitChanges,
    QueueLimitChanges,
    terms_from,
)

if TYPE_CHECKING:
    from tidemill.runtime import Runtime


class Limits:
    """The limits of a store: ``mill.limits``."""

    def __init__(self, mill: Runtime) -> None:
        self._mill = mill
        self._holds = Holds(mill)
        self._queues: dict[str, dict[str, Any]] = {}  # the settings that this app has declared

    def list(self) -> list[LimitStats]:
        """All limits with their numbers, by name; limits of queues come first.

        Raises:
            FeatureMissing: the broker has no limits.
        """
        return with_limits(self._mill.broker, "limits").limits()

    def set(self, name: str, **changes: Unpack[LimitChanges]) -> None:
        """Change a limit by its name. A limit without a name has the name of its task.

        The options are ``rate burst window concurrency``, as in :class:`Limit`. Options not given
        stay; None removes an option. The change applies at once, for all workers, and takes
        precedence over the code, until the next change or :meth:`reset`.

        Raises:
            InvalidOption: no option is given, or a value cannot be used.
            FeatureMissing: the broker has no limits.
        """
        check_known("a limit", changes, LIMIT_TERMS)
        self._change(check_name("name of a limit", name), changes, queue=False)

    def set_queue(self, name: str, **changes: Unpack[QueueLimitChanges]) -> None:
        """Change the limit of a queue, as :meth:`set` does; ``breaker`` is an option, too."""
        check_known("the limit of a queue", changes, TERMS)
        self._change(check_name("queue", name), changes, queue=True)

    def reset(self, name: str) -> None:
        """Undo changes made at run time: the latest declaration in code applies again."""
        check_name("name of a limit", name)
        with_limits(self._mill.broker, "a limit").set_limit(name, None)

    def reset_queue(self, name: str) -> None:
        """Undo changes of the limit of a queue, as :meth:`reset` does."""
        check_name("queue", name)
        with_limits(self._mill.broker, "a limit").set_limit(name, None, queue=True)

    def declare_queue(self, name: str, settings: Mapping[str, Any]) -> None:
        """Declare the limit of a queue in code; a limit that was changed at run time stays."""
        declared = {**self._queues.get(name, {}), **settings}
        terms = terms_from(declared)
        self._queues[name] = declared
        option = f"{next(iter(settings))}="
        self._mill.features.need(Feature.LIMITS, option)
        with_limits(self._mill.broker, option).set_limit(name, terms, queue=True, declared=True)

    def hold(
        self, limit: str | Limit, *, key: str | None = None, timeout: Seconds | None = None
    ) -> LimitHold:
        """Hold a place of a limit in any code: ``with mill.limits.hold("db", timeout=5):``.

        Tasks with this limit and all holds share its places. If the limit has a rate, a hold also
        takes a token. In async code write ``async with``. With ``sync=True`` a hold does nothing.

        Args:
            limit: the name of a limit that a task of this app declares, or a ``Limit`` with a name.
            key: for a limit with keys: the key whose place is taken.
            timeout: seconds to wait for a place; by default the wait has no end.

        Raises:
            InvalidOption: no task declares the limit, or the key does not fit it.
            LimitTimeout: raised by the block: no place was free in time.
            FeatureMissing: the broker has no limits.
        """
        self._mill.features.need(Feature.LIMITS, "limits.hold()")
        seconds = None if timeout is None else check_seconds("timeout", timeout)
        return LimitHold(self._mill, self._holds, self._held(limit, key), seconds)

    def close(self) -> None:
        """Free the places that this app holds."""
        self._holds.close()

    def _held(self, given: str | Limit, key: str | None) -> Limit:
        """The limit of a hold, with a fixed name, key and cost."""
        name = given.name if isinstance(given, Limit) else given
        if name is None:
            raise InvalidOption("a limit that code holds needs a name; give Limit(name=…)")
        limits = self._declared(check_name("name of a limit", name))
        limit = given if isinstance(given, Limit) else next(iter(limits.values()), None)
        if limit is None:
            raise InvalidOption(
                f"no task of this app declares a limit {name!r}; "
                "declare it with @mill.task(limit=…), or give hold() the Limit itself"
            )
        for task, theirs in limits.items():
            if theirs.terms != limit.terms:
                raise InvalidOption(
                    f"the limit {name!r} has other settings in task {task!r}; share one Limit"
                )
        if key is None and callable(limit.key):
            raise InvalidOption(f"the limit {name!r} has keys; say which one with key=")
        if key is not None and limit.key is None:
            raise InvalidOption(f"the limit {name!r} has no keys; leave key= out")
        own = limit.key if key is None else check_name("key of a limit", key)
        cost = 1.0 if callable(limit.cost) else limit.cost
        return dataclasses.replace(limit, name=name, key=own, cost=cost)

    def _declared(self, name: str) -> dict[str, Limit]:
        """The tasks that declare a limit of this name, with their limits."""
        declared = {task.name: task.options.limit for task in list(self._mill.tasks.values())}
        return {
            task: limit
            for task, limit in declared.items()
            if limit is not None and (limit.name or task) == name
        }

    def _change(self, name: str, changes: Mapping[str, Any], *, queue: bool) -> None:
        if not changes:
            names = [term for term in TERMS if queue or term != "breaker"]
            raise InvalidOption(f"give a setting of the limit {name!r}: {', '.join(names)}")
        broker = with_limits(self._mill.broker, "a limit")
        rows = [row for row in broker.limits() if (row.name, row.queue) == (name, queue)]
        old = rows[0].terms if rows else LimitSettings()
        broker.set_limit(name, terms_from(changes, old), queue=queue)

    def check_shared(self, task: str, limit: Limit | None) -> None:
        """Refuse a task's limit if another task declares the same name with other settings.

        Raises:
            InvalidOption: the settings differ, so each put would change the limit.
        """
        if limit is None:
            return
        name = limit.name or task
        for other, theirs in self._declared(name).items():
            if other != task and theirs.terms != limit.terms:
                raise InvalidOption(
                    f"the limit {name!r} of task {task!r} has other settings in task "
                    f"{other!r}; share one Limit, or give one of the two another name="
                )

    def claim(
        self, limit: Limit, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> JobLimit:
        """The key, the cost and the settings of a job's limit; call before the put.

        Raises:
            InvalidOption: the key or the cost is not known yet, or cannot be used.
        """
        computed = callable(limit.key) or callable(limit.cost)
        if computed and _holds_ref([*args, *kwargs.values()]):
            what = "key" if callable(limit.key) else "cost"
            raise InvalidOption(
                f"the {what} of the limit of {name!r} is a function of the arguments, and the "
                "result of an earlier job is not known yet; give a fixed value with using(…)"
            )
        if not self._mill.sync:
            with_limits(self._mill.broker, "limit=")
        return limit.claim(name, args, kwargs)


def _holds_ref(value: object) -> bool:
    """True when a part of the value is the result of another job."""
    if isinstance(value, (list, tuple)):
        return any(_holds_ref(item) for item in value)
    return isinstance(value, Ref)
