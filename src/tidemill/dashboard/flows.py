"""The pages of chains, groups and flows: a list, and the graph of each."""

from __future__ import annotations

import collections
import contextlib
import graphlib
import statistics
from collections.abc import Container, Sequence
from typing import NamedTuple

import msgspec
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
from tidemill.core.envelope import Envelope, Links
from tidemill.core.job import GROUP, Record, State
from tidemill.core.words import counted
from tidemill.dashboard.formats import duration, percent
from tidemill.dashboard.job_search import page_of, parse, query_text
from tidemill.dashboard.page import Page
from tidemill.dashboard.roles import Role
from tidemill.dashboard.routes import Routes
from tidemill.errors import JobNotFound, RetryRefused

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
        waiting = page.mill.jobs(what).page(limit=200)
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
    """The task of the first job of each flow; empty when the store no longer keeps this job."""
    # The first job may itself stand for a chain or a group: up to ``_DEPTH`` reads for each row.
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
    return member_id(whole.id, 0) if whole.task == GROUP else f"{whole.id}.0000"


def _progress(mill: Tidemill, record: Record) -> tuple[int | None, int | None]:
    """The numbers of all members and of ended members of a group; None for a chain."""
    if record.envelope.task != GROUP:
        return None, None
    count = size_of(mill.broker, record)
    return count, None if count is None else max(0, count - record.pending)


