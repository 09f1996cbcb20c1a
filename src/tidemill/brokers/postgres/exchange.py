"""One exchange: the step packed into one call, and its answer unpacked."""

from __future__ import annotations

import base64
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tidemill.brokers.base import Reply, Step, Want
from tidemill.brokers.postgres.connection import Connection
from tidemill.brokers.postgres.lines import Line
from tidemill.brokers.postgres.puts import pack_jobs
from tidemill.brokers.postgres.schedules import hand_out
from tidemill.brokers.postgres.trouble import Unfit
from tidemill.brokers.postgres.wire import blobs, clean, floats, ints, json, leases_of, texts
from tidemill.brokers.steps import late, lost
from tidemill.brokers.unknown import TOLD_MOST
from tidemill.errors import StoreMoved
from tidemill.job import Command, Outcome, Owner, Verdict

if TYPE_CHECKING:
    from tidemill.brokers.postgres.member import Member
    from tidemill.brokers.postgres.session import Session

__all__ = ["send"]

_LOG = logging.getLogger("tidemill.postgres")
_NOTHING = Want(0, sleep=False)


class _Answer(msgspec.Struct):
    """What a step says besides its leases. Places count from one."""

    gone: bool = False
    last: int = 0  # the step came late, after this one
    missed: Sequence[int] = ()  # plain verdicts that found no lease
    lost: Sequence[int] = ()  # other verdicts
    late: Sequence[int] = ()  # touches
    kept: Sequence[int] = ()  # verdicts that hand a lease over
    stale: Sequence[int] = ()  # leases to take from the carrier
    commands: Sequence[tuple[str, int]] = ()
    due: float | None = None
    firing: float | None = None  # the next schedule
    leaves: str | None = None  # the store goes there
    turn: int = 0
    unknown: Sequence[str] = ()
    told: int = 0
    behind: bool = False  # the store has lost steps
    strays: Sequence[int] = ()


def send(session: Session, member: Member, step: Step, serial: int) -> Reply:
    """Carry a step to the store; the same step under the same serial is done once.

    The serial 0 is that of who speaks on behalf of an owner elsewhere.
    """
    handed, unserved = member.handed, session.unserved
    if unserved is not None and step.want is not None:
        if member.owner.kind == "consumer":
            raise unserved
        step = msgspec.structs.replace(step, want=_NOTHING, fires=0)
    if (reply := handed.take(step)) is not None:
        member.partial = True
        return reply
    plain = [verdict for verdict in step.verdicts if _is_plain(verdict)]
    over = [verdict for verdict in step.verdicts if _goes_over(verdict)]
    others = [v for v in step.verdicts if not (_is_plain(v) or _goes_over(v))]
    want = step.want or _NOTHING
    known = session.known(want.queues)
    queues = [known[name] for name in want.queues]
    told = len(handed.told)
    arguments: list[Any] = [
        member.number,
        serial,
        ints([v.token for v in plain]),
        floats([v.started for v in plain]),
        floats([v.ended for v in plain]),
        blobs([v.result for v in plain]),
        json([_row(v) for v in others]) if others else None,
        *_followers(session, others),
        ints([token for token, _ in step.touch]),
        floats([seconds for _, seconds in step.touch]),
        json([[n.token, n.done, n.total, clean(n.line), n.time] for n in step.notes])
        if step.notes
        else None,
        want.count,
        queues or None,
        None if step.want is None else str(want.mode),
        *(want.tasks, want.messages, want.sleep, want.alone),
        _may_be_handed(member.owner) and handed.may_come(want),
        list(want.knows) or None,
        want.told,
        ints(handed.told),
        ints([v.token for v in over]),
        ints([token for token, _ in step.take]),
        texts([clean(job_id) for _, job_id in step.take]),
        None if step.held is None else ints(list(step.held)),
        session.prefs(),
        session.chores(len(step.verdicts)),
    ]

    def work(_: Line, conn: Connection) -> tuple[Any, ...]:
        session.check_numbers(known)
        row = conn.execute(session.statements.exchange, arguments, binary=True).fetchone()
        assert row is not None
        return row

    handed.sent()
    try:
        answer, leases, more = session.lines.run(work)
    except Unfit as error:
        if member.owner.kind == "consumer" or not session.outgrown():
            raise
        return _leave(member, step, error)
    said = msgspec.convert(answer, _Answer)
    if said.last:
        raise late(step, said.last)
    reply = _reply(step, plain, said, leases + (more or b""))
    if not serial:
        return reply
    member.turned(said.turn)
    if step.fires and said.firing is not None:
        hand_out(session, step, reply, said.firing)
    handed.answered(said.turn, step.want, told, reply.next_due)
    if said.leaves is not None:
        if member.owner.kind == "consumer":
            raise StoreMoved(f"this store moves to {said.leaves}; use that url")
        reply.commands.append(Command("quiet"))
    if unserved is not None:
        _leaves(member, unserved)
        reply.commands.append(Command("quiet"))
    # It was not marked asleep: what it got starts at once, and it looks again before it sleeps.
    member.partial = want.sleep and 0 < len(reply.leases) < want.count
    return reply


