"""Messages in one process: take them from the store, hold their leases, and settle them.

A message with ttr=0 is handed out at most once. Such messages are leased as all messages are.
If its consumer no longer wants the message, the message goes back to its place in the queue. The
acknowledgement is stored just before the consumer gets the message
(``docs/design/at-most-once.md``).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from tidemill.brokers.contract.exchange import Mode, Reply, Step, Want
from tidemill.brokers.contract.features import Feature, lacks
from tidemill.client.job_handle import FOREVER
from tidemill.client.threads import cancel_later, in_thread
from tidemill.core.clock import clock, new_id
from tidemill.core.codec import unpack, unpack_pickle
from tidemill.core.config import Seconds, check_count, check_name, check_seconds, storable
from tidemill.core.envelope import Envelope, priority_of
from tidemill.core.job import Lease, Outcome, Owner, Verdict
from tidemill.core.locks import Condition, Lock
from tidemill.core.signatures import refusal, trusted
from tidemill.errors import (
    CodecError,
    FeatureMissing,
    InvalidOption,
    LeaseLost,
    StoreBusy,
    TidemillError,
)

if TYPE_CHECKING:
    import asyncio

    from tidemill.brokers.contract.broker import CallerTransactions
    from tidemill.runtime import Runtime

log = logging.getLogger("tidemill")

MOST = 1000  # the most messages that one call takes
YOUNG_LEASE = 30.0  # a lease younger than this many seconds has surely not run out

SHORT_PATIENCE = 1.0
"""The shortest time in seconds for which a step of ``get`` waits for other writers."""

BUSY_MOST = 30.0
"""Seconds of a busy store after which ``get`` raises. Before that, it returns no message."""

_PAUSE = 0.05  # seconds between two tries of a busy store that has no patience
_PAUSE_MOST = 2.0  # seconds without a try after which the time of a busy store begins anew

PATIENCE = 5.0  # seconds that a close waits for running calls of ``get`` to end


class Message:
    """A leased message. As a context manager it is acknowledged at the end, or retried on an error.

    The end of the block raises ``LeaseLost`` when the message was not acknowledged within its ttr.

    Attributes:
        id, queue, body, key, tags, headers: the values of the put.
        attempt: the number of this delivery, from 1. A delivery that was released does not count.
        ttr: seconds for the acknowledgement, from the lease or the latest ``touch``. 0 for a
            message that is handed out at most once: such a message is acknowledged just before its
            delivery.
    """

    __slots__ = (
        *("id", "queue", "key", "tags", "headers", "attempt", "ttr"),
        *("_body", "_garbled", "_leased", "_owner", "_pickled", "_put_ttr", "_rank", "_settled"),
        *("_runtime", "_token"),
    )

    def __init__(self, runtime: Runtime, owner: str, lease: Lease, envelope: Envelope) -> None:
        self._runtime = runtime
        self._owner = owner
        self._token = lease.token
        self.id = envelope.id
        self.queue = envelope.queue
        self.key = envelope.key
        self.tags = envelope.tags
        self.headers = envelope.headers
        self.attempt = lease.attempt
        self.ttr = 0.0 if envelope.at_most_once else lease.deadline
        self._body = envelope.body
        self._pickled = envelope.pickled
        self._leased = lease.leased
        self._put_ttr = self.ttr
        self._rank = lease.rank
        self._settled = False
        self._garbled = False

    @property
    def body(self) -> Any:
        """The body.

        Raises:
            CodecError: the body cannot be decoded. ``with message:`` then buries the message.
        """
        try:
            # A pickled body was verified before the message was handed out.
            return unpack_pickle(self._body) if self._pickled else unpack(self._body)
        except CodecError:
            self._garbled = True
            raise

    @property
    def priority(self) -> float:
        """The priority of the put: -100 to 100, higher first."""
        return priority_of(self._rank)

    @property
    def redelivered(self) -> bool:
        """True when an earlier delivery failed, so that its consumer may have done the work.

        A release is no failure, because a consumer releases a message whose work it has not done.
        """
        return self.attempt > 1

    @property
    def at_most_once(self) -> bool:
        """True for a message with ``ttr=0``."""
        return not self.ttr

    def ack(self, *, txn: Any = None) -> bool:
        """Acknowledge the message, which deletes it. False when the lease was lost.

        With ``txn``, your own open transaction, the message is deleted if and only if the
        transaction commits. Otherwise it comes back when its ttr is over; ``release`` brings it
        back at once. The end of the message's block then does nothing.

        Raises:
            LeaseLost: the lease was lost, and ``txn`` must not commit.
        """
        if txn is None:
            return self._settle(Outcome.SUCCESS)
        if self.at_most_once:
            return False  # the message was acknowledged at its delivery
        broker = self._runtime.broker
        if Feature.TRANSACTIONS not in broker.features:
            why = lacks(broker.url, Feature.TRANSACTIONS, "ack(txn=)")
            raise FeatureMissing(f"{why}; commit your rows first, then call ack()")
        inside = cast("CallerTransactions", broker)
        verdict = Verdict(self._token, Outcome.SUCCESS, started=self._leased, ended=clock.wall())
        if not inside.settle_inside(self._owner, verdict, txn):
            raise LeaseLost(
                f"message {self.id} is no longer leased to this consumer, so another may have it. "
                "Roll your transaction back"
            )
        self._settled = True
        return True

    def release(self, delay: Seconds = 0) -> bool:
        """Put the message back to its place after ``delay`` seconds. Counts no attempt.

        False when the lease was lost.
        """
        return self._settle(Outcome.RELEASE, delay=check_seconds("delay", delay))

    def bury(self, reason: str = "buried") -> bool:
        """Keep the message as failed, until somebody retries or deletes the message.

        False when the lease was lost.
        """
        return self._settle(Outcome.FAIL, error=str(reason))

    def touch(self, ttr: Seconds | None = None) -> bool:
        """Restart the ttr, with a new value if given. False when the lease was lost."""
        seconds = 0.0 if ttr is None else check_seconds("ttr", ttr)
        step = Step(self._owner, touch=[(self._token, seconds)])
        touched = self._runtime.consumers.exchange(step).touched[0]
        if not touched:
            return False
        self.ttr = seconds or self._put_ttr
        return True

    aack = in_thread(ack)
    arelease = in_thread(release)
    abury = in_thread(bury)
    atouch = in_thread(touch)

    def _settle(self, outcome: Outcome, *, delay: float = 0.0, error: str = "") -> bool:
        return bool(settle_together([self], outcome, delay=delay, error=error))

    def __enter__(self) -> Message:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if self._settled:  # settled at its delivery or in the block, or ``txn`` decides
            return
        if error is None:
            if not self.ack():
                raise LeaseLost(
                    f"message {self.id} was not acknowledged within its ttr of {self.ttr:g} s; "
                    "another consumer may have it. Touch it while working, or put it with more ttr"
                )
        elif isinstance(error, CodecError) and self._garbled:
            self.bury(str(error))
        elif isinstance(error, Exception):
            # The store counts the attempt and delays the message by its retry policy.
            self._settle(Outcome.RETRY, error=f"{type(error).__name__}: {error}")
        else:
            self.release()  # the consumer was stopped, and the message did not fail

    async def __aenter__(self) -> Message:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        await self._runtime.threaded(self.__exit__, kind, error, trace)

    def __repr__(self) -> str:
        return f"<message {self.id} of {self.queue}, attempt {self.attempt}>"


def settle_together(
    messages: Sequence[Message], outcome: Outcome, *, delay: float = 0.0, error: str = ""
) -> list[Message]:
    """Settle messages of one owner in one exchange. Return the messages whose leases were valid."""
    first, now = messages[0], clock.wall()
    shown = storable(error)[:2000]
    verdicts = [
        Verdict(m._token, outcome, delay=delay, error=shown, started=m._leased, ended=now)
        for m in messages
    ]
    answers = first._runtime.consumers.exchange(Step(first._owner, verdicts)).settled
    settled = []
    for message, done in zip(messages, answers, strict=True):
        if done:
            message._settled = True
            settled.append(message)
    return settled


def fresh_copy(envelope: Envelope, lease: Lease) -> Envelope:
    """A copy of a message with ttr=0 that was acknowledged, but could not be handed over."""
    left = 0.0
    if envelope.expires:
        left = max(0.001, envelope.created + envelope.expires - clock.wall())
    return msgspec.structs.replace(
        envelope, delay=0.0, at=0.0, rank=lease.rank, expires=left, unique=None
    )


def consumer_here(owner_id: str, what: str = "") -> Owner:
    """An owner of messages in this process; ``what`` comes before its host in its name."""
    import socket

    host, pid, now = socket.gethostname(), os.getpid(), clock.wall()
    name = f"{what}{host}:{pid}"
    return Owner(id=owner_id, kind="consumer", name=name, host=host, pid=pid, started=now)


class Session:
    """The consumers of this process from the first ``get`` until the app is closed.

    Attributes:
        over: True once the app is closed. Then waits end, and no call takes a message.
        waiting: the id of the thread in each call of ``get``, by the id of the owner.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.over = False
        self.idle: list[str] = []
        self.attached: dict[str, Owner] = {}
        self.waiting: dict[str, int] = {}
        self._changed = Condition()

    def lend(self, runtime: Runtime) -> str:
        """An owner for the caller alone, until :meth:`take_back`."""
        try:
            return self.idle.pop()
        except IndexError:
            return self._attach(runtime)

    def take_back(self, owner: str) -> None:
        self.idle.append(owner)

    @contextlib.contextmanager
    def waits(self, owner: str) -> Iterator[None]:
        """Surround a wait of a lent owner; a close of the app ends the wait."""
        self.waiting[owner] = threading.get_ident()
        try:
            yield
        finally:
            with self._changed:
                self.waiting.pop(owner, None)
                self._changed.notify_all()

    def _attach(self, runtime: Runtime) -> str:
        owner = consumer_here(new_id())
        runtime.broker.attach(owner)
        self.attached[owner.id] = owner
        return owner.id

    def close(self, runtime: Runtime) -> None:
        """End the calls of ``get`` in other threads, and wait until they have ended."""
        self.over = True
        until = time.monotonic() + PATIENCE
        with self._changed:
            for owner in self._in_other_threads():
                with contextlib.suppress(TidemillError):  # the owner is not attached now
                    runtime.broker.wake(owner)
            while self._in_other_threads() and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)

    def _in_other_threads(self) -> list[str]:
        """The owners whose ``get`` runs in another thread than this close of the app."""
        here = threading.get_ident()
        return [owner for owner, thread in list(self.waiting.items()) if thread != here]


