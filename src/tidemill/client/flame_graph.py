"""Profiles for people: a flame graph as one HTML file, collapsed stacks, and the top functions.

The page loads nothing and works without scripts. A script inside the page zooms and searches. It
also shows the numbers of a chosen box, because touch screens show no tooltips. Each box is a
function. The width of the box is the part of the samples in which the function was on a stack. The
box above is the caller.
"""

from __future__ import annotations

import html
from collections.abc import Mapping

_LEAST = 0.001
"""A function gets a box if it has at least this part of all samples."""

_DEEPEST = 150
"""The most boxes below each other; browsers limit how deep elements nest."""


class _Node:
    """A function on a stack, with its samples and the functions that it called."""

    __slots__ = ("below", "count")

    def __init__(self) -> None:
        self.count = 0
        self.below: dict[str, _Node] = {}


def collapsed(stacks: Mapping[str, int]) -> str:
    """One line for each stack, for other tools: ``outer;inner 12``."""
    return "".join(f"{stack} {count}\n" for stack, count in sorted(stacks.items()))


def top_functions(stacks: Mapping[str, int]) -> list[tuple[str, float, float]]:
    """(function, self, total) as parts of all samples; the largest ``self`` first.

    ``self`` counts samples in which the function itself ran. ``total`` also counts the samples of
    the functions that it called.
    """
    own: dict[str, int] = {}
    total: dict[str, int] = {}
    for stack, count in stacks.items():
        functions = stack.split(";")
        own[functions[-1]] = own.get(functions[-1], 0) + count
        for function in set(functions):
            total[function] = total.get(function, 0) + count
    whole = sum(stacks.values()) or 1
    rows = [(name, own.get(name, 0) / whole, count / whole) for name, count in total.items()]
    return sorted(rows, key=lambda row: (-row[1], -row[2], row[0]))


def flame_graph(stacks: Mapping[str, int], title: str, note: str) -> str:
    """A page with the flame graph of collapsed stacks."""
    root = _Node()
    for stack, count in stacks.items():
        root.count += count
        node = root
        for function in stack.split(";")[:_DEEPEST]:
            node = node.below.setdefault(function, _Node())
            node.count += count
    whole = max(1, root.count)
    boxes = _boxes(root, whole) or "<p>No job ran while the profile was taken.</p>"
    rows = "".join(
        f"<tr><td>{own:.1%}</td><td>{total:.1%}</td><td>{html.escape(name)}</td></tr>"
        for name, own, total in top_functions(stacks)[:30]
    )
    return _PAGE.format(
        title=html.escape(title), note=html.escape(note), boxes=boxes, rows=rows, script=_SCRIPT
    )


def _boxes(node: _Node, whole: int) -> str:
    """The boxes of the functions that a function called, the widest first."""
    shown = [
        (name, child)
        for name, child in sorted(node.below.items(), key=lambda item: -item[1].count)
        if child.count / whole >= _LEAST
    ]
    parts = []
    for name, child in shown:
        label = html.escape(name)
        tip = f"{label}: {child.count / whole:.1%}, {child.count:,} samples"
        parts.append(
            f'<div class="f" style="flex:0 0 {child.count / node.count:.4%}">'
            f'<button style="--h:{_hue(name)}" title="{tip}">{label}</button>'
            f"{_boxes(child, whole)}</div>"
        )
    return f'<div class="r">{"".join(parts)}</div>' if parts else ""


def _hue(name: str) -> int:
    """A warm colour for a function; the function has this colour in each profile."""
    return sum(map(ord, name)) * 7 % 60


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width">
<style>
:root {{ color-scheme: light dark }}
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 1rem }}
h1 {{ font-size: 1.35rem; margin: 0 0 .25rem; overflow-wrap: anywhere }}
h2 {{ font-size: 1.1rem }}
p {{ margin: .25rem 0 }}
#said {{ min-height: 1.4em; overflow-wrap: anywhere }}
.r {{ display: flex; align-items: flex-start; min-width: 0 }}
.f {{ min-width: 0; overflow: hidden }}
.f.off {{ display: none }}
.f.on {{ flex-basis: 100% !important }}
button {{ display: block; width: calc(100% - 1px); margin: 0 0 1px; padding: 0 3px; height: 24px;
  border: 0; border-radius: 2px; background: hsl(var(--h) 85% 72%); color: #111; cursor: pointer;
  font: 12px/24px ui-monospace, monospace; text-align: left; white-space: nowrap;
  overflow: hidden; text-overflow: ellipsis }}
button:hover, button:focus-visible {{ outline: 2px solid currentColor; outline-offset: -2px }}
button.hit {{ background: #a8d0ff }}
#all {{ display: inline-block; width: auto; min-height: 24px; padding: 0 8px; border-radius: 4px;
  background: ButtonFace; color: ButtonText; font: inherit }}
::placeholder {{ color: GrayText; opacity: 1 }}
table {{ border-collapse: collapse; font: 12px/1.4 ui-monospace, monospace }}
th, td {{ text-align: right; vertical-align: top; padding: 2px 12px 2px 0;
  font-variant-numeric: tabular-nums }}
th:last-child, td:last-child {{ text-align: left; overflow-wrap: anywhere; padding-right: 0 }}
</style>
<h1>{title}</h1>
<p>{note}</p>
<p><label>Find <input id="find" type="search" placeholder="part of a name"></label>
<button id="all" type="button">Show all</button></p>
<p id="said" role="status"></p>
<main id="flames">{boxes}</main>
<h2>Functions</h2>
<table><tr><th>self</th><th>total</th><th>function</th></tr>{rows}</table>
<script>{script}</script>
</html>
"""

_SCRIPT = """
const all = [...document.querySelectorAll("#flames .f")], said = document.getElementById("said");
function show(box) {
  for (const f of all) f.classList.remove("on", "off");
  for (let f = box; f && f.classList.contains("f"); f = f.parentElement.parentElement) {
    f.classList.add("on");
    for (const other of f.parentElement.children) if (other !== f) other.classList.add("off");
  }
}
document.getElementById("flames").addEventListener("click", event => {
  const button = event.target.closest("button");
  if (!button) return;
  show(button.parentElement);
  said.textContent = button.title;
});
document.getElementById("all").addEventListener("click", () => {
  show(null);
  said.textContent = "";
});
document.getElementById("find").addEventListener("input", event => {
  const text = event.target.value.toLowerCase();
  let hits = 0;
  for (const f of all) {
    const button = f.firstElementChild;
    const hit = text && button.textContent.toLowerCase().includes(text);
    button.classList.toggle("hit", Boolean(hit));
    hits += hit ? 1 : 0;
  }
  said.textContent = text ? hits + (hits === 1 ? " box" : " boxes") : "";
});
"""
