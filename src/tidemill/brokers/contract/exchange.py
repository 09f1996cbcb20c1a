"""The messages of one exchange between an owner and a store: a step, and its reply."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from tidemill.brokers.contract.schedules import Schedule
from tidemill.core.errors import InvalidOption, TidemillError
from tidemill.core.job import Command, Lease, Note, Verdict

__all__ = ["MAX_NONCE", "Mode", "Reply", "Step", "Want", "check_nonce", "is_lost", "late", "lost"]

MAX_NONCE = 100
"""The most characters of a nonce."""


class Mode(enum.StrEnum):
    """The order in which a want takes from several queues."""

    FAIR = "fair"  # every queue gets its turn
    STRICT = "strict"  # the first is emptied before the second
    MERGED = "merged"  # priority and age across all as if they were one


class Want(msgspec.Struct, frozen=True):
    """The number and kind of jobs that an owner can take.

    Attributes:
        count: the most jobs.
        queues: the queues to take from; none means all.
        mode: the order of the queues.
        tasks, messages: the kinds to take. A worker takes tasks, a consumer takes raw messages.
        sleep: True when the owner will wait if there is no job; such an owner gets hints.
        alone: True to take a task that was lost with a worker (``Lease.losses``). Such a task may
            have killed its worker, so it must run alone (law 6). The first lost task of the queues
            comes before all other jobs. A reply has at most one lost task.
        knows: tasks that have jobs set aside (``Outcome.UNKNOWN``) and that the owner knows. Those
            jobs are leased as if they were ready. Without ``tasks`` only those jobs are leased;
            those under a limit become ready instead.
        told: from 0 on, the owner asks for tasks with jobs set aside: see ``Reply.unknown``.
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
    """One exchange: the results that an owner hands in, and its want.

    Attributes:
        touch: message leases to renew: (token, seconds), 0 seconds for the message's own ttr.
        take: leases to take from the carrier: (token, id of the job).
        fires: the number of due schedules that the owner would fire now; 0 for an owner that fires
            none, and is not told when the next is due.
        serial: the number of the step, for remote owners; it grows from step to step.
        behalf: True when another process hands in verdicts and touches for a remote owner, which
            may itself be alive. The step is no sign of life, takes no commands, and has no serial;
            repeating it hands the same in again.
        patience: the seconds that the step may wait for other writers; 0 for the broker's choice.
        held: the tokens of all leases of the owner, if it asks for ``Reply.strays``.
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
    """The answer to a step.

    Attributes:
        settled, touched: answers in order; False means that the lease was lost and nothing changed.
        leases: new leases.
        commands: commands for the owner.
        next_due: seconds until something in the store becomes due; infinity when nothing will.
        schedules: due schedules, claimed for :data:`~.schedules.CLAIM` seconds.
        wall: the server's wall time by which they are due; 0 when it is this machine's.
        more: True when jobs may still be on their way although the reply has none.
        taken: answers to ``Step.take`` in order; True for a lease that is now the owner's. The
            lease is as when it was made, but ``leased`` now, and a consumer's ttr starts now.
            Empty beside the command ``lost``: nothing was taken, and the messages are not stale.
        unknown: tasks with jobs set aside, numbered above ``Want.told``.
        told: the highest of these numbers, or 0 when there are none. A long list comes in parts,
            with ``next_due`` 0 while more follow.
        behind: True when the store may have lost steps that it had answered: a replica took over,
            or a backup was restored. The owner then asks for ``strays``.
        strays: tokens of leases that the store counts as the owner's, but that were neither in
            ``Step.held`` nor leased since.
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
    """The reply to an owner that was given up: all its leases are lost."""
    none = [False] * len(step.verdicts), [False] * len(step.touch)
    return Reply(*none, commands=[Command("lost")], next_due=0.0)


def is_lost(reply: Reply) -> bool:
    """True when the reply tells the owner that it was given up."""
    return any(command.verb == "lost" for command in reply.commands)


def late(step: Step, last: int) -> TidemillError:
    """The error for a step that comes after later steps: its caller no longer waits."""
    return TidemillError(
        f"step {step.serial} of owner {step.owner!r} came late: {last} was done before it"
    )


def check_nonce(nonce: str) -> None:
    """Refuse a nonce that is too long to store."""
    if len(nonce) > MAX_NONCE:
        raise InvalidOption(f"nonce {nonce[:20]!r}… is longer than {MAX_NONCE} characters")