@routes.get("/flows/{flow_id}")
def flow(page: Page, flow_id: str) -> Response:
    need(page.mill.broker, Feature.FLOWS, "the graph of a flow")
    root = root_of(page.mill, flow_id)
    records, is_whole = jobs_of(page.mill, root)
    if not records:
        raise JobNotFound(f"no chain, group or flow has the id {flow_id}")
    states = collections.Counter(record.state.value for record in records)
    return page.render(
        "flow.html",
        title=f"Flow {root}",
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
    count = cancel_all(page.mill.runtime, flow_id, terminate=False)
    page.audit("cancelled flow", flow_id, count)
    return page.redirect(page.url("/flows/{}", flow_id), f"asked {counted(count, 'job')} to stop")


@routes.post("/flows/{flow_id}/retry", Role.OPERATOR)
def retry(page: Page, flow_id: str) -> Response:
    """Run again the jobs that failed. Then the jobs that were cancelled because of them run."""
    try:
        retried = retry_all(page.mill.runtime, flow_id)
        text = f"retried {counted(retried, 'job')}"
    except RetryRefused as error:
        retried, text = 0, str(error)
    page.audit("retried flow", flow_id, retried)
    return page.redirect(page.url("/flows/{}", flow_id), text, "ok" if retried else "error")


MOST_NODES = 150  # the most boxes that a drawing has before members of groups are folded
FOLD_LEAST = 4  # the least number of jobs that become one box
BOX = (190, 46)
_GAP = (44, 16)
_PAD = 12
_FITS = 1250  # a narrow page may shrink a graph of at most this width


class FlowNode(msgspec.Struct, frozen=True):
    """A job of a graph, or some jobs as one box."""

    id: str  # of the job, or of the first job of a box
    label: str  # the name of its task
    state: str  # for several jobs, the state that matters most
    next: tuple[str, ...] = ()  # ids of the jobs that wait for this job
    count: int = 1  # of the jobs in the box
    note: str = ""  # a second line, such as the length of the run, or the jobs in each state
    is_hook: bool = False


_BY_WEIGHT = (
    *("failed", "running", "ready", "scheduled", "waiting", "cancelled", "expired", "succeeded"),
)


def folded(nodes: Sequence[FlowNode], most: int = MOST_NODES) -> list[FlowNode]:
    """The nodes. If there are more than ``most`` nodes, one node replaces nodes that are alike.

    Nodes are alike when they have the same task and the same jobs before and after them.
    """
    if len(nodes) <= most:
        return list(nodes)
    before: dict[str, list[str]] = collections.defaultdict(list)
    for node in nodes:
        for after in node.next:
            before[after].append(node.id)
    alike: dict[tuple[object, ...], list[FlowNode]] = collections.defaultdict(list)
    for node in nodes:
        place = (node.label, node.next, tuple(sorted(before[node.id])), node.is_hook)
        alike[place].append(node)
    stands = {}
    kept: list[FlowNode] = []
    for some in alike.values():
        if len(some) < FOLD_LEAST:
            kept += some
            continue
        box = _box(some)
        kept.append(box)
        stands.update({node.id: box.id for node in some})
    return [
        msgspec.structs.replace(
            node, next=tuple(dict.fromkeys(stands.get(after, after) for after in node.next))
        )
        for node in kept
    ]


def _box(some: Sequence[FlowNode]) -> FlowNode:
    states = collections.Counter(node.state for node in some)
    worst = min(states, key=_BY_WEIGHT.index)
    note = ", ".join(f"{count:,} {state}" for state, count in states.most_common(2))
    return msgspec.structs.replace(some[0], state=worst, count=len(some), note=note)


def layers_of(nodes: Sequence[FlowNode]) -> list[list[FlowNode]]:
    """The nodes by layer, each near the middle of the jobs before it.

    The planner never makes a circle; the nodes of a graph with a circle are one layer.
    """
    before: dict[str, list[str]] = {node.id: [] for node in nodes}
    for node in nodes:
        for after in before.keys() & set(node.next) - {node.id}:
            before[after].append(node.id)
    depth = dict.fromkeys(before, 0)
    with contextlib.suppress(graphlib.CycleError):
        for name in graphlib.TopologicalSorter(before).static_order():
            depth[name] = max((depth[parent] + 1 for parent in before[name]), default=0)
    layers: list[list[FlowNode]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for node in nodes:
        layers[depth[node.id]].append(node)
    place: dict[str, float] = {}
    for layer in layers:
        middles = {
            node.id: statistics.fmean(found)
            for node in layer
            if (found := [place[name] for name in before[node.id] if name in place])
        }
        layer.sort(key=lambda node: middles.get(node.id, 0.0))
        place.update({node.id: n - len(layer) / 2 for n, node in enumerate(layer)})
    return layers


class Drawn(NamedTuple):
    """A graph as ``flow.html`` draws it."""

    width: int
    height: int
    lines: list[str]  # the path of each line
    boxes: list[tuple[FlowNode, int, int]]  # the nodes with the places of their boxes
    fits: bool  # a narrow page may shrink the graph


def drawn(nodes: Sequence[FlowNode]) -> Drawn:
    """A graph with a column for each layer."""
    layers = layers_of(nodes)
    (step_x, step_y), rows = (BOX[0] + _GAP[0], BOX[1] + _GAP[1]), max(map(len, layers), default=1)
    spots = {
        node.id: (_PAD + n * step_x, _PAD + m * step_y + (rows - len(layer)) * step_y // 2)
        for n, layer in enumerate(layers)
        for m, node in enumerate(layer)
    }
    hooks = {node.id for node in nodes if node.is_hook}
    lines = [
        _line(spots[node.id], spots[after])
        for node in nodes
        for after in _followers(node, hooks)
        if after in spots
    ]
    width = 2 * _PAD + max(1, len(layers)) * step_x - _GAP[0]
    height = 2 * _PAD + rows * step_y - _GAP[1]
    return Drawn(width, height, lines, [(n, *spots[n.id]) for n in nodes], width <= _FITS)


def _followers(node: FlowNode, hooks: Container[str]) -> list[str]:
    """The links of a node, without the link to the box of its flow if another link leads there."""
    inner = [after.rpartition(".")[0] for after in node.next if after not in hooks]
    return [after for after in node.next if after not in inner]


def _line(start: tuple[int, int], end: tuple[int, int]) -> str:
    """The path from the right side of a box to the left side of another."""
    (x, y), (to_x, to_y) = start, end
    x, y, to_x, to_y = x + BOX[0], y + BOX[1] // 2, to_x - 3, to_y + BOX[1] // 2
    bend = max(20, (to_x - x) // 2)
    return f"M{x} {y}C{x + bend} {y} {to_x - bend} {to_y} {to_x} {to_y}"
