"""Chains, groups, flows and hooks with real workers, also when those are killed."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from harness import Place, check_counters, check_no_overlap, open_place
from servers import NETWORK

from tidemill import Flow, JobFailed, State, Tidemill, chain, group, map_many
from tidemill.brokers.contract.inspection import Filter
from tidemill.core.clock import new_id
from tidemill.core.job import GROUP

APP = """
forever = Retries(1000, delay=0)

@mill.task(retries=forever)
def inc(x, by=1):
    begin(); time.sleep(0.01); end()
    return x + by

@mill.task(retries=forever)
def total(numbers):
    begin(); time.sleep(0.01); end()
    return sum(total.function(n) if isinstance(n, list) else n for n in numbers)

@mill.task
def bad(*_):
    raise Fail("never")

@mill.task(retries=forever)
def hook(ended, why):
    begin(); note("hook", ended.id, why, ended.state, str(ended.result).replace(" ", "")); end()
"""


STORES = ["lmdb", "redis", "postgresql", "http"]


@pytest.fixture(params=STORES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    folder = tmp_path / "p"
    folder.mkdir()
    lease = "&owner_lease=4" if request.param == "http" else ""  # else the dead are seen at once
    url = NETWORK[request.param](f"t{new_id()}{lease}") if request.param in NETWORK else ""
    with open_place(folder, url) as place:
        yield place


@pytest.fixture
def app(place: Place) -> Any:
    return load(place)


def load(place: Place) -> Any:
    place.write(APP.replace("sum(total.function(n)", "sum(sum(n)"))
    return place.module


def hooked(app: Any, what: Any) -> Any:
    for name in ("on_success", "on_failure", "on_complete"):
        what = getattr(what, name)(app.hook.call(name))
    return what


def diamond(app: Any) -> Flow:
    flow = Flow()
    a = flow.add(app.inc.call(0))
    b, c = flow.add(app.inc.call(a, by=10)), flow.add(app.inc.call(a, by=20))
    flow.add(app.total.call([b, c]))
    return flow


def told(place: Place, whole: str) -> list[str]:
    """The hooks of a whole that ran to their end, each once, with what they were told."""
    lines = {line.split(" ", 2)[2] for line in place.notes() if line.startswith(f"hook {whole} ")}
    return sorted(lines)


@pytest.mark.everyday
def test_compositions_run_in_workers(place: Place, app: Any) -> None:
    # cases C1, C2, C3, C4
    place.worker(processes=2).wait_ready()
    mill = app.mill
    good = mill.enqueue(hooked(app, chain(app.inc.call(1), app.inc, app.inc)))
    stopped = mill.enqueue(hooked(app, chain(app.inc.call(1), app.bad, app.inc)))
    nested = mill.enqueue(group([app.inc.call(1), group([app.inc.call(n) for n in range(3)])]))
    whole = mill.enqueue(chain(map_many(app.inc, range(10)), app.total))
    square = mill.enqueue(hooked(app, diamond(app)))
    assert good.result(timeout=60) == 4
    with pytest.raises(JobFailed, match="never"):
        stopped.result(timeout=60)
    assert nested.result(timeout=60) == [2, [1, 2, 3]]
    assert whole.result(timeout=60) == 55
    assert square.result(timeout=60) == [1, 11, 21, 32]
    place.wait_notes("hook", 6)
    assert told(place, good.id) == ["on_complete succeeded 4", "on_success succeeded 4"]
    assert told(place, stopped.id) == ["on_complete failed None", "on_failure failed None"]
    assert [line.split()[2] for line in place.notes() if f"hook {square.id}" in line] in (
        ["on_complete", "on_success"],
        ["on_success", "on_complete"],
    )
    with Tidemill(place.url) as other:  # as another process would
        assert other.group(nested.id).result(0) == [2, [1, 2, 3]]


class Mix(NamedTuple):
    """Some of each, with hooks."""

    chains: list[Any]
    groups: list[Any]
    squares: list[Any]


def enqueue_mix(app: Any, count: int) -> Mix:
    mix, mill = Mix([], [], []), app.mill
    for _ in range(count):
        middle = group([app.inc, app.inc.call(by=2), chain(app.inc, app.inc)])
        steps = chain(app.inc.call(0), middle, app.total, app.inc)
        mix.chains.append(mill.enqueue(hooked(app, steps)))
        members = [app.inc.call(1), app.bad.call(), group([app.inc.call(2), app.inc.call(3)])]
        mix.groups.append(mill.enqueue(hooked(app, group(members))))
        mix.squares.append(mill.enqueue(hooked(app, diamond(app))))
    return mix


def check_mix(place: Place, mix: Mix) -> None:
    """Everything came to its end, each step after those before it, and each hook once."""
    count = len(mix.chains)
    assert [c.result(0) for c in mix.chains] == [2 + 3 + 3 + 1] * count
    assert [s.result(0) for s in mix.squares] == [[1, 11, 21, 32]] * count
    for whole in mix.groups:
        assert (whole.state, whole.count(), whole.count(failures=True)) == (State.FAILED, 3, 1)
    ran = Counter(
        record.envelope.id.rpartition(".")[2]
        for record in place.records()
        if record.envelope.task.endswith("hook") and record.state is State.SUCCEEDED
    )
    assert ran == {"on_complete": 3 * count, "on_success": 2 * count, "on_failure": count}
    for whole in mix.chains + mix.squares + mix.groups:
        state = "failed" if whole in mix.groups else "succeeded"
        how = "on_failure" if state == "failed" else "on_success"
        assert [line.split()[:2] for line in told(place, whole.id)] == [
            ["on_complete", state],
            [how, state],
        ]
    lines = place.ledger()
    check_no_overlap(lines)
    check_counters(place)
    ends = {line.id: line.time for line in reversed(lines) if line.what == "end"}  # the first
    begins = {line.id: line.time for line in reversed(lines) if line.what == "begin"}
    for record in place.records():
        links = record.envelope.links
        for name in links.inputs if links is not None else ():
            if record.envelope.id in begins and name in ends:
                assert ends[name] <= begins[record.envelope.id], (name, record.envelope.id)
    groups = place.mill.jobs(Filter(task=GROUP)).page(limit=1000)  # other lists leave groups out
    assert len(groups.records) == 4 * count


@pytest.mark.parametrize(
    ("place", "seed"),
    [("lmdb", 1), ("redis", 2), ("postgresql", 1), ("http", 2)],
    indirect=["place"],
)
def test_kills_of_anything_keep_the_order_of_steps_and_fire_each_hook_once(
    place: Place, app: Any, seed: int
) -> None:
    # cases C2, C4, C5; law 3
    dice = random.Random(seed)
    workers = [place.worker(processes=2, slots=2) for _ in range(2)]
    mix = enqueue_mix(app, 20)
    # when
    for _ in range(8):
        time.sleep(dice.uniform(0.05, 0.5))
        at = dice.randrange(2)
        if dice.random() < 0.5 and (children := workers[at].children()):
            with contextlib.suppress(psutil.NoSuchProcess):
                dice.choice(children).kill()
        else:
            workers[at].kill_everything()
            workers[at] = place.worker(processes=2, slots=2)
    place.drain()
    # then
    check_mix(place, mix)
