"""Topics and patterns: a matcher against a plain reference, and the refusal of bad names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.brokers.generic.topics import check_pattern, check_topic, matches
from tidemill.errors import InvalidOption

WORDS = st.sampled_from(["a", "b", "c"])
TOPICS = st.lists(WORDS, min_size=1, max_size=6)
PATTERNS = st.lists(st.one_of(WORDS, st.sampled_from(["*", "#", "#"])), min_size=1, max_size=6)


def reference(pattern: list[str], topic: list[str]) -> bool:
    """The rule of AMQP, word by word."""
    if not pattern:
        return not topic
    if pattern[0] == "#":
        return any(reference(pattern[1:], topic[skip:]) for skip in range(len(topic) + 1))
    return bool(topic) and pattern[0] in ("*", topic[0]) and reference(pattern[1:], topic[1:])


@given(PATTERNS, TOPICS)
def test_a_pattern_matches_as_the_reference_says(pattern: list[str], topic: list[str]) -> None:
    assert matches(".".join(pattern), ".".join(topic)) == reference(pattern, topic)


@pytest.mark.parametrize(
    ("pattern", "topic", "matched"),
    [
        ("orders.new", "orders.new", True),
        ("orders.new", "orders.old", False),
        ("orders.*", "orders.new", True),
        ("orders.*", "orders", False),
        ("orders.*", "orders.eu.new", False),
        ("*.*.rabbit", "quick.orange.rabbit", True),
        ("lazy.#", "lazy", True),
        ("lazy.#", "lazy.brown.fox", True),
        ("#", "anything.at.all", True),
        ("#.new", "new", True),
        ("a.#.b", "a.b", True),
        ("a.#.b.#.c", "a.x.b.b.y.c", True),
        ("a.#.*", "a", False),
        ("Orders", "orders", False),
        ("ümlaut.*", "ümlaut.ß", True),
    ],
)
def test_patterns_of_the_amqp_tutorials(pattern: str, topic: str, matched: bool) -> None:
    assert matches(pattern, topic) is matched


def test_a_long_pattern_of_wildcards_is_matched_fast() -> None:
    assert not matches(".".join(["#", "a"] * 45), ".".join(["a"] * 44 + ["b"] * 50))


@pytest.mark.parametrize(
    ("topic", "why"),
    [
        ("", "topic must not be empty"),
        (7, "topic must be a string, not int"),
        ("a..b", "topic 'a..b' has an empty word"),
        (".a", "empty word"),
        ("a.", "empty word"),
        ("a.*", r"topic 'a.\*' has a wildcard"),
        ("a#", "wildcard"),
        ("x" * 201, "201 bytes"),
    ],
)
def test_a_bad_topic_is_refused(topic: object, why: str) -> None:
    with pytest.raises(InvalidOption, match=why):
        check_topic(topic)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("", "pattern must not be empty"),
        (None, "pattern must be a string"),
        ("a..*", r"pattern 'a..\*' has an empty word"),
        ("a.b*", r"write \* or # between dots, not 'b\*'"),
        ("##", "not '##'"),
    ],
)
def test_a_bad_pattern_is_refused(pattern: object, why: str) -> None:
    with pytest.raises(InvalidOption, match=why):
        check_pattern(pattern)
