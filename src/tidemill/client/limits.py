"""``mill.limits``: list the limits of a store, change them at run time, and hold their places.

``with mill.limits.hold("db"):`` holds a place of a limit in any code. The place is the lease of a
message that has the limit, in a queue that is named after its owner (``docs/design/limits.md``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import HOLDS
from tidemill.brokers.contract.limits import with_limits
from tidemill.client.job_handle import FOREVER
from tidemill.client.messages import Message, Session, Stop, want_of
from tidemill.client.queues import Queue, delete_queue
from tidemill.core.config import Seconds, check_known, check_name, check_seconds
from tidemill.core.crash_points import point
from tidemill.core.envelope import JobLimit, LimitSettings, Ref
from tidemill.core.locks import Condition, Lock
from tidemill.errors import InvalidOption, LeaseLost, LimitTimeout, TidemillError
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
    import asyncio

    from tidemill.runtime import Runtime


log = logging.getLogger("tidemill")

LEASE = 60.0
"""Seconds that a lease lasts after each renewal. When the process stops, the lease runs out."""


class LeaseRenewal:
    """A thread that renews leases of messages three times in :data:`LEASE` seconds.

    The thread starts with the first lease. When no lease is left, the thread ends.
    """

    def __init__(self, every: float = LEASE / 3) -> None:
        self._every = every
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._changed = Condition()
        self._leases: dict[str, Message] = {}
        self._running = False

    def add(self, message: Message) -> None:
        """Renew the lease of a message from now on."""
        if self._pid != os.getpid():  # a forked child has neither the thread nor the leases
            self._reset()
        with self._changed:
            self._leases[message.id] = message
            if not self._running:
                threading.Thread(target=self._run, name="tidemill-renewal", daemon=True).start()
                self._running = True

    def remove(self, message: Message) -> bool:
        """Stop renewing the lease of a message; False for a lease that was not renewed."""
        with self._changed:
            return self._leases.pop(message.id, None) is not None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(self._every)
                messages = list(self._leases.values())
                if not messages:
                    self._running = False
                    return
            for message in messages:
                self._renew(message)

    def _renew(self, message: Message) -> None:
        try:
            renewed = message.touch()
        except TidemillError as error:
            log.warning("%s cannot be renewed now: %s", message, error)
            return
        if not renewed and self.remove(message):
            log.error("%s was lost: its process did not run for %g s", message, LEASE)


class LimitHold:
    """A place of a limit for the length of a block, sync or async. Each block needs its own hold.

    Raises:
        LimitTimeout: no place was free in time.
        LeaseLost: the process stood still for so long that it lost the place inside the block.
    """

    def __init__(self, limits: Limits, limit: Limit, timeout: float | None) -> None:
        self._runtime = limits._runtime
        self._limits = limits
        self._limit = limit
        self._timeout = timeout
        self._lock = Lock()
        self._place: tuple[Session, str, Message] | None = None

    def __enter__(self) -> LimitHold:
        self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.release() and kind is None:
            raise LeaseLost(
                f"the place of the limit {self._limit.name!r} was lost inside the block: the "
                f"process stood still for {LEASE:g} s, and others may have taken the place"
            )

    async def __aenter__(self) -> LimitHold:
        import asyncio

        stop = Stop(self._runtime)
        call = self._runtime.waiters.begin(self._begin, stop)
        try:
            await asyncio.shield(call)
        except asyncio.CancelledError:
            stop.stop()
            call.add_done_callback(self._release_later)
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        import asyncio

        # Without the shield, a cancellation could drop this call before it begins.
        await asyncio.shield(self._runtime.threads.begin(self.__exit__, kind))

    def _release_later(self, call: asyncio.Future[None]) -> None:
        if not call.cancelled() and call.exception() is None:
            self._runtime.threads.start(self.release)

    def _begin(self, stop: Stop | None = None) -> None:
        runtime = self._runtime
        if runtime.sync:
            return
        self._limits._tidy()
        session: Session = runtime.consumers.session
        owner = session.lend(runtime)
        try:
            message = self._take(session, owner, stop)
        except BaseException:
            session.take_back(owner)
            raise
        self._place = session, owner, message
        self._limits._active.add(self)
        self._limits._renewal.add(message)
        point("hold.begun")

    def _take(self, session: Session, owner: str, stop: Stop | None) -> Message:
        """Put a message and take it; delete the message if that fails."""
        runtime, queue = self._runtime, HOLDS + owner
        deadline = time.monotonic() + (FOREVER if self._timeout is None else self._timeout)
        text = f"a place of the limit {self._limit.name!r}"
        # No retries: if the lease is lost, nobody may take the message.
        envelope = Queue(runtime, queue).envelope(text, limit=self._limit, ttr=LEASE, retries=0)
        with session.waits(owner):
            try:
                runtime.broker.put([envelope])  # stored now, even inside a batch
                point("hold.put")
                taken = runtime.consumers.receive(
                    session, owner, want_of(1, (queue,)), deadline, stop
                )
                if not taken:
                    raise self._not_taken(session)
                return taken[0]
            except BaseException:
                with contextlib.suppress(TidemillError):  # another process tidies up later
                    runtime.broker.delete([envelope.id])
                    runtime.broker.forget_queue(queue)
                raise

    def _not_taken(self, session: Session) -> TidemillError:
        if session.over:
            return TidemillError(
                f"the app was closed before a place of the limit {self._limit.name!r} was free"
            )
        # Without a timeout only a cancellation leads here, and nobody reads this error.
        seconds = self._timeout or 0.0
        return LimitTimeout(
            f"no place of the limit {self._limit.name!r} was free within {seconds:g} s"
        )

    def release(self) -> bool:
        """Free the place now; False when the place was lost. A second call returns True."""
        with self._lock:
            place, self._place = self._place, None
        if place is None or place[0].pid != os.getpid():  # a forked child has no place
            return True
        session, owner, message = place
        self._limits._active.discard(self)
        self._limits._renewal.remove(message)
        try:
            kept = message.ack()
            point("hold.ended")
            with contextlib.suppress(TidemillError):  # another process tidies up later
                if not kept:
                    self._runtime.broker.delete([message.id])
                self._runtime.broker.forget_queue(message.queue)
        finally:
            session.take_back(owner)
        return kept


class Limits:
    """The limits of a store: ``mill.limits``."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._active: set[LimitHold] = set()  # the holds of this process that have their place
        self._renewal = LeaseRenewal()
        self._tidied = 0  # the process that has deleted queues of dead processes
        self._queues: dict[str, dict[str, Any]] = {}  # the settings that this app has declared

    def list(self) -> list[LimitStats]:
        """All limits with their numbers, by name; limits of queues come first.

        Raises:
            FeatureMissing: the broker has no limits.
        """
        return with_limits(self._runtime.broker, "limits").limits()

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
        with_limits(self._runtime.broker, "a limit").set_limit(name, None)

    def reset_queue(self, name: str) -> None:
        """Undo changes of the limit of a queue, as :meth:`reset` does."""
        check_name("queue", name)
        with_limits(self._runtime.broker, "a limit").set_limit(name, None, queue=True)

    def declare_queue(self, name: str, settings: Mapping[str, Any]) -> None:
        """Declare the limit of a queue in code; a limit that was changed at run time stays."""
        declared = {**self._queues.get(name, {}), **settings}
        terms = terms_from(declared)
        self._queues[name] = declared
        option = f"{next(iter(settings))}="
        self._runtime.features.need(Feature.LIMITS, option)
        with_limits(self._runtime.broker, option).set_limit(name, terms, queue=True, declared=True)

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
        self._runtime.features.need(Feature.LIMITS, "limits.hold()")
        seconds = None if timeout is None else check_seconds("timeout", timeout)
        return LimitHold(self, self._held(limit, key), seconds)

    def _tidy(self) -> None:
        """Delete queues that killed processes left behind: once in each process."""
        if self._tidied == os.getpid():
            return
        self._tidied = os.getpid()
        broker = self._runtime.broker
        # Read the queues before the owners: an owner is attached before its queue is made.
        queues = [row.name for row in broker.stats() if row.name.startswith(HOLDS)]
        owners = {owner.id for owner in broker.owners()} if queues else set()
        for queue in queues:
            if queue.removeprefix(HOLDS) not in owners:
                with contextlib.suppress(TidemillError):  # another process may have deleted it
                    delete_queue(self._runtime, queue, force=True)

    def close(self) -> None:
        """Free the places that this app holds."""
        for hold in list(self._active):
            with contextlib.suppress(TidemillError):  # the end of the lease also frees the place
                hold.release()

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
        declared = {task.name: task.options.limit for task in list(self._runtime.tasks.values())}
        return {
            task: limit
            for task, limit in declared.items()
            if limit is not None and (limit.name or task) == name
        }

    def _change(self, name: str, changes: Mapping[str, Any], *, queue: bool) -> None:
        if not changes:
            names = [term for term in TERMS if queue or term != "breaker"]
            raise InvalidOption(f"give a setting of the limit {name!r}: {', '.join(names)}")
        broker = with_limits(self._runtime.broker, "a limit")
        rows = [row for row in broker.limits() if (row.name, row.queue) == (name, queue)]
        old = rows[0].terms if rows else LimitSettings()
        broker.set_limit(name, terms_from(changes, old), queue=queue)

    def check_shared(self, task: str, limit: Limit | None) -> None:
        """Refuse a task's limit if another task declares the same name with other settings."""
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
        """The key, the cost and the settings of a job's limit; call before the put."""
        computed = callable(limit.key) or callable(limit.cost)
        if computed and _holds_ref([*args, *kwargs.values()]):
            what = "key" if callable(limit.key) else "cost"
            raise InvalidOption(
                f"the {what} of the limit of {name!r} is a function of the arguments, and the "
                "result of an earlier job is not known yet; give a fixed value with using(…)"
            )
        if not self._runtime.sync:
            with_limits(self._runtime.broker, "limit=")
        return limit.claim(name, args, kwargs)


def _holds_ref(value: object) -> bool:
    """True when a part of the value is the result of another job."""
    if isinstance(value, (list, tuple)):
        return any(_holds_ref(item) for item in value)
    return isinstance(value, Ref)