def _leave(member: Member, step: Step, error: Unfit) -> Reply:
    """A worker that the store has outgrown ends what it runs and goes, so that others run that."""
    _leaves(member, error)
    lost = [False] * len(step.verdicts), [False] * len(step.touch)
    return Reply(*lost, commands=[Command("quiet")], next_due=float("inf"))


def _leaves(member: Member, error: Exception) -> None:
    if not member.outgrown:
        member.outgrown = True
        _LOG.error("%s; this worker leaves, what it cannot hand in runs again", error)


def _may_be_handed(owner: Owner) -> bool:
    """Whether a put may lease a job to an owner that sleeps.

    One elsewhere may be gone. A consumer has a task for its ttr, and no ttr runs unheard.
    """
    return not owner.lease and owner.kind != "consumer"


def _is_plain(verdict: Verdict) -> bool:
    """True for a success with nothing else to do: those are settled in bulk."""
    return not (verdict.outcome or verdict.error or verdict.traceback or verdict.followers)


def _goes_over(verdict: Verdict) -> bool:
    """True for a lease that is handed over to the carrier, and nothing else: in bulk, too."""
    return verdict.outcome == Outcome.CARRY and not verdict.followers


def _row(v: Verdict) -> dict[str, Any]:
    return {
        "token": v.token,
        "outcome": int(v.outcome),
        "delay": v.delay,
        "error": clean(v.error),
        "traceback": clean(v.traceback),
        "started": v.started,
        "ended": v.ended,
        "result": base64.b64encode(v.result).decode(),
        "hold": v.hold,
        "rank": v.rank,
    }


def _followers(session: Session, verdicts: Sequence[Verdict]) -> Sequence[Any]:
    """What verdicts bring with them, each with the place of its verdict."""
    followers = [(place, f) for place, v in enumerate(verdicts, 1) for f in v.followers]
    if not followers:
        return (None, None, None, None)
    return pack_jobs(session, [f for _, f in followers], [place for place, _ in followers])


def _reply(step: Step, plain: Sequence[Verdict], answer: _Answer, leases: bytes) -> Reply:
    if answer.gone:  # given up for dead: all it held is lost
        return lost(step)
    over = sum(map(_goes_over, step.verdicts))
    missed = iter(_settled(len(plain), answer.missed))
    kept = iter(_settled(over, answer.kept))
    others = iter(_settled(len(step.verdicts) - len(plain) - over, answer.lost))
    reply = Reply(
        settled=[
            next(missed if _is_plain(v) else kept if _goes_over(v) else others)
            for v in step.verdicts
        ],
        touched=_settled(len(step.touch), answer.late),
        taken=_settled(len(step.take), answer.stale),
        leases=leases_of(leases),
        commands=[Command(verb, token) for verb, token in answer.commands],
        next_due=float("inf") if answer.due is None else max(0.0, answer.due),
        unknown=list(answer.unknown),
        told=answer.told,
        behind=answer.behind,
        strays=list(answer.strays),
    )
    if len(reply.unknown) == TOLD_MOST:
        reply.next_due = 0.0  # more follow
    return reply


def _settled(count: int, without: Sequence[int]) -> list[bool]:
    told = [True] * count
    for place in without:
        told[place - 1] = False
    return told
