"""What an owner and a store say to each other in one exchange: a step, and its reply."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from tidemill.brokers.schedules import Schedule
from tidemill.errors import InvalidOption, TidemillError
from tidemill.job import Command, Lease, Note, Verdict

__all__ = ["MAX_NONCE", "Mode", "Reply", "Step", "Want", "check_nonce", "is_lost", "late", "lost"]

MAX_NONCE = 100
"""Characters of a nonce at most."""


class Mode(enum.StrEnum):
    """In what order a want takes from several queues."""

    FAIR = "fair"  # every queue gets its turn
    STRICT = "strict"  # the first is emptied before the second
    MERGED = "merged"  # priority and age across all as if they were one


class Want(msgspec.Struct, frozen=True):
    """How many jobs an owner can take, of which queues. No queues means all.

    ``tasks`` and ``messages`` say which kinds: a worker never takes raw messages, nor a consumer
    tasks, unless it asks for them. Without ``sleep`` the owner does not mean to wait when nothing
    is there, and is not hinted.

    A task that was lost with its worker (``Lease.losses``) may be what brought that down, and is to
    run alone (law 6). With ``alone`` the first such job of these queues comes before all others; a
    reply never has more than one, and without ``alone`` none.

    ``knows`` names tasks that have jobs set aside (``Outcome.UNKNOWN``) and that the owner knows:
    those jobs are leased as if they stood in the ready line of their queue. Without ``tasks``
    they alone are leased; those under a limit become ready instead. From ``told`` 0 on the owner
    asks which tasks have jobs set aside: see ``Reply.unknown``.
    """

    count: int
    queues: tuple[str, ...] = ()
    mode: Mode = Mode.FAIR
    tasks: bool = True
    messages: bool = False
    sleep: bool = True
    alone: bool = True
    knows: tuple[str, ...] = ()
    told: int = -1


class Step(msgspec.Struct):
    """One exchange: what an owner hands in and what it wants.

    ``touch`` renews message leases: (token, seconds), 0 for the message's own ttr. ``take`` names
    leases that lie with the carrier: (token, id of the job). ``fires`` is how many due schedules it
    would see to now; who sees to none is not told when the next is due. ``serial`` is given by
    owners elsewhere, and grows from step to step. ``patience`` is how many seconds the step may
    wait for other writers; 0 leaves that to the broker.

    ``held`` names the tokens of all leases that the owner has, if it asks for ``Reply.strays``.

    With ``behalf`` verdicts and touches of an owner elsewhere are handed in by somebody who does
    not make its calls: it may live, and speak for itself. So this is no word of the owner's, takes
    no commands that are for it, and has no serial: to repeat it is to hand them in again.
    """

    owner: str
    verdicts: Sequence[Verdict] = ()
    want: Want | None = None
    touch: Sequence[tuple[int, float]] = ()
    notes: Sequence[Note] = ()
    fires: int = 0
    take: Sequence[tuple[int, str]] = ()
    serial: int = 0
    behalf: bool = False
    patience: float = 0.0
    held: Sequence[int] | None = None


class Reply(msgspec.Struct):
    """What an exchange did.

    ``settled`` and ``touched`` answer in order; False means the lease was lost and nothing changed.
    ``taken`` does, too: True for a lease that is the owner's now. It is just as it was told when it
    was made, but that it was ``leased`` now, and that a consumer's ttr runs from now on. ``taken``
    is empty beside the command ``lost``: nothing was looked at, and the messages are not stale.
    ``next_due`` is seconds until something in the store becomes due; infinity when nothing will.
    ``schedules`` are due, and nobody else's for :data:`~.schedules.CLAIM` seconds; ``wall`` is the
    wall time they are due by, when that is a server's, else 0. ``more`` says that there may be jobs
    which are still on their way: that none came does not mean that there is none.

    ``unknown`` names tasks that have jobs set aside and are numbered above ``Want.told``; ``told``
    is the highest of their numbers, or 0 when there are none. A long list comes in parts, each
    with ``next_due`` 0 when more follow.

    ``behind`` says that the store may have lost steps of this owner that it had answered: a replica
    took over, or a backup was restored. The owner then asks for ``strays``: tokens of leases that
    the store counts as the owner's, and that were neither in ``Step.held`` nor leased since.
    """

    settled: list[bool] = []
    touched: list[bool] = []
    leases: list[Lease] = []
    commands: list[Command] = []
    next_due: float = float("inf")
    schedules: list[Schedule] = []
    wall: float = 0.0
    more: bool = False
    taken: list[bool] = []
    unknown: list[str] = []
    told: int = 0
    behind: bool = False
    strays: list[int] = []


def lost(step: Step) -> Reply:
    """The reply to an owner that was given up: all it held is lost, and it is told so."""
    none = [False] * len(step.verdicts), [False] * len(step.touch)
    return Reply(*none, commands=[Command("lost")], next_due=0.0)


def is_lost(reply: Reply) -> bool:
    """Whether a reply says so."""
    return any(command.verb == "lost" for command in reply.commands)


def late(step: Step, last: int) -> TidemillError:
    """The error for a step that comes after later ones: nobody waits for its answer any more."""
    return TidemillError(
        f"step {step.serial} of owner {step.owner!r} came late: {last} was done before it"
    )


def check_nonce(nonce: str) -> None:
    """Refuse a nonce that is too long to be kept."""
    if len(nonce) > MAX_NONCE:
        raise InvalidOption(f"nonce {nonce[:20]!r}… is longer than {MAX_NONCE} characters")
