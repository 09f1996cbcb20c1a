"""Enqueue calls and compositions: turn them into jobs, and put the jobs in few calls."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tidemill.brokers.contract.features import Feature
from tidemill.client.compositions import pages_of_parts
from tidemill.client.context import is_importing
from tidemill.client.job_handle import UNCOMMITTED, Job, leave_out
from tidemill.client.task import Call, Task, call_by_name
from tidemill.core.clock import new_id
from tidemill.core.envelope import Envelope
from tidemill.errors import InvalidOption
from tidemill.workflows.compose import Chain, Composition, Flow, Node
from tidemill.workflows.handles import JobChain, JobGroup
from tidemill.workflows.planner import Piece, Plan, step_id

if TYPE_CHECKING:
    from tidemill.runtime import Runtime

JOBS_PER_PUT = 2000  # a plan with more jobs than this takes several puts
MOST_SECONDS_BETWEEN_PUTS = 60.0  # after this time even a few jobs are put


def call_or_composition(
    runtime: Runtime, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The call or composition that the arguments of ``enqueue`` give. Raises InvalidOption."""
    if isinstance(call, str):
        return call_by_name(runtime, call, args, kwargs)
    if isinstance(call, Task):
        raise InvalidOption(f"enqueue takes no task; write {call.function.__name__}.enqueue(…)")
    if not isinstance(call, (Call, Composition)):
        raise InvalidOption(f"enqueue takes task.call(…) or a dotted path, not {call!r}")
    if args or kwargs:
        raise InvalidOption("a call already has its arguments; give them to task.call(…)")
    return call


def is_composed(node: Any) -> bool:
    """True for a composition and for a call with hooks, which become several jobs."""
    return isinstance(node, Composition) or bool(node.hooks)


def enqueue_many(runtime: Runtime, calls: Iterable[Call[Any]]) -> list[Job[Any]]:
    """Store calls in one put, and return their handles in order."""
    envelopes: list[Envelope] = []
    hooks: set[str] = set()
    txns = set()
    for call in calls:
        if not isinstance(call, Call):
            raise InvalidOption(f"enqueue_many takes task.call(…), not {call!r}")
        if call.hooks:
            jobs = _with_hooks(runtime, call)
            envelopes += jobs
            hooks.update(job.id for job in jobs[:-1])
        else:
            envelopes.append(runtime.envelope(call))
        txns.add(call.options.txn)
    if len(txns) > 1:
        raise InvalidOption("txn must be the same for all calls of one enqueue_many")
    handles = runtime.put(envelopes, txns.pop()) if envelopes else []
    return [handle for handle in handles if handle.id not in hooks] if hooks else handles


def _with_hooks(runtime: Runtime, call: Call[Any]) -> list[Envelope]:
    """The jobs of the hooks of a call, and then the job of the call itself."""
    runtime.features.need(Feature.FLOWS, "a hook")
    return Plan(runtime, call, id_of(call)).jobs()


def enqueue_composed(runtime: Runtime, node: Node) -> Any:
    """Store the jobs of a composition, or of a call with hooks, and return the handle."""
    runtime.features.need(Feature.FLOWS, "a chain, a group, a flow or a hook")
    job_id, txn = id_of(node), txn_of(node)
    pending = UNCOMMITTED if txn is not None else ""
    plan = Plan(runtime, node, job_id)
    if is_importing():
        pending = leave_out(next(plan.pieces()).envelopes)
        return _handle_of(runtime, node, job_id, pending)
    handle = _handle_of(runtime, node, job_id, pending)
    if txn is not None or runtime.batch_for() is not None:
        runtime.put(plan.jobs(), txn)
    else:
        _put_in_pieces(runtime, plan)
    return handle


def id_of(node: Node) -> str:
    return (node.options.id if isinstance(node, Call) else node.id) or new_id()


def txn_of(node: Any) -> Any:
    """The caller's transaction in which a call or composition is to be stored, or None."""
    return node.options.txn if isinstance(node, Call) else node.txn


def _handle_of(runtime: Runtime, node: Node, job_id: str, pending: str) -> Any:
    if isinstance(node, Call):
        return Job(runtime, job_id, pending=pending)
    if isinstance(node, Chain):
        steps = [
            _handle_of(runtime, step, step_id(node, job_id, index), pending)
            for index, step in enumerate(node.steps)
        ]
        return JobChain(runtime, job_id, steps, pending=pending)
    size = len(node.nodes) if isinstance(node, Flow) else node.members.count()
    return JobGroup(runtime, job_id, size=size, pending=pending)


def _put_in_pieces(runtime: Runtime, plan: Plan) -> None:
    """Put a plan. A group of more than ``JOBS_PER_PUT`` jobs takes several puts."""
    # The group is held until its last piece is stored: a held group does not end. A producer that
    # raises cancels the members that it has put. A producer that dies between two pieces leaves a
    # held group, which somebody must cancel.
    pieces = _Pieces(runtime)
    try:
        for piece in plan.pieces():
            pieces.add(piece)
            if pieces.is_due():
                pieces.put()
        pieces.put()
    except BaseException:
        for group_id in sorted(pieces.held):
            cancel_incomplete(runtime, group_id)
        raise


class _Pieces:
    """Pieces of a plan that wait for the next put.

    Attributes:
        held: ids of stored groups that are held, because not all members are stored.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._jobs: list[Envelope] = []
        self._opened: set[str] = set()
        self._closed: set[str] = set()
        self._last_put = time.monotonic()
        self.held: set[str] = set()

    def add(self, piece: Piece) -> None:
        self._jobs += piece.envelopes
        self._opened.update(piece.opens)
        self._closed.update(piece.closes)

    def is_due(self) -> bool:
        """True when many jobs wait for a put, or when a job waits and the last put was long ago."""
        waited = time.monotonic() - self._last_put
        return len(self._jobs) >= JOBS_PER_PUT or (
            bool(self._jobs) and waited >= MOST_SECONDS_BETWEEN_PUTS
        )

    def put(self) -> None:
        """Store the waiting jobs. Hold groups that are incomplete, and release complete groups."""
        if not self._jobs and not self._closed:
            return
        self._last_put = time.monotonic()
        incomplete, complete = self._opened - self._closed, self.held & self._closed
        self._runtime.broker.put(self._jobs, hold=incomplete, let_go=complete)
        self.held.update(self._opened)
        self.held.difference_update(self._closed)
        self._jobs.clear()
        self._opened.clear()
        self._closed.clear()


def cancel_incomplete(runtime: Runtime, group_id: str) -> None:
    """Cancel the stored members of a group that gets no more members, and then the group."""
    for records in pages_of_parts(runtime, group_id):
        runtime.broker.cancel([r.envelope.id for r in records if not r.state.finished])
    runtime.broker.cancel([group_id])
