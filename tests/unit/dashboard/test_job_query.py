"""The search text for jobs: what it means, what it refuses, and that its text comes back."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.brokers.contract.inspection import Filter, matches
from tidemill.core.envelope import Envelope
from tidemill.core.fingerprint import failure_of
from tidemill.core.job import Attempt, Outcome, Record, State
from tidemill.dashboard.job_search import FIELDS, LONGEST, parse, query_text
from tidemill.errors import InvalidOption


def record(state: str = "ready", *, error: str = "", **given: Any) -> Record:
    envelope = Envelope(**{"id": "0123456789ab", **given})
    attempts = [Attempt(1, "w1", 0, 0, 0, Outcome.FAIL, error)] if error else []
    return Record(
        envelope=envelope, state=State(state), seq=1, rank=0, attempts=attempts, error=error
    )


def finds(text: str, one: Record) -> bool:
    query = parse(text)
    return matches(one, query.what) and query.matches_rest(one)


def test_the_store_checks_every_field_but_the_failure() -> None:
    query = parse('state:failed,expired task:shop.pay queue:mail tag:a key:k "a b" c id:01')
    assert query.what == Filter(
        states=frozenset({State.FAILED, State.EXPIRED}),
        task="shop.pay",
        queue="mail",
        tag="a",
        key="k",
        text="a b c",
        id_prefix="01",
    )
    for field in FIELDS.keys() - {"failure", "state"}:
        assert parse(f"{field}:x").what != Filter(), field


@pytest.mark.parametrize(
    ("text", "one", "found"),
    [
        ("", record(), True),
        ("state:finished", record("expired"), True),
        ("state:unfinished", record("failed"), False),
        ("state:ready,failed", record("failed"), True),
        ("tag:a", record(tags=("a", "b")), True),
        ("tag:a", record(tags=("b",)), False),
        ("png width=3", record(text="'A.PNG width=32'"), True),
        ("width=3 png", record(text="'A.PNG width=32'"), False),
        ('"x y"', record(text="'x y'"), True),
        ("args:x,y", record(text="x,y"), True),
        ("id:0123", record(), True),
        ("id:*89ab", record(), True),
        ("id:*8", record(), False),
        ("group:g1", record(id="g1.0000001"), True),
        ("group:g1", record(id="g10.0000001"), False),
    ],
)
def test_a_search_finds(text: str, one: Record, found: bool) -> None:
    assert finds(text, one) is found


def test_a_failure_is_found_by_its_fingerprint() -> None:
    one = record("failed", error="ValueError: no user 17")
    same = failure_of("ValueError: no user 18").fingerprint
    assert finds(f"failure:{same}", one)
    assert not finds(f"failure:{same}", record("failed", error="KeyError: 17"))
    assert not finds(f"failure:{same}", record())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("stat:failed", "no field 'stat'; its fields are state, task, queue, tag, id, key, args,"),
        ("-tag:a", "no field '-tag'; its fields are state,"),
        ("http://x", "in quotes"),
        ("state:broken", "state:broken is no state"),
        ("state: ", "state: has no value"),
        ("state:,", "state: has no value"),
        ("id:*", "id: has no value"),
        ('task:""', "task: has no value"),
        ('task:"a', "has a quote without its end"),
        ("task:a task:b", "the search has task: twice"),
        ("id:a group:b", "both id: and group:"),
        ("x" * (LONGEST + 1), "more than 1000 characters"),
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
    assert str(query.with_value("state", "ready")) == "task:a args:png state:ready"
    assert str(query.with_value("task")) == "state:failed args:png"
    assert query.with_value("state").what == Filter(task="a", text="png")


values = st.text(min_size=1, max_size=12).filter(lambda text: text.strip() == text)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(["task", "queue", "tag", "key", "failure"]), values))
def test_any_value_comes_back_from_the_text_of_a_search(tokens: dict[str, str]) -> None:
    query = parse(query_text(**tokens))
    assert parse(str(query)) == query
    assert query.tokens == tokens


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
