"""The graph of a flow: layers, folding, links, and names that cannot break out of it."""

from __future__ import annotations

import re
import time
import xml.etree.ElementTree as ET

from tidemill.dashboard.flow_svg import MOST_NODES, FlowNode, draw, folded, layers_of


def node(name: str, *after: str, state: str = "ready", label: str = "t") -> FlowNode:
    return FlowNode(name, label, state, after)


def layers(*nodes: FlowNode) -> list[set[str]]:
    return [{each.id for each in layer} for layer in layers_of(nodes)]


def test_a_job_stands_behind_the_latest_job_before_it() -> None:
    diamond = [node("a", "b", "c", "d"), node("b", "d"), node("c", "d"), node("d")]
    assert layers(*diamond) == [{"a"}, {"b", "c"}, {"d"}]


def test_links_to_missing_jobs_and_circles_do_no_harm() -> None:
    assert layers(node("a", "gone"), node("b", "b")) == [{"a", "b"}]
    assert layers(node("a", "b"), node("b", "a")) == [{"a", "b"}]
    assert layers() == []
    ET.fromstring(str(draw([node("a", "b"), node("b", "a")], lambda n: n.id, {})))


def test_neighbours_stand_near_each_other() -> None:
    nodes = [node("a1", "b1"), node("a2", "b2"), node("b2"), node("b1")]
    assert [each.id for each in layers_of(nodes)[1]] == ["b1", "b2"]


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


def test_the_drawing_links_to_jobs_and_escapes_names() -> None:
    bad = '<script>alert("1")</script>'
    text = str(draw([node(bad, label=bad, state="failed")], lambda n: "/jobs/1?a=1&b=2", {}))
    assert "<script" not in text
    assert not re.search(r"\sstyle=", text)
    tree = ET.fromstring(text)
    link = tree.find("a")
    assert link is not None
    assert link.get("href") == "/jobs/1?a=1&b=2"
    assert link.get("class", "").startswith("flow-node failed")


def test_a_drawing_of_a_wide_graph_takes_no_time() -> None:
    graph = [node("s", *[f"m{n}" for n in range(MOST_NODES)])]
    graph += [node(f"m{n}", "e", label=f"t{n}") for n in range(MOST_NODES)] + [node("e")]
    started = time.process_time()
    draw(folded(graph), lambda n: "/", {})
    assert time.process_time() - started < 1


def test_a_line_over_several_layers_runs_behind_no_box() -> None:
    graph = [node("a", "b", "c", "d"), node("b", "c"), node("c", "d"), node("d")]
    tree = ET.fromstring(str(draw(graph, lambda n: "/", {})))
    boxes = [(float(box.get("x", "")), float(box.get("y", ""))) for box in tree.iterfind("a/rect")]
    points = [
        (float(x), float(y))
        for line in tree.iterfind("path")
        for x, y in re.findall(r"(-?\d+) (-?\d+)(?=[CH]|$)", line.get("d", ""))
    ]
    heights = {round(y) for x, y in points}
    assert len(heights) > 1  # some lines have bends
    for x, y in points:
        assert not any(left < x < left + 190 and top < y < top + 46 for left, top in boxes)
    for line in tree.iterfind("path"):
        ways = re.findall(r"(-?\d+) (-?\d+)H(\d+)", line.get("d", ""))
        for left, y, right in ways:  # the straight parts cross no box
            assert not any(
                int(left) <= x + 95 <= int(right) and top < int(y) < top + 46 for x, top in boxes
            )


def test_only_the_last_jobs_of_a_flow_have_a_line_to_its_box() -> None:
    hook = FlowNode("f.1.success", "t", "ready", is_hook=True)
    last = node("f.1", "f", "f.1.success")
    graph = [node("f.0", "f", "f.1"), last, hook, node("f", label="group")]
    tree = ET.fromstring(str(draw(graph, lambda n: "/", {})))
    assert len(tree.findall("path")) == 3
