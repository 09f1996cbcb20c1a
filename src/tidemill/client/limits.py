"""``mill.limits``: list the limits of a store, and change them at run time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.limits import with_limits
from tidemill.client.runtime import Runtime
from tidemill.core.config import check_known, check_name
from tidemill.core.errors import InvalidOption
from tidemill.core.job import Ref
from tidemill.core.limit_settings import JobLimit, LimitSettings
from tidemill.limits.arithmetic import LimitStats
from tidemill.limits.declare import TERMS, Limit, terms_from

__all__ = ["Limits"]


class Limits:
    """The limits of a store: ``mill.limits``."""

    def __init__(self, mill: Runtime) -> None:
        self._mill = mill
        self._queues: dict[str, dict[str, Any]] = {}  # the settings that this app has declared

    def list(self) -> list[LimitStats]:
        """All limits with their numbers: limits of queues first, then by name."""
        return with_limits(self._mill.broker, "limits").limits()

    def set(self, name: str, **changes: Any) -> None:
        """Change a limit by its name. A limit without a name has the name of its task.

        Options as of :class:`Limit`: ``rate burst window concurrency``. Options that are not given
        stay; None removes one. The change holds at once, for all workers, and code does not
        override it. It ends with the next change, or with :meth:`reset`.
        """
        check_known("a limit", changes, [term for term in TERMS if term != "breaker"])
        self._change(check_name("name of a limit", name), changes, queue=False)

    def set_queue(self, name: str, **changes: Any) -> None:
        """Change the limit of a queue, as :meth:`set` does; ``breaker`` is an option, too."""
        check_known("the limit of a queue", changes, TERMS)
        self._change(check_name("queue", name), changes, queue=True)

    def reset(self, name: str) -> None:
        """Give a limit back to the code: its latest declaration holds again, and later ones do."""
        check_name("name of a limit", name)
        with_limits(self._mill.broker, "a limit").set_limit(name, None)

    def reset_queue(self, name: str) -> None:
        """Give the limit of a queue back to the code, as :meth:`reset` does."""
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

    def _change(self, name: str, changes: Mapping[str, Any], *, queue: bool) -> None:
        if not changes:
            raise InvalidOption(f"give a setting of the limit {name!r}: {', '.join(TERMS)}")
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
        for other in list(self._mill.tasks.values()):
            theirs = other.options.limit
            if theirs is None or other.name == task or (theirs.name or other.name) != name:
                continue
            if theirs.terms != limit.terms:
                raise InvalidOption(
                    f"the limit {name!r} of task {task!r} has other settings in task "
                    f"{other.name!r}; share one Limit, or give one of the two another name="
                )

    def claim(
        self, limit: Limit, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> JobLimit:
        """The claim that a job makes on its limit; call before the put.

        Raises:
            InvalidOption: the key or the cost is not known yet, or is unusable.
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
