"""The pages of chains, groups and flows: a list, and the graph of each."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from starlette.responses import Response

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature, need
from tidemill.brokers.contract.inspection import Filter
from tidemill.client.compositions import (
    cancel_all,
    is_hook,
    is_hook_id,
    member_id,
    retry_all,
    size_of,
)
from tidemill.core.clock import clock
from tidemill.core.envelope import Envelope, Links
from tidemill.core.errors import JobNotFound, RetryRefused
from tidemill.core.job import GROUP, Record, State
from tidemill.dashboard.flow_graph import BOX, MOST_NODES, FlowNode, drawn, folded
from tidemill.dashboard.formats import duration, percent
from tidemill.dashboard.job_list import page_of
from tidemill.dashboard.job_query import parse, query_text
from tidemill.dashboard.page import Page
from tidemill.dashboard.roles import Role
from tidemill.dashboard.routes import Routes
from tidemill.workflows.planner import step_id

routes = Routes()

_LOOK = 4000
_LISTED = 50
_JOBS_MOST = 2000
_DEPTH = 3  # levels of nested chains and groups in which the list looks for the first job


@routes.get("/flows")
def flows(page: Page) -> Response:
    """Groups and flows, and unfinished chains, newest first."""
    need(page.mill.broker, Feature.FLOWS, "the page of flows")
    cursor = page.request.arg("cursor")
    listed = page_of(page.mill, parse(query_text(task=GROUP)), _LISTED, cursor)
    chains, stopped = list[Record](), False
    if not cursor:
        what = Filter(states=frozenset({State.WAITING}), look=_LOOK)
        waiting = page.mill.find(what, limit=200)
        chains = [record for record in waiting.records if record.envelope.links is not None]
        stopped = bool(waiting.cursor)
    groups: dict[str, Record] = {}
    for record in sorted([*listed.records, *chains], key=lambda one: -one.seq):
        root = root_of(page.mill, record.envelope.id)
        if root not in groups:
            found = _small(page.mill, root)
            if found is not None:
                groups[root] = found
    rows = list(groups.values())
    firsts = _first_tasks(page.mill, rows)
    return page.render(
        "flows.html",
        title="Flows",
        section="/flows",
        listed=listed,
        stopped=stopped,
        rows=[(row, firsts[row.envelope.id], *_progress(page.mill, row)) for row in rows],
    )


def root_of(mill: Tidemill, job_id: str) -> str:
    """The id of the chain, group or flow of a job. The job's id begins with this id."""
    parts = job_id.split(".")
    for count in range(1, len(parts)):
        whole = ".".join(parts[:count])
        found = mill.broker.get(whole)
        if found is not None and found.envelope.links is not None:
            return whole
    return job_id


def _first_tasks(mill: Tidemill, rows: Sequence[Record]) -> dict[str, str]:
    """The task of the first job of each flow; empty when the store no longer keeps this job.

    The first job of a flow may itself stand for a chain or a group. So the page makes up to
    ``_DEPTH`` reads for each row.
    """
    found = {record.envelope.id: record for record in rows}
    for root in found:
        for _ in range(_DEPTH):
            first = _small(mill, _first_id(found[root].envelope))
            if first is None:
                break
            found[root] = first
    tasks = {root: record.envelope.task for root, record in found.items()}
    own = {record.envelope.id for record in found.values()}
    return {root: "" if root in own or task == GROUP else task for root, task in tasks.items()}


def _small(mill: Tidemill, job_id: str) -> Record | None:
    """A job as lists show it. Large results are read one at a time, and dropped at once."""
    record = mill.broker.get(job_id)
    return None if record is None else record.for_list()


def _first_id(whole: Envelope) -> str:
    """The id of the first member of a group, or of the first step of a chain."""
    return member_id(whole.id, 0) if whole.task == GROUP else step_id(whole.id, 0, 2)


def _progress(mill: Tidemill, record: Record) -> tuple[int | None, int | None]:
    """The numbers of all members and of ended members of a group; None for a chain."""
    if record.envelope.task != GROUP:
        return None, None
    count = size_of(mill.broker, record)
    return count, None if count is None else max(0, count - record.pending)


