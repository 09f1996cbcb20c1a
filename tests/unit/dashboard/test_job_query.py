"""The search text for jobs: what it means, what it refuses, and that its text comes back."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.brokers.contract.inspection import Filter, matches
from tidemill.core.attempts import Attempt
from tidemill.core.envelope import Envelope, Planned
from tidemill.core.errors import InvalidOption
from tidemill.core.fingerprint import failure_of
from tidemill.core.job import Outcome, Record, State
from tidemill.core.limit_settings import JobLimit
from tidemill.dashboard.job_query import FIELDS, LONGEST, parse, query_text

NOW = 1_800_000_000.0


def record(state: str = "ready", *, error: str = "", finished: float = 0.0, **given: Any) -> Record:
    envelope = Envelope(**{"id": "0123456789ab", "created": NOW - 100, **given})
    attempts = [Attempt(1, "w1", 0, 0, 0, Outcome.FAIL, error)] if error else []
    return Record(
        envelope=envelope,
        state=State(state),
        seq=1,
        rank=0,
        finished=finished,
        attempts=attempts,
        error=error,
    )


def finds(text: str, one: Record) -> bool:
    """Whether a search finds a job; store and record check must agree."""
    query = parse(text)
    by_store = matches(one, query.what) and query.matches_rest(one, NOW)
    assert by_store == query.matches(one, NOW)
    return by_store


def test_the_store_checks_what_its_filter_can_say() -> None:
    query = parse('state:failed,expired task:shop.pay queue:mail tag:a key:k "a b" id:01')
    assert query.what == Filter(
        states=frozenset({State.FAILED, State.EXPIRED}),
        task="shop.pay",
        queue="mail",
        tag="a",
        key="k",
        text="a b",
        id_prefix="01",
    )
    assert not query.rest


@pytest.mark.parametrize(
    ("text", "one", "found"),
    [
        ("", record(), True),
        ("state:finished", record("expired"), True),
        ("state:unfinished", record("failed"), False),
        ("-state:ready", record("ready"), False),
        ("-state:ready", record("failed"), True),
        ("state:ready -state:ready", record("ready"), False),
        ("task:a,b", record(task="b"), True),
        ("task:a task:b", record(task="b"), True),
        ("-task:a,b", record(task="b"), False),
        ("tag:a tag:b", record(tags=("a", "b")), True),
        ("tag:a tag:b", record(tags=("a",)), False),
        ("tag:a,b", record(tags=("b",)), False),
        ("-tag:a,b", record(tags=("b",)), False),
        ("png width=3", record(text="'A.PNG', width=32"), True),
        ('"x y"', record(text="'x y'"), True),
        ("args:x,y", record(text="x,y"), True),
        ("-png", record(text="a.png"), False),
        ("id:0123", record(), True),
        ("id:*89ab", record(), True),
        ("id:*8", record(), False),
        ("group:g1", record(id="g1.0000001"), True),
        ("group:g1", record(id="g10.0000001"), False),
        ("error:timeout", record("failed", error="TimeoutError: x"), True),
        ("error:timeout", record(), False),
        ("ended:1h", record("failed", finished=NOW - 60), True),
        ("ended:1h", record("failed", finished=NOW - 7200), False),
        ("ended:>1h", record("failed", finished=NOW - 7200), True),
        ("ended:1h", record(), False),
        ("created:<2m", record(), True),
        ("created:>2m", record(), False),
        (f"created:{NOW - 101:.0f}..{NOW - 99:.0f}", record(), True),
        (f"created:..{NOW - 101:.0f}", record(), False),
        ("limit:api", record(limit=JobLimit("api", "eu")), True),
        ("limit:api limitkey:us", record(limit=JobLimit("api", "eu")), False),
        ("schedule:nightly", record(planned=Planned("nightly")), True),
        ("worker:w1", record(error="x"), True),
        ("header:tenant=7", record(headers={"tenant": "7"}), True),
        ("header:tenant=8", record(headers={"tenant": "7"}), False),
    ],
)
def test_a_search_finds(text: str, one: Record, found: bool) -> None:
    assert finds(text, one) is found


def test_a_failure_is_found_by_its_fingerprint() -> None:
    one = record("failed", error="ValueError: no user 17")
    same = failure_of("ValueError: no user 18").fingerprint
    assert finds(f"failure:{same}", one)
    assert not finds(f"failure:{same}", record("failed", error="KeyError: 17"))


def test_a_time_alone_is_on_the_day_of_the_first_time() -> None:
    one = record(created=1_769_850_000.0)  # 2026-01-31T09:00 in UTC
    assert finds("created:2026-01-31T08:59..09:01", one)
    assert finds("created:2026-01-31T10:00+01:00..2026-01-31T10:01+01:00", one)
    assert not finds("created:2026-01-31T09:01..10:00", one)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("stat:failed", "the search has no field 'stat'; did you mean 'state'?"),
        ("http://x", "in quotes"),
        ("state:broken", "state:broken is no state"),
        ("state: ", "state: has no value"),
        ('task:"a', "has a quote without its end"),
        ("ended:soon", "ended:soon is no time; write ended:1h"),
        ("created:2026-01-31T08:59..later", "created:later is no time"),
        ("created:99999-01-01..", "is no time"),
        ("header:x", "write header:NAME=VALUE"),
        ("x" * (LONGEST + 1), "more than 1000 characters"),
        ("a " * 30, "more than 25 tokens"),
        ("task:" + ",".join("abcdefghijklmnopqrstuvwxyz"), "more than 25 values"),
        ("task:,", "task: has no value"),
    ],
)
def test_a_bad_token_gets_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse(text)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_links_quote_their_values() -> None:
    text = query_text(state="failed", task='a "b", \\c', queue="")
    assert text == r'state:failed task:"a \"b\", \\c"'
    assert parse(text).what.task == 'a "b", \\c'


def test_a_value_of_a_search_is_exchanged() -> None:
    query = parse("state:failed task:a png")
    assert str(query.with_values("state", "ready")) == "task:a args:png state:ready"
    assert str(query.with_values("task")) == "state:failed args:png"
    assert query.with_values("state").what == Filter(task="a", text="png")


values = st.text(min_size=1, max_size=12).filter(lambda text: text.strip() == text)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["task", "queue", "tag", "key", "error"]), values)))
def test_any_value_comes_back_from_the_text_of_a_search(pairs: list[tuple[str, str]]) -> None:
    text = " ".join(query_text(**{field: value}) for field, value in pairs[:20])
    query = parse(text)
    assert parse(str(query)) == query
    for field, value in pairs[:20]:
        assert value in query.values(field)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet='ab:-",\\ .<>' + "é\n", max_size=60))
def test_any_text_is_a_search_or_one_sentence(text: str) -> None:
    try:
        query = parse(text)
    except InvalidOption:
        return
    assert parse(str(query)) == query


def test_parsing_the_longest_text_takes_no_time() -> None:
    started = time.process_time()
    for text in ('"' * LONGEST, '\\"' * (LONGEST // 2), "a:" * (LONGEST // 2), "-" * LONGEST):
        try:
            parse(text)
        except InvalidOption:
            pass
    assert time.process_time() - started < 1


def test_every_field_has_a_description_and_a_check() -> None:
    from tidemill.dashboard.job_query import _CHECKS

    assert FIELDS.keys() == _CHECKS.keys()
