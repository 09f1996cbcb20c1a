"""What is enqueued, made jobs of: calls, and compositions in one put where that fits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tidemill.brokers.base import Feature, Filter
from tidemill.clock import new_id
from tidemill.compose import Chain, Composition, Node
from tidemill.errors import InvalidOption, TidemillError
from tidemill.groups import JobChain, JobGroup
from tidemill.handle import Job
from tidemill.inline import run_composed
from tidemill.job import Envelope
from tidemill.openings import guard_of
from tidemill.plan import Plan, step_id
from tidemill.task import Call, Task

if TYPE_CHECKING:
    from tidemill.app import Tidemill

__all__ = ["enqueue_composed", "enqueue_many", "given", "is_composed", "txn_of"]

AT_ONCE = 2000
"""Jobs after which a put is made, if there are more to come."""

EVERY = 60.0
"""Seconds after which one is made, however few there are: the source may be slow."""


def enqueue_composed(mill: Tidemill, node: Node) -> Any:
    """Store the jobs of a composition, or of a call with hooks; the handle."""
    if mill.sync:
        return run_composed(mill, node, _id_of(node))
    job_id, txn = _id_of(node), txn_of(node)
    mill.features.need(Feature.FLOWS, "a chain, a group, a flow or a hook")
    handle = handle_of(mill, node, job_id)
    plan = Plan(mill, node, job_id)
    if mill.in_batch() or txn is not None:
        mill.put([job for piece in plan.pieces() for job in piece.envelopes], txn)
    else:
        _store(mill, plan)
    return handle


def given(mill: Tidemill, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What ``enqueue`` was given, as a call or a composition.

    Raises:
        InvalidOption: it is neither.
    """
    if isinstance(call, str):
        return mill.call(call, *args, **kwargs)
    if isinstance(call, Task):
        raise InvalidOption(f"enqueue takes no task; write {call.function.__name__}.enqueue(…)")
    if not isinstance(call, (Call, Composition)):
        raise InvalidOption(f"enqueue takes task.call(…) or a dotted path, not {call!r}")
    if args or kwargs:
        raise InvalidOption("a call has its arguments already; make it with task.call(…)")
    return call


def is_composed(what: Any) -> bool:
    """True for what becomes more than one job."""
    return isinstance(what, Composition) or bool(what.hooks)


def enqueue_many(mill: Tidemill, calls: Iterable[Call[Any]]) -> list[Job[Any]]:
    """Store calls in one put; their handles, in order."""
    envelopes: list[Envelope] = []
    hooks: set[str] = set()
    txns = set()
    for call in calls:
        if not isinstance(call, Call):
            raise InvalidOption(f"enqueue_many takes task.call(…), not {call!r}")
        if call.hooks:
            jobs = _jobs_of(mill, call)
            envelopes += jobs
            hooks.update(job.id for job in jobs[:-1])
        else:
            envelopes.append(mill.envelope(call))
        txns.add(call.options.txn)
    if len(txns) > 1:
        raise InvalidOption("txn must be the same for all calls of one enqueue_many")
    handles = mill.put(envelopes, txns.pop()) if envelopes else []
    return [handle for handle in handles if handle.id not in hooks] if hooks else handles


def _jobs_of(mill: Tidemill, call: Call[Any]) -> list[Envelope]:
    """A call with hooks as jobs; its own is the last."""
    mill.features.need(Feature.FLOWS, "a hook")
    plan = Plan(mill, call, _id_of(call))
    return [job for piece in plan.pieces() for job in piece.envelopes]


def _id_of(node: Node) -> str:
    return (node.options.id if isinstance(node, Call) else node.id) or new_id()


def txn_of(node: Any) -> Any:
    """The caller's transaction that a call or composition is to be stored in."""
    return node.options.txn if isinstance(node, Call) else node.txn


def _store(mill: Tidemill, plan: Plan) -> None:
    jobs: list[Envelope] = []
    held: set[str] = set()  # in the store, and held there
    opened: set[str] = set()
    closed: set[str] = set()

    last = time.monotonic()
    guard = ""

    def put() -> None:
        nonlocal last, guard
        if opened - closed and not guard:
            jobs.append(guard_of(mill, opened - closed, jobs))
            guard = jobs[-1].id
        last = time.monotonic()
        mill.broker.put(jobs, hold=opened - closed, let_go=held & closed)
        held.update(opened)
        held.difference_update(closed)
        jobs.clear()
        opened.clear()
        closed.clear()

    try:
        for piece in plan.pieces():
            jobs += piece.envelopes
            opened.update(piece.opens)
            closed.update(piece.closes)
            if len(jobs) >= AT_ONCE or (jobs and time.monotonic() - last >= EVERY):
                put()
        if jobs or closed:
            put()
    except BaseException:
        for group_id in sorted(held):  # none of it shall run, as far as it does not yet
            abandon(mill, group_id)
        raise
    finally:
        if guard:
            with contextlib.suppress(TidemillError):  # else it finds nothing to do
                mill.broker.delete([guard])


def abandon(mill: Tidemill, group_id: str) -> None:
    """Cancel what has been put of a group that will have no more members."""
    cursor = ""
    while True:
        page = mill.broker.find(Filter(id_prefix=f"{group_id}."), 1000, cursor)
        mill.broker.cancel([r.envelope.id for r in page.records if not r.state.finished])
        cursor = page.cursor
        if not cursor:
            break
    mill.broker.cancel([group_id])


def handle_of(mill: Tidemill, node: Node, job_id: str) -> Any:
    """The handle on a node's jobs."""
    if isinstance(node, Call):
        return Job(mill, job_id)
    if isinstance(node, Chain):
        count = len(node.steps)
        steps = [
            handle_of(mill, step, step_id(job_id, index, count))
            for index, step in enumerate(node.steps)
        ]
        return JobChain(mill, job_id, steps)
    return JobGroup(mill, job_id)
