"""An exchange: pack a step into one call, and unpack its answer."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tidemill.brokers.contract.exchange import Reply, Step, Want, late, left, lost, outgrown
from tidemill.brokers.postgres.caller_transaction import open_transaction
from tidemill.brokers.postgres.encoding import blobs, clean, floats, ints, json, leases_of
from tidemill.brokers.postgres.errors import Unfit
from tidemill.brokers.postgres.history import pack_history
from tidemill.brokers.postgres.put import pack_jobs, run_with_prefs
from tidemill.brokers.postgres.schedules import hand_out
from tidemill.brokers.postgres.timed_connection import Connection
from tidemill.core.job import Command, Owner, Verdict
from tidemill.errors import StoreMoved

if TYPE_CHECKING:
    from tidemill.brokers.postgres.owners import AttachedOwner
    from tidemill.brokers.postgres.statements import Session

_NOTHING = Want(0, sleep=False)


class _Answer(msgspec.Struct):
    """The answer to a step, without its leases. Places count from one."""

    gone: bool = False
    last: int = 0  # not 0: this step came too late, after the step with this serial
    missed: Sequence[int] = ()  # plain verdicts without a lease
    lost: Sequence[int] = ()  # other verdicts without a lease
    late: Sequence[int] = ()  # touches without a lease
    commands: Sequence[tuple[str, int]] = ()
    due: float | None = None
    firing: float | None = None  # seconds until the next schedule is due
    leaves: str | None = None  # URL of the target when all jobs move to another store
    turn: int = 0
    behind: bool = False  # True when the store has lost steps
    strays: Sequence[int] = ()


class _Parts(msgspec.Struct):
    """The verdicts of a step, in two groups: each group is settled in its own way."""

    plain: list[Verdict]
    others: list[Verdict]


def send(session: Session, attached: AttachedOwner, step: Step, serial: int) -> Reply:
    """Send a step to the store. The store does a step with the same serial only once."""
    # A step on behalf of a remote owner has the serial 0.
    unserved = session.unserved
    if unserved is not None:
        step = _without_want(unserved, attached, step)
    if (reply := attached.hand_off.take(step)) is not None:
        attached.partial = True
        attached.unsent(step)
        return reply
    parts = _split(step)
    told = len(attached.hand_off.told)
    queues = session.known(step.want.queues if step.want else ())
    arguments = _pack(session, attached, step, serial, parts, queues)
    attached.hand_off.sent()
    try:
        answer, leases = _call(session, step, arguments, queues)
    except Unfit as error:
        if attached.owner.kind == "consumer" or not session.outgrown():
            raise
        return left(step, error)
    if answer.last:
        raise late(step, answer.last)
    reply = _reply(step, parts, answer, leases)
    if serial:
        _go_on(session, attached, step, answer, reply, told)
        if unserved is not None:
            reply.commands += outgrown(unserved)
    return reply


def _without_want(unserved: Exception, attached: AttachedOwner, step: Step) -> Step:
    """Return the step without its want, since the store has another version now."""
    if step.want is None:
        return step
    if attached.owner.kind == "consumer":
        raise unserved
    return msgspec.structs.replace(step, want=_NOTHING, fires=0)


def _split(step: Step) -> _Parts:
    parts = _Parts([], [])
    for verdict in step.verdicts:
        (parts.plain if _is_plain(verdict) else parts.others).append(verdict)
    return parts


def _pack(
    session: Session,
    attached: AttachedOwner,
    step: Step,
    serial: int,
    parts: _Parts,
    queues: Mapping[str, int],
) -> list[Any]:
    """Pack the arguments of ``exchange``: request, followers, want, preferences and chores."""
    return [
        *(attached.number, serial),
        ints([v.token for v in parts.plain]),
        floats([v.started for v in parts.plain]),
        floats([v.ended for v in parts.plain]),
        blobs([v.result for v in parts.plain]),
        json([_row(v) for v in parts.others]) if parts.others else None,
        ints([token for token, _ in step.touch]),
        floats([seconds for _, seconds in step.touch]),
        json([[n.token, n.done, n.total, clean(n.line), n.time, clean(n.text)] for n in step.notes])
        if step.notes
        else None,
        ints(attached.hand_off.told),
        None if step.held is None else ints(list(step.held)),
        *_followers(session, parts.others),
        *_want(attached, step.want, queues),
        session.prefs(),
        session.chores(len(step.verdicts)),
    ]


def _want(attached: AttachedOwner, asked: Want | None, queues: Mapping[str, int]) -> list[Any]:
    want = asked or _NOTHING
    return [
        want.count,
        [queues[name] for name in want.queues] or None,
        None if asked is None else str(want.mode),
        *(want.tasks, want.messages, want.sleep, want.alone),
        _may_be_handed(attached.owner) and attached.hand_off.may_come(want),
    ]


def _call(
    session: Session, step: Step, arguments: list[Any], queues: Mapping[str, int]
) -> tuple[_Answer, bytes]:
    """Return the answer to a step, and the packed leases of both its transactions."""

    text = session.statements.exchange
    if step.history:
        text = session.statements.exchange_counting
        arguments = [*arguments, pack_history(step.history)]

    def work(_: object, conn: Connection) -> tuple[Any, ...]:
        session.check_numbers(queues)
        row = conn.execute(text, arguments, binary=True).fetchone()
        assert row is not None
        return row

    answer, leases, more = session.connections.run(work)
    return msgspec.convert(answer, _Answer), leases + (more or b"")


def _go_on(
    session: Session, attached: AttachedOwner, step: Step, answer: _Answer, reply: Reply, told: int
) -> None:
    """Update the owner after its step, and add schedules and commands to the reply."""
    attached.turned(answer.turn)
    if step.fires and answer.firing is not None:
        hand_out(session, step, reply, answer.firing)
    attached.hand_off.answered(answer.turn, step.want, told, reply.next_due)
    if answer.leaves is not None:
        if attached.owner.kind == "consumer":
            raise StoreMoved(f"this store moves to {answer.leaves}; use that url")
        reply.commands.append(Command("quiet"))
    # The store did not mark this owner as asleep: the owner starts its jobs, and asks again.
    want = step.want or _NOTHING
    attached.partial = want.sleep and 0 < len(reply.leases) < want.count


def _may_be_handed(owner: Owner) -> bool:
    """Whether a put may lease a job to this owner while it sleeps."""
    # A remote owner may be gone. The ttr (time to run) of a message must not begin before the
    # consumer knows of the lease.
    return not owner.lease and owner.kind != "consumer"


def settle_inside(session: Session, attached: AttachedOwner, verdict: Verdict, txn: Any) -> bool:
    """End a lease in the caller's transaction; False when the lease was lost."""
    conn = open_transaction(session, txn)
    told = str(attached.number), json([_row(verdict)])
    done: bool = run_with_prefs(session, conn, session.statements.settle_inside, told)
    return done