def want_of(count: int, names: tuple[str, ...], order: Mode = Mode.STRICT) -> Want:
    """The want of a consumer that does not sleep."""
    return Want(count, names, order, tasks=False, messages=True, sleep=False)


def first(messages: Sequence[Message]) -> Message | None:
    """The message of a call that took at most one."""
    return messages[0] if messages else None


class Consumers:
    """The owners of one process. Each running call of ``get`` has an owner of its own."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._session = Session()
        # Monotonic times of the first and of the latest exchange that found the store busy.
        self._busy_since = self._busy_until = -math.inf

    @property
    def session(self) -> Session:
        """The owners of this process. A forked child starts without owners."""
        if self._session.pid != os.getpid():
            self._session = Session()
        return self._session

    def get_many(
        self,
        queues: Sequence[str],
        count: int,
        timeout: Seconds | None,
        session: Session | None = None,
        stop: Stop | None = None,
        *,
        order: str = Mode.STRICT,
    ) -> list[Message]:
        """See :meth:`tidemill.Tidemill.get_many`. Empty when the ``session`` is over.

        For several messages, the first exchange asks for no wake-up: a store with fewer messages
        would record that the owner waits. The next exchange asks if the queues were empty.
        """
        if isinstance(queues, str) or not queues:
            raise InvalidOption("queues must be a list of at least one queue name")
        names = tuple(check_name("queue", name) for name in queues)
        want = want_of(count, names, self._order(order))
        check_count("n", count, 1, MOST)
        seconds = FOREVER if timeout is None else check_seconds("timeout", timeout)
        deadline = time.monotonic() + seconds
        session = session or self.session
        if session.over:
            return []
        try:
            owner = session.lend(self.runtime)
            try:
                with session.waits(owner):
                    return self.receive(session, owner, want, deadline, stop)
            finally:
                session.take_back(owner)
        except TidemillError:
            if not session.over:
                raise
            return []

    def _order(self, order: str) -> Mode:
        if order not in list(Mode):
            raise InvalidOption(f"order must be strict, fair or merged, not {order!r}")
        if order == Mode.MERGED:
            self.runtime.features.need(Feature.MERGED, "order merged")
        return Mode(order)

    def receive(
        self, session: Session, owner: str, want: Want, deadline: float, stop: Stop | None
    ) -> list[Message]:
        """The next messages for a lent owner; empty after the deadline, a stop or a close."""
        count = want.count
        asleep, sleeps, taken = False, count == 1, 0.0
        leases: list[Lease] = []
        try:
            while not session.over and (stop is None or stop.goes_on(owner)):
                left = deadline - time.monotonic()
                # The last exchange asks for no wake-up, because this call ends after it.
                asks = sleeps and left > 0
                asked = msgspec.structs.replace(want, sleep=asks)
                step = Step(owner, want=asked, patience=max(SHORT_PATIENCE, left))
                before, asleep = asleep, asleep or asks  # an exchange that fails may have been made
                reply = self._exchange_unless_busy(step)
                asleep = before if reply is None else asks
                if reply is None:
                    if deadline <= time.monotonic():
                        return []
                    self.runtime.broker.wait(owner, _PAUSE)
                elif reply.leases:
                    leases, taken = reply.leases, time.monotonic()
                    if asleep and len(leases) < count:
                        self._sleep_no_more(owner, want)
                    asleep = False
                    if messages := self._deliver(self._open(owner, leases), stop):
                        return messages
                    leases = []
                elif left <= 0:
                    return []
                elif asleep:
                    self.runtime.broker.wait(owner, max(0.0, min(left, reply.next_due)))
                    sleeps = count == 1
                else:
                    sleeps = True
        except BaseException:
            if leases:  # the leases have no consumer: a handler has raised, or the store is away
                self._give_back(owner, leases, time.monotonic() - taken < YOUNG_LEASE)
            raise
        finally:
            if asleep:  # the store counts the owner as waiting, but the wait was cut short
                with contextlib.suppress(StoreBusy):
                    self._sleep_no_more(owner, want)
        return []

    def _exchange_unless_busy(self, step: Step) -> Reply | None:
        """The reply; None if another process writes to the store, and has not done so for long."""
        began = time.monotonic()
        try:
            reply = self.exchange(step)
        except StoreBusy:
            if began - self._busy_until > _PAUSE_MOST:
                self._busy_since = began
            self._busy_until = time.monotonic()
            if self._busy_until - self._busy_since >= BUSY_MOST:
                raise
            return None
        self._busy_until = -math.inf
        return reply

    def _sleep_no_more(self, owner: str, want: Want) -> None:
        """Tell the store that this owner does not wait: another owner must get the wake-up."""
        nothing = msgspec.structs.replace(want, count=0, sleep=False)
        self.exchange(Step(owner, want=nothing, patience=SHORT_PATIENCE))

    def _deliver(self, messages: list[Message], stop: Stop | None) -> list[Message]:
        """The messages that the consumer gets; all are released if it wants none any more."""
        if stop is not None and messages and not stop.hand_over(messages):
            settle_together(messages, Outcome.RELEASE)
            return []
        once = [message for message in messages if message.at_most_once]
        if not once:
            return messages
        lost = set(once) - set(settle_together(once, Outcome.SUCCESS))
        return [message for message in messages if message not in lost]

    def _give_back(self, owner: str, leases: Sequence[Lease], are_young: bool) -> None:
        """Release messages that were not handed over; put young acknowledged ones again."""
        verdicts = [Verdict(lease.token, Outcome.RELEASE, ended=clock.wall()) for lease in leases]
        # After an error the messages are ready again when their ttr is over.
        with contextlib.suppress(TidemillError, msgspec.DecodeError):
            settled = self.exchange(Step(owner, verdicts)).settled
            gone = [lease for lease, done in zip(leases, settled, strict=True) if not done]
            opened = [(lease.open(), lease) for lease in gone if are_young]
            if copies := [fresh_copy(e, lease) for e, lease in opened if e.at_most_once]:
                self.runtime.broker.put(copies)

    async def aget_many(
        self,
        queues: Sequence[str],
        count: int,
        timeout: Seconds | None,
        session: Session | None = None,
        *,
        order: str = Mode.STRICT,
    ) -> list[Message]:
        """As ``get_many``. A cancelled call takes no message.

        If the acknowledgement of a message with ttr=0 is under way, the call returns its messages.
        Then the caller is cancelled at its next ``await``.
        """
        import asyncio

        stop = Stop(self.runtime)
        pool = self.runtime.threads if timeout == 0 else self.runtime.waiters
        get = functools.partial(self.get_many, order=order)
        call = pool.begin(get, queues, count, timeout, session, stop)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            messages = stop.stop()
            if not messages:
                call.cancel()  # if the call has not begun, this drops the call
                raise
            if not any(message.at_most_once for message in messages):
                call.add_done_callback(self._release_later)
                raise
            await _outcome(call)
            if call.cancelled() or call.exception() is not None or not call.result():
                raise
            cancel_later()
            return call.result()

    def _release_later(self, call: asyncio.Future[list[Message]]) -> None:
        if not call.cancelled() and call.exception() is None and (messages := call.result()):
            self.runtime.threads.start(lambda: _release(messages))

    def _open(self, owner: str, leases: Sequence[Lease]) -> list[Message]:
        """The messages of leases. A message that is not trusted is refused and left out."""
        messages, refused = list[Message](), list[Verdict]()
        for lease in leases:
            try:
                envelope = lease.open()
                trusted(envelope, self.runtime.keys)
            except (CodecError, msgspec.DecodeError) as error:
                log.error("a message cannot be used: %s", error)
                refused.append(refusal(lease, error))
            else:
                messages.append(Message(self.runtime, owner, lease, envelope))
        if refused:
            self.exchange(Step(owner, refused))
        return messages

    def exchange(self, step: Step) -> Reply:
        reply = self.runtime.broker.exchange(step)
        wanted = step.want.count if step.want is not None else 0
        self._release_unwanted(step.owner, reply.leases[wanted:])
        del reply.leases[wanted:]
        if any(command.verb == "lost" for command in reply.commands):
            # The store gave the owner up, because its last call was too long ago.
            owner = self.session.attached.get(step.owner)
            if owner is not None:  # None if the app was closed meanwhile
                self.runtime.broker.attach(owner)
        return reply

    def _release_unwanted(self, owner: str, leases: Sequence[Lease]) -> None:
        """Release leases of an earlier exchange whose reply was lost and whose caller is gone."""
        if leases:
            verdicts = [Verdict(lease.token, Outcome.RELEASE) for lease in leases]
            # After an error the messages are ready again when their ttr is over.
            with contextlib.suppress(TidemillError):
                self.runtime.broker.exchange(Step(owner, verdicts))

    def close(self) -> None:
        """Forget the owners. The broker detaches these owners when the broker is closed."""
        session, self._session = self.session, Session()
        session.close(self.runtime)


class Stop:
    """Lets an event loop stop a thread that waits for a message."""

    def __init__(self, runtime: Runtime) -> None:
        import asyncio

        self._runtime = runtime
        self._loop = asyncio.get_running_loop()
        self._lock = Lock()
        self._owner = ""
        self._over = False
        self._messages: list[Message] = []

    def goes_on(self, owner: str) -> bool:
        """Called in the thread before each exchange; False after ``stop``."""
        with self._lock:
            self._owner, self._messages = owner, []
            return not self._over

    def hand_over(self, messages: list[Message]) -> bool:
        """Called in the thread with messages; False if the loop does not want them any more."""
        with self._lock:
            self._owner = ""
            if self._over or self._loop.is_closed():
                return False
            self._messages = messages
            return True

    def stop(self) -> list[Message]:
        """Called in the loop: stop the thread, and return the messages that it has handed over."""
        with self._lock:
            self._over = True
            if self._owner:
                self._runtime.broker.wake(self._owner)
            return self._messages


async def _outcome(call: asyncio.Future[list[Message]]) -> None:
    """Wait until a call has ended, also while the waiting task is cancelled."""
    import asyncio

    while not call.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([call])


def _release(messages: list[Message]) -> None:
    # After an error the messages are ready again when their ttr is over.
    with contextlib.suppress(TidemillError):
        settle_together(messages, Outcome.RELEASE)
