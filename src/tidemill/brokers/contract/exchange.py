"""The messages of one exchange between an owner and a store: a step, and its reply."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from tidemill.brokers.contract.history_rows import HistoryRow
from tidemill.brokers.contract.schedules import Schedule
from tidemill.core.job import Command, Lease, Note, Verdict
from tidemill.errors import InvalidOption, TidemillError

MAX_NONCE = 100  # the most characters of a nonce


class Mode(enum.StrEnum):
    """The order in which a want takes from several queues."""

    FAIR = "fair"  # every queue gets its turn
    STRICT = "strict"  # the first queue is emptied before the second
    MERGED = "merged"  # all queues together, by priority and then by age


class Want(msgspec.Struct, frozen=True):
    """The number and kind of jobs that an owner can take.

    Attributes:
        queues: the queues to take from; none means all.
        mode: the order of the queues.
        tasks, messages: the kinds to take. A worker takes tasks, a consumer takes raw messages.
        sleep: True when the owner will wait if no job is ready. Only a waiting owner gets hints.
        alone: True to take a lost task: a task whose worker died (``Lease.losses``). A lost task
            may have killed its worker, so it must run alone (law 6). The first lost task of the
            queues comes before all other jobs. A reply has at most one lost task.
    """

    count: int
    queues: tuple[str, ...] = ()
    mode: Mode = Mode.FAIR
    tasks: bool = True
    messages: bool = False
    sleep: bool = True
    alone: bool = True


class Step(msgspec.Struct):
    """One exchange: the results that an owner hands in, and its want.

    Attributes:
        touch: leases of messages to renew: (token, seconds). 0 seconds stand for the message's own
            ttr (time to run).
        fires: the number of due schedules that the owner would fire now. With 0 the reply
            has no schedules, and their due times do not count in ``Reply.next_due``.
        serial: the number of the step, for remote owners; it grows from step to step.
        behalf: True when another process makes the step for a remote owner, which may itself be
            alive. The step has only verdicts and touches. It is no sign of life, takes no commands,
            and has no serial. A repetition of the step hands in the same verdicts and touches.
        patience: the seconds that the step may wait for other writers; 0 for the default of the
            broker.
        held: the tokens of all leases of the owner, if it asks for ``Reply.strays``.
        history: counts to add to rows of history, if the broker has ``Feature.HISTORY``. After
            ``BrokerUnavailable`` the next history of the caller begins with the same rows, and the
            broker adds them once. When the reply says that the owner was given up
            (:func:`is_lost`), nothing was added.
    """

    owner: str
    verdicts: Sequence[Verdict] = ()
    want: Want | None = None
    touch: Sequence[tuple[int, float]] = ()
    notes: Sequence[Note] = ()
    fires: int = 0
    serial: int = 0
    behalf: bool = False
    patience: float = 0.0
    held: Sequence[int] | None = None
    history: Sequence[HistoryRow] = ()


class Reply(msgspec.Struct):
    """The answer to a step.

    Attributes:
        settled, touched: the answers to verdicts and to ``Step.touch``, in order. False means that
            the lease was lost and nothing changed.
        next_due: seconds until something in the store becomes due; infinity when nothing will.
        schedules: due schedules, claimed for :data:`~.schedules.CLAIM` seconds.
        more: True when jobs may be on their way to the owner, although the reply has no leases.
        behind: True when the store may have lost steps that it had answered: a replica took over,
            or a backup was restored. The owner then asks for ``strays``.
        strays: tokens of leases that the owner does not know. For the store these leases belong to
            the owner, but they were neither in ``Step.held`` nor leased later.
    """

    settled: list[bool] = []
    touched: list[bool] = []
    leases: list[Lease] = []
    commands: list[Command] = []
    next_due: float = float("inf")
    schedules: list[Schedule] = []
    more: bool = False
    behind: bool = False
    strays: list[int] = []


def lost(step: Step) -> Reply:
    """The reply to an owner that was given up: all its leases are lost."""
    none = [False] * len(step.verdicts), [False] * len(step.touch)
    return Reply(*none, commands=[Command("lost")], next_due=0.0)


def outgrown(why: Exception) -> list[Command]:
    """The commands to a worker that can no longer use its store: it leaves, and says why."""
    return [Command("quiet"), Command(f"outgrown {why}")]


def left(step: Step, why: Exception) -> Reply:
    """The reply to a worker whose step the store does not understand."""
    none = [False] * len(step.verdicts), [False] * len(step.touch)
    return Reply(*none, commands=outgrown(why))


def is_lost(reply: Reply) -> bool:
    """True when the reply tells the owner that it was given up."""
    return any(command.verb == "lost" for command in reply.commands)


def late(step: Step, last: int) -> TidemillError:
    """The error for a step that arrives after later steps: its caller no longer waits."""
    return TidemillError(
        f"step {step.serial} of owner {step.owner!r} came late: step {last} was done before it"
    )


def check_nonce(nonce: str) -> None:
    """Refuse a nonce that is too long to store."""
    if len(nonce) > MAX_NONCE:
        raise InvalidOption(f"nonce {nonce[:20]!r}… is longer than {MAX_NONCE} characters")
