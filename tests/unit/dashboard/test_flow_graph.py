"""The graph of a flow: layers, folding, links, and names that cannot break out of it."""

from __future__ import annotations

import re

import pytest
from dashboard_desk import Visitor

from tidemill import Tidemill, group
from tidemill.dashboard.flows import MOST_NODES, FlowNode, drawn, folded, layers_of


def node(name: str, *after: str, state: str = "ready", label: str = "t") -> FlowNode:
    return FlowNode(name, label, state, after)


@pytest.mark.parametrize(
    ("nodes", "layers"),
    [
        pytest.param(
            [node("a", "b", "c", "d"), node("b", "d"), node("c", "d"), node("d")],
            [["a"], ["b", "c"], ["d"]],
            id="a job stands behind the latest job before it",
        ),
        pytest.param(
            [node("a1", "b1"), node("a2", "b2"), node("b2"), node("b1")],
            [["a1", "a2"], ["b1", "b2"]],
            id="neighbours stand near each other",
        ),
        pytest.param([node("a", "gone"), node("b", "b")], [["a", "b"]], id="a missing job"),
        pytest.param([node("a", "b"), node("b", "a")], [["a", "b"]], id="a circle"),
        pytest.param([], [], id="no job"),
    ],
)
def test_layers(nodes: list[FlowNode], layers: list[list[str]]) -> None:
    assert [[each.id for each in layer] for layer in layers_of(nodes)] == layers
    assert len(drawn(nodes).boxes) == len(nodes)


def test_many_members_of_a_group_become_one_box() -> None:
    members = [node(f"g.{n}", "g", state="failed" if n == 3 else "succeeded") for n in range(400)]
    graph = [node("first", *[m.id for m in members]), *members, node("g", label="group")]
    boxes = folded(graph)
    assert [each.id for each in boxes] == ["first", "g.0", "g"]
    assert (boxes[1].count, boxes[1].state) == (400, "failed")
    assert boxes[1].note == "399 succeeded, 1 failed"
    assert boxes[0].next == ("g.0",)
    # and a small graph stays as it is
    assert folded(graph[:MOST_NODES]) == graph[:MOST_NODES]


def test_the_drawing_links_to_jobs_and_escapes_names(mill: Tidemill) -> None:
    bad = '<script>alert("1")</script>'
    handle = mill.enqueue(group([mill.call(bad).using(queue="q") for _ in range(2)]))
    text = Visitor(mill).get(f"/flows/{handle.id}").partition('<svg class="flow')[2]
    text = text.partition("</svg></div>")[0]
    assert "<script" not in text
    assert not re.search(r"\sstyle=", text)
    assert text.count('class="flow-node ready"') == 2
    assert f'href="/jobs/{handle.id}.0000000"' in text
