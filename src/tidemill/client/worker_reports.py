"""Reports of a worker: the stacks of its processes, or a profile, also as a flame graph.

The question is a command that the store passes to the worker, and the answer is a note in the
store. So the worker may run on any machine that has the same store. The page of a flame graph loads
nothing and works without scripts; a script inside zooms, searches, and shows the numbers of a box.
"""

from __future__ import annotations

import html
import threading
import time
import zlib
from collections.abc import Mapping

import msgspec

from tidemill.brokers.contract.store import Store
from tidemill.brokers.generic.notes import Notes
from tidemill.core.clock import new_id
from tidemill.core.job import Command, Owner
from tidemill.core.suggest import hint
from tidemill.errors import InvalidOption, TidemillError

KIND = "report"  # the kind of the notes that hold reports
PATIENCE = 15.0  # seconds after the end of a profile in which the worker must answer

LONGEST, MOST_HERTZ = 600.0, 1000.0
"""The most seconds of a profile, and the most samples per second."""

_LOOK_EVERY = 0.1


class Question(msgspec.Struct, frozen=True):
    """A request for a report: ``dump``, or ``profile`` for some seconds."""

    verb: str
    id: str
    seconds: float = 0.0
    hertz: float = 0.0

    @property
    def command(self) -> Command:
        numbers = f" {self.seconds:g} {self.hertz:g}" if self.verb == "profile" else ""
        return Command(f"{self.verb} {self.id}{numbers}")


def question_of(command: str) -> Question | None:
    """The question in a command; None for another command, or numbers out of their range."""
    try:
        verb, question_id, *numbers = command.split()
        seconds, hertz = map(float, numbers) if verb == "profile" else (0.0, 0.0)
    except ValueError:
        return None
    in_range = 0 < seconds <= LONGEST and 1 <= hertz <= MOST_HERTZ
    if verb == "dump" or (verb == "profile" and in_range):
        return Question(verb, question_id, seconds, hertz)
    return None


class Answer(msgspec.Struct, array_like=True):
    """The answer of one process: its stacks as text, or a profile of collapsed stacks."""

    question: str
    pid: int = 0
    stacks: str = ""
    profile: dict[str, int] = {}
    samples: int = 0


class Report(msgspec.Struct, array_like=True):
    """The answers of all processes of a worker; ``silent`` are the processes without an answer."""

    worker: str
    verb: str
    answers: list[Answer] = []
    silent: list[int] = []

    @property
    def stacks(self) -> dict[str, int]:
        """The collapsed stacks of all processes, summed."""
        total: dict[str, int] = {}
        for answer in self.answers:
            for stack, count in answer.profile.items():
                total[stack] = total.get(stack, 0) + count
        return total

    @property
    def samples(self) -> int:
        """The number of samples of all processes together."""
        return sum(answer.samples for answer in self.answers)


def encode_report(report: Report) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(report))


def find_worker(broker: Store, name: str = "") -> Owner:
    """Find a worker by the beginning of its name or id; the only one without a ``name``."""
    workers = [owner for owner in broker.owners() if owner.kind == "worker"]
    if not workers:
        raise InvalidOption("no worker is alive; start one: tidemill worker MODULE:VAR")
    exact = [owner for owner in workers if name in (owner.name, owner.id)]
    found = exact or [o for o in workers if o.name.startswith(name) or o.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    names = sorted(owner.name for owner in found or workers)
    if not found:
        raise InvalidOption(f"no worker has the name {name!r}; {hint(name, names)}")
    text = (
        f"{len(found)} workers begin with {name!r}" if name else f"there are {len(found)} workers"
    )
    raise InvalidOption(f"{text}; name one of them: {', '.join(names[:10])}")


def ask_worker(
    broker: Store, worker: Owner, verb: str, seconds: float = 0.0, hertz: float = 0.0
) -> Report:
    """Ask a worker for a ``dump``, or a ``profile`` of some seconds; wait for its report."""
    notes = Notes(broker, KIND, f"the command {verb}")
    question = Question(verb, new_id(), seconds, hertz)
    if not broker.command(worker.id, question.command):
        raise TidemillError(f"worker {worker.name} has ended")
    until = time.monotonic() + seconds + PATIENCE
    pause, looked = threading.Event(), time.monotonic()
    while time.monotonic() < until:
        pause.wait(_LOOK_EVERY)
        if note := notes.get(question.id):
            notes.delete(note)
            return msgspec.msgpack.decode(zlib.decompress(note.body), type=Report)
        if time.monotonic() - looked > 1.0:
            looked = time.monotonic()
            if worker.id not in [owner.id for owner in broker.owners()]:
                raise TidemillError(f"worker {worker.name} ended before it answered")
    raise TidemillError(
        f"worker {worker.name} did not answer within {seconds + PATIENCE:g} s; "
        f"kill -USR1 {worker.pid} on {worker.host} makes it write its stacks to its log"
    )


# -- a profile for people --------------------------------------------------------------------------

_LEAST = 0.001  # a function gets a box if it has at least this part of all samples
_DEEPEST = 150  # the most boxes below each other; browsers limit how deep elements nest


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
        hue = sum(map(ord, name)) * 7 % 60  # warm, and the same for a function in each profile
        tip = f"{label}: {child.count / whole:.1%}, {child.count:,} samples"
        parts.append(
            f'<div class="f" style="flex:0 0 {child.count / node.count:.4%}">'
            f'<button style="--h:{hue}" title="{tip}">{label}</button>'
            f"{_boxes(child, whole)}</div>"
        )
    return f'<div class="r">{"".join(parts)}</div>' if parts else ""


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
