"""The graph of a chain, group or flow: jobs in layers, from the first to the last.

A job is drawn one layer after the last of the jobs that it waits for. A group may have many members
with the same place in the graph. Then one box stands for these members, and counts them by state.
"""

from __future__ import annotations

import collections
import contextlib
import graphlib
import statistics
from collections.abc import Container, Sequence
from typing import NamedTuple

import msgspec

MOST_NODES = 150
"""The most boxes that a drawing has before members of groups are folded."""

FOLD_LEAST = 4
"""The least number of jobs that become one box."""

BOX = (190, 46)
_GAP = (44, 16)
_PAD = 12
_FITS = 1250  # a narrow page may shrink a graph of at most this width


class FlowNode(msgspec.Struct, frozen=True):
    """A job of a graph, or some jobs as one box.

    Attributes:
        id: the id of the job, or of the first job of a box.
        label: the name of its task.
        state: the state of the job; for several jobs, the state that matters most.
        next: ids of the jobs that wait for this job.
        count: the number of jobs in the box.
        note: a second line, such as the length of the run, or the number of jobs in each state.
        is_hook: True for a callback.
    """

    id: str
    label: str
    state: str
    next: tuple[str, ...] = ()
    count: int = 1
    note: str = ""
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
    """Many nodes as one."""
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
        layer.sort(key=lambda node, middles=middles: middles.get(node.id, 0.0))
        place.update({node.id: n - len(layer) / 2 for n, node in enumerate(layer)})
    return layers


class Drawn(NamedTuple):
    """A graph as ``flow.html`` draws it.

    Attributes:
        width, height: the size.
        lines: the path of each line.
        boxes: the nodes with the places of their boxes.
        fits: True when a narrow page may shrink the graph.
    """

    width: int
    height: int
    lines: list[str]
    boxes: list[tuple[FlowNode, int, int]]
    fits: bool


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
    """The links of a node, without the link to the box of its flow if another link leads there.

    All jobs of a flow link to the box of the flow. Only the last jobs need a line to it.
    """
    inner = [after.rpartition(".")[0] for after in node.next if after not in hooks]
    return [after for after in node.next if after not in inner]


def _line(start: tuple[int, int], end: tuple[int, int]) -> str:
    """The path from the right side of a box to the left side of another."""
    (x, y), (to_x, to_y) = start, end
    x, y, to_x, to_y = x + BOX[0], y + BOX[1] // 2, to_x - 3, to_y + BOX[1] // 2
    bend = max(20, (to_x - x) // 2)
    return f"M{x} {y}C{x + bend} {y} {to_x - bend} {to_y} {to_x} {to_y}"