@routes.get("/flows/{flow_id}")
def flow(page: Page, flow_id: str) -> Response:
    """The graph of a chain, a group or a flow."""
    need(page.mill.broker, Feature.FLOWS, "the graph of a flow")
    root = root_of(page.mill, flow_id)
    records, is_whole = jobs_of(page.mill, root)
    if not records:
        raise JobNotFound(f"no chain, group or flow has the id {flow_id}")
    states = collections.Counter(record.state.value for record in records)
    return page.render(
        "flow.html",
        title=f"Flow {root}",
        section="/flows",
        root=root,
        graph=drawn(folded([_node(record) for record in records])),
        box=BOX,
        here=flow_id,
        states=[(state.value, states[state.value]) for state in State if states[state.value]],
        count=len(records),
        is_whole=is_whole,
        is_folded=len(records) > MOST_NODES,
        records=records[:200],
        is_over=all(record.state.finished for record in records),
        failed=states["failed"] + states["cancelled"] + states["expired"],
        every=1,
        now=clock.wall(),
    )


def jobs_of(mill: Tidemill, root: str) -> tuple[list[Record], bool]:
    """The jobs of a flow in the order of acceptance, and whether these are all of them."""
    found: list[Record] = []
    cursor = ""
    own = _small(mill, root)
    while len(found) < _JOBS_MOST:
        page = mill.broker.find(Filter(id_prefix=f"{root}."), 500, cursor)
        found += [record for record in page.records if record.envelope.links is not None]
        cursor = page.cursor
        if not cursor:
            break
    whole = [*found, own] if own is not None else found
    return sorted(whole, key=lambda record: record.seq), not cursor


def _node(record: Record) -> FlowNode:
    envelope = record.envelope
    links = envelope.links or Links()
    # A hook waits for all steps of its chain. One line to it is enough, from the last step.
    own = f"{envelope.id}.on_"
    next = (job_id for job_id in links.next if job_id.startswith(own) or not is_hook_id(job_id))
    return FlowNode(
        id=envelope.id,
        label="group" if envelope.task == GROUP else envelope.task or "message",
        state=record.state.value,
        next=tuple(next),
        note=_note(record),
        is_hook=is_hook(record),
    )


def _note(record: Record) -> str:
    """The state of a job in the graph: ``succeeded in 52 ms``, ``running, 40 %``, ``2 to go``."""
    state, last = record.state, record.attempts[-1] if record.attempts else None
    if is_hook(record):
        return f"{record.envelope.id.rpartition('.')[2]}, {state.value}"
    if record.envelope.task == GROUP and record.pending:
        return f"{state.value}, {record.pending:,} to go"
    if state is State.RUNNING and record.progress and record.progress[1]:
        return f"running, {percent(record.progress[0] / record.progress[1])}"
    if state in (State.SUCCEEDED, State.FAILED) and last is not None and last.started:
        word = "in" if state is State.SUCCEEDED else "after"
        return f"{state.value} {word} {duration(last.ended - last.started)}"
    return state.value


@routes.post("/flows/{flow_id}/cancel", Role.OPERATOR)
def cancel(page: Page, flow_id: str) -> Response:
    """Cancel all unfinished jobs of a flow."""
    count = cancel_all(page.mill.runtime, flow_id, terminate=False)
    page.audit("cancelled flow", flow_id, count)
    return page.redirect(page.url("/flows/{}", flow_id), f"asked {count} jobs to stop")


@routes.post("/flows/{flow_id}/retry", Role.OPERATOR)
def retry(page: Page, flow_id: str) -> Response:
    """Run again the jobs that failed. Then the jobs that were cancelled because of them run."""
    try:
        retried = retry_all(page.mill.runtime, flow_id)
        text = f"retried {retried} job{'' if retried == 1 else 's'}"
    except RetryRefused as error:
        retried, text = 0, str(error)
    page.audit("retried flow", flow_id, retried)
    return page.redirect(page.url("/flows/{}", flow_id), text, "ok" if retried else "error")
