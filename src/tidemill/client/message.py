"""A leased message: read it, then ack, release, bury or touch it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tidemill.brokers.contract.exchange import Step
from tidemill.client.threads import in_thread
from tidemill.core.clock import clock
from tidemill.core.codec import unpack, unpack_pickle
from tidemill.core.config import Seconds, check_seconds, storable
from tidemill.core.envelope import Envelope
from tidemill.core.errors import CodecError, LeaseLost
from tidemill.core.job import Lease, Outcome, Verdict
from tidemill.core.priority import priority_of

if TYPE_CHECKING:
    from tidemill.runtime import Runtime


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
        *("_mill", "_token", "_until"),
    )

    def __init__(self, mill: Runtime, owner: str, lease: Lease, envelope: Envelope) -> None:
        self._mill = mill
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
        self._until = time.monotonic() + self.ttr
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

    @property
    def is_over(self) -> bool:
        """True when the ttr has run out, by the clock of this process."""
        return time.monotonic() > self._until

    def ack(self) -> bool:
        """Acknowledge the message, which deletes it. False when the lease was lost."""
        return self._settle(Outcome.SUCCESS)

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
        touched = self._mill.consumers.exchange(step).touched[0]
        if not touched:
            self._mill.consumers.let_go(self)
            return False
        self.ttr = seconds or self._put_ttr
        self._until = time.monotonic() + self.ttr
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
        if self._settled:  # the message was settled at its delivery, or inside the block
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
        await self._mill.threaded(self.__exit__, kind, error, trace)

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
    answers = first._mill.consumers.exchange(Step(first._owner, verdicts)).settled
    settled = []
    for message, done in zip(messages, answers, strict=True):
        message._mill.consumers.let_go(message)
        if done:
            message._settled = True
            settled.append(message)
    return settled
