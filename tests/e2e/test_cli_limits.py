"""``tidemill limit``, and limits in what other verbs show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_store import Desk

from tidemill import Limit

pytestmark = pytest.mark.everyday


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.mill.close()


def test_limits_are_listed_and_changed(desk: Desk) -> None:
    # case S5: at run time
    desk.add.enqueue(1)
    assert desk.run("limit").stdout.startswith("no limits in ")
    desk.mill.queue("sums", rate="10/s", burst=20)
    desk.add.using(limit=Limit("1/h", key="ada")).enqueue(1)
    [queue, task] = desk.json("limit")["limits"]
    assert (queue["name"], queue["queue"], queue["rate"], queue["burst"]) == (
        *("sums", True, "10/s", 20),
    )
    assert (task["name"], task["queue"], task["rate"], task["keys"]) == ("add", False, "1/h", 1)
    shown = desk.run("limit", "add", "--rate", "5/m", "--concurrency", "2").stdout
    assert "5/m, burst 1, 2 at a time" in shown
    assert "sums" not in shown
    desk.run("limit", "sums", "--queue", "--rate", "none", "--breaker", "3", "--pause", "9")
    [queue] = desk.json("limit", "sums", "--queue")["limits"]
    assert (queue["rate"], queue["breaker"]) == (None, {"failures": 3, "pause": 9})
    assert "breaker: 9 s after 3 failures" in desk.run("queues").stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--rate", "1/s"], "name the limit to change"),
        (["nobody", "--rate", "1/s"], "a limit begins with its first job; known are"),
        (["sums"], "for the queue of that name add --queue"),
        (["sums", "--queue", "--rate", "fast"], "rate must be jobs per time"),
        (["sums", "--queue", "--concurrency", "1.5"], "concurrency must be a whole number or none"),
        (["sums", "--queue", "--rate", "none", "--burst", "5"], "burst goes with a rate"),
        (["sums", "--queue", "--burst", "big"], "burst must be a number or none"),
        (["sum", "--queue", "--rate", "5/s"], "no queue has the name 'sum' here; did you mean"),
        (["sums", "--queue", "--rate", "5/s", "--declared"], "pass no other settings with it"),
        (["--declared"], "name the limit to change"),
    ],
)
def test_a_mistake_is_one_sentence(desk: Desk, words: list[str], sentence: str) -> None:
    desk.mill.queue("sums", rate="1/s")
    result = desk.run("limit", *words)
    assert result.exit_code in (1, 2)
    assert sentence in result.output
    assert desk.json("limit")["limits"][0]["rate"] == "1/s"


def test_explain_names_the_limit(desk: Desk) -> None:
    job = desk.add.using(limit=Limit(concurrency=0, key="ada")).enqueue(1)
    said = desk.run("explain", job.id).stdout
    assert "waits for the limit of 'add' for key 'ada': 0 of 0 are running" in said
    assert desk.json("job", job.id)["limit"] == {"name": "add", "key": "ada"}


def test_a_limit_goes_back_to_what_code_declares(desk: Desk) -> None:
    desk.mill.queue("sums", rate="10/s", burst=50)
    (row,) = desk.json("limit", "sums", "--queue", "--rate", "1/s")["limits"]
    assert (row["rate"], row["burst"], row["by_hand"]) == ("1/s", 50, True)
    (row,) = desk.json("limit", "sums", "--queue", "--burst", "none")["limits"]
    assert (row["rate"], row["burst"]) == ("1/s", 1)
    (row,) = desk.json("limit", "sums", "--queue", "--declared")["limits"]
    assert (row["rate"], row["burst"], row["by_hand"]) == ("10/s", 50, False)