def _is_plain(verdict: Verdict) -> bool:
    """True for a success with nothing else to do: such verdicts are settled in bulk."""
    return not (verdict.outcome or verdict.error or verdict.traceback or verdict.followers)


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
    """Pack the followers of verdicts, each with the place of its verdict."""
    followers = [(place, f) for place, v in enumerate(verdicts, 1) for f in v.followers]
    if not followers:
        return (None, None, None, None)
    return pack_jobs(session, [f for _, f in followers], [place for place, _ in followers])


def _reply(step: Step, parts: _Parts, answer: _Answer, leases: bytes) -> Reply:
    if answer.gone:  # the owner was given up for dead: all its leases are lost
        return lost(step)
    missed = iter(_settled(len(parts.plain), answer.missed))
    others = iter(_settled(len(parts.others), answer.lost))
    return Reply(
        settled=[next(missed if _is_plain(v) else others) for v in step.verdicts],
        touched=_settled(len(step.touch), answer.late),
        leases=leases_of(leases),
        commands=[Command(verb, token) for verb, token in answer.commands],
        next_due=float("inf") if answer.due is None else max(0.0, answer.due),
        behind=answer.behind,
        strays=list(answer.strays),
    )


def _settled(count: int, without: Sequence[int]) -> list[bool]:
    told = [True] * count
    for place in without:
        told[place - 1] = False
    return told
