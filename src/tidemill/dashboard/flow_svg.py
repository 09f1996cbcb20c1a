"""The graph of a chain, group or flow as SVG: jobs in layers, from the first to the last.

A job is drawn one layer after the last of the jobs that it waits for. Within a layer, each job is
placed near the middle of its neighbours, so that few lines cross. A line that crosses layers has
its own place in each of these layers, so that no box hides the line. A group may have many members
with the same place in the graph. Then one box stands for these members, and counts them by state.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from markupsafe import Markup

MOST_NODES = 150
"""The most boxes that a drawing has before members of groups are folded."""

FOLD_LEAST = 4
"""The least number of jobs that become one box."""

_BOX = (190.0, 46.0)
_GAP = (44.0, 16.0)
_PAD = 12.0
_LABEL_MOST = 24
_FITS = 1250.0  # a narrow page may shrink a graph of at most this width
_ROUNDS = 4
_BENDS_MOST = 1000
"""If lines cross more layers than this, all lines are drawn straight, also behind boxes."""


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
    names = {node.id for node in kept}
    return [
        msgspec.structs.replace(
            node, next=tuple(dict.fromkeys(stands.get(after, after) for after in node.next))
        )
        for node in kept
        if node.id in names
    ]


def _box(some: Sequence[FlowNode]) -> FlowNode:
    """Many nodes as one."""
    states = collections.Counter(node.state for node in some)
    worst = min(states, key=lambda s: _BY_WEIGHT.index(s) if s in _BY_WEIGHT else len(_BY_WEIGHT))
    note = ", ".join(f"{count:,} {state}" for state, count in states.most_common(2))
    return msgspec.structs.replace(some[0], state=worst, count=len(some), note=note)


def layers_of(nodes: Sequence[FlowNode]) -> list[list[FlowNode]]:
    """The nodes by layer, ordered within each layer. Links that close a circle are left out."""
    known = {node.id: node for node in nodes}
    before: dict[str, list[str]] = {node.id: [] for node in nodes}
    for node in nodes:
        for after in node.next:
            if after in known and after != node.id:
                before[after].append(node.id)
    depth: dict[str, int] = {}
    left = collections.Counter({name: len(parents) for name, parents in before.items()})
    ready = collections.deque(name for name in known if not left[name])
    while ready:
        name = ready.popleft()
        depth[name] = max(
            (depth[parent] + 1 for parent in before[name] if parent in depth), default=0
        )
        for after in known[name].next:
            if after in left and after != name:
                left[after] -= 1
                if not left[after]:
                    ready.append(after)
    layers: list[list[FlowNode]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for node in nodes:
        if node.id not in depth:  # the node is in a circle, which the planner never makes
            depth[node.id] = 0
            layers = layers or [[]]
        layers[depth[node.id]].append(node)
    return _ordered(layers, before)


def _ordered(
    layers: list[list[FlowNode]], before: Mapping[str, Sequence[str]]
) -> list[list[FlowNode]]:
    """Sort each layer by the middle of the neighbours, in a few passes in both directions."""
    for round_ in range(_ROUNDS):
        place = {node.id: n for layer in layers for n, node in enumerate(layer)}
        forward = round_ % 2 == 0

        def middle(node: FlowNode, place: dict[str, int] = place, forward: bool = forward) -> float:
            near = before[node.id] if forward else node.next
            places = [place[name] for name in near if name in place]
            return sum(places) / len(places) if places else float(place[node.id])

        for layer in layers if forward else reversed(layers):
            layer.sort(key=middle)
            place.update({node.id: n for n, node in enumerate(layer)})
    return layers


class _Lines(NamedTuple):
    """The nodes and bends of a graph, and the points of each line: box, bends, box."""

    nodes: list[FlowNode]
    lines: list[tuple[str, ...]]


def _bent(nodes: Sequence[FlowNode]) -> _Lines:
    """Put a bend into each layer that a line crosses. A bend is a node without a label."""
    depth = {node.id: n for n, layer in enumerate(layers_of(nodes)) for node in layer}
    hooks = {node.id for node in nodes if node.is_hook}
    links = [(node.id, a) for node in nodes for a in _drawn(node, hooks) if a in depth]
    few = sum(depth[after] - depth[name] for name, after in links) <= _BENDS_MOST
    firsts = collections.defaultdict[str, list[str]](list)
    bends: list[FlowNode] = []
    lines: list[tuple[str, ...]] = []
    for name, after in links:
        between = range(depth[name] + 1, depth[after]) if few else ()
        line = (name, *[f"{name} {after} {n}" for n in between], after)
        lines.append(line)
        firsts[name].append(line[1])
        bends += [FlowNode(a, "", "", (b,)) for a, b in itertools.pairwise(line[1:])]
    kept = [msgspec.structs.replace(node, next=tuple(firsts[node.id])) for node in nodes]
    return _Lines([*kept, *bends], lines)


def _drawn(node: FlowNode, hooks: Container[str]) -> list[str]:
    """The links of a node, without the link to the box of its flow if another link leads there.

    All jobs of a flow link to the box of the flow. Only the last jobs need a line to it.
    """
    inner = [after.rpartition(".")[0] for after in node.next if after not in hooks]
    return [after for after in node.next if after not in inner]


def draw(
    nodes: Sequence[FlowNode],
    link: Callable[[FlowNode], str],
    icons: Mapping[str, str],
    here: Iterable[str] = (),
) -> Markup:
    """The graph as an ``svg`` element. ``icons`` names the icon of each state; no inline styles.

    ``here`` are the ids of jobs to mark, such as the job of the current page.
    """
    graph = _bent(nodes)
    layers = layers_of(graph.nodes)
    (width, height), (gap_x, gap_y), marked = _BOX, _GAP, frozenset(here)
    tall = [sum((height if node.label else 0.0) + gap_y for node in layer) for layer in layers]
    whole = max(tall, default=gap_y) - gap_y
    spots: dict[str, tuple[float, float]] = {}
    for n, layer in enumerate(layers):
        y = _PAD + (whole - (tall[n] - gap_y)) / 2
        for node in layer:
            spots[node.id] = _PAD + n * (width + gap_x), y
            y += (height if node.label else 0.0) + gap_y
    parts = [_line([spots[name] for name in line]) for line in graph.lines]
    parts += [_node(node, spots[node.id], link(node), icons, node.id in marked) for node in nodes]
    size_x = 2 * _PAD + max(1, len(layers)) * (width + gap_x) - gap_x
    size_y = 2 * _PAD + max(whole, height)
    return Markup(
        '<svg class="{name}" viewBox="0 0 {x:.0f} {y:.0f}" width="{x:.0f}" height="{y:.0f}" '
        'role="group" aria-label="Graph of {count} jobs">'
        '<defs><marker id="flow-end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" class="flow-tip"></path></marker>'
        "</defs>{parts}</svg>"
    ).format(
        name="flow fits" if size_x <= _FITS else "flow",
        x=size_x,
        y=size_y,
        count=sum(node.count for node in nodes),
        parts=Markup("").join(parts),
    )


def _line(spots: Sequence[tuple[float, float]]) -> Markup:
    """A line from a box to a box. It runs straight through the layers of its bends."""
    (x, y), *bends, (end_x, end_y) = spots
    x, y = x + _BOX[0], y + _BOX[1] / 2
    way = [f"M{x:.0f} {y:.0f}"]
    for to_x, to_y in (*bends, (end_x - 3, end_y + _BOX[1] / 2)):
        bend = max(20.0, (to_x - x) / 2)
        way.append(f"C{x + bend:.0f} {y:.0f} {to_x - bend:.0f} {to_y:.0f} {to_x:.0f} {to_y:.0f}")
        x, y = to_x + _BOX[0], to_y
        way.append(f"H{x:.0f}")
    return Markup('<path class="flow-line" marker-end="url(#flow-end)" d="{}"></path>').format(
        "".join(way[:-1])
    )


def _node(
    node: FlowNode, spot: tuple[float, float], href: str, icons: Mapping[str, str], here: bool
) -> Markup:
    x, y = spot
    label = node.label if len(node.label) <= _LABEL_MOST else "…" + node.label[1 - _LABEL_MOST :]
    count = f"{node.count:,} \N{MULTIPLICATION SIGN} " if node.count > 1 else ""
    kinds = "".join((" hook" if node.is_hook else "", " many" if node.count > 1 else ""))
    return Markup(
        '<a href="{href}" class="flow-node {state}{kinds}{here}">'
        "<title>{title}</title>{shadow}"
        '<rect x="{x:.0f}" y="{y:.0f}" width="{w:.0f}" height="{h:.0f}" rx="9"></rect>'
        '<svg class="icon" x="{ix:.0f}" y="{iy:.0f}" width="17" height="17">'
        '<use href="#i-{icon}"></use></svg>'
        '<text x="{tx:.0f}" y="{ty:.0f}">{count}{label}</text>'
        '<text x="{tx:.0f}" y="{ny:.0f}" class="note">{note}</text></a>'
    ).format(
        href=href,
        state=node.state,
        kinds=kinds,
        here=" here" if here else "",
        title=f"{count}{label} {node.note[:34]}, {node.state}: {node.label} {node.id}",
        shadow=_behind(x, y) if node.count > 1 else "",
        x=x, y=y, w=_BOX[0], h=_BOX[1],
        ix=x + 10, iy=y + 8, tx=x + 34, ty=y + 20, ny=y + 36,
        icon=icons.get(node.state, "dot"),
        count=count, label=label, note=node.note[:34],
    )  # fmt: skip


def _behind(x: float, y: float) -> Markup:
    """A second box behind the first, for many jobs."""
    return Markup(
        '<rect x="{:.0f}" y="{:.0f}" width="{:.0f}" height="{:.0f}" rx="9"></rect>'
    ).format(x + 4, y + 4, *_BOX)
