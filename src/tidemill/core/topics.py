"""Topics and the patterns of bindings, as in AMQP topic exchanges: words between dots.

In a pattern ``*`` stands for exactly one word, and ``#`` for zero or more words.
"""

from __future__ import annotations

from tidemill.core.config import check_name
from tidemill.errors import InvalidOption

_ONE, _ANY = "*", "#"


def check_topic(topic: object) -> str:
    """Check the topic of a publish.

    Raises:
        InvalidOption: the topic is empty or too long, has an empty word, or has a wildcard.
    """
    name = check_name("topic", topic)
    if _ONE in name or _ANY in name:
        raise InvalidOption(
            f"topic {name!r} has a wildcard; * and # are for the patterns of bindings"
        )
    _check_words("topic", name)
    return name


def check_pattern(pattern: object) -> str:
    """Check the pattern of a binding.

    Raises:
        InvalidOption: the pattern is empty or too long, has an empty word, or has a wildcard inside
            a word.
    """
    name = check_name("pattern", pattern)
    _check_words("pattern", name)
    for word in name.split("."):
        if len(word) > 1 and (_ONE in word or _ANY in word):
            raise InvalidOption(
                f"pattern {name!r}: a wildcard stands for whole words; write * or # between dots, "
                f"not {word!r}"
            )
    return name


def _check_words(field: str, name: str) -> None:
    if not all(name.split(".")):
        raise InvalidOption(f"{field} {name!r} has an empty word; put one dot between two words")


def matches(pattern: str, topic: str) -> bool:
    """True when a pattern matches a topic. Both must be valid."""
    wanted = pattern.split(".")
    places = _after_any(wanted, {0})  # the words of the pattern that may come next
    for word in topic.split("."):
        places = {
            place if wanted[place] == _ANY else place + 1
            for place in places
            if place < len(wanted) and wanted[place] in (_ANY, _ONE, word)
        }
        places = _after_any(wanted, places)
    return len(wanted) in places


def _after_any(wanted: list[str], places: set[int]) -> set[int]:
    """The places in a pattern, and the place after each ``#``, which may stand for no word."""
    reached = set(places)
    for place in sorted(places):
        while place < len(wanted) and wanted[place] == _ANY:
            place += 1
            reached.add(place)
    return reached
