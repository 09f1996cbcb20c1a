"""Topics: a message goes to each queue that is bound to a matching pattern.

Topics and patterns are words between dots, as in AMQP topic exchanges. In a pattern ``*`` stands
for exactly one word, and ``#`` for zero or more words.

All bindings of a store are one named record. A publish reads the record and puts a copy of the
message for each bound queue in one call. A bind at the same time as a publish may count before or
after the publish.
"""

from __future__ import annotations

from collections.abc import Callable, Set

import msgspec

from tidemill.brokers.contract.schedules import BINDINGS, Change
from tidemill.brokers.contract.store import Store
from tidemill.core.config import check_name
from tidemill.errors import InvalidOption

_ONE, _ANY = "*", "#"


def check_topic(topic: object) -> str:
    name = check_name("topic", topic)
    if _ONE in name or _ANY in name:
        raise InvalidOption(
            f"topic {name!r} has a wildcard; * and # are for the patterns of bindings"
        )
    _check_words("topic", name)
    return name


def check_pattern(pattern: object) -> str:
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


class Binding(msgspec.Struct, array_like=True, frozen=True, order=True):
    """One queue that gets a copy of each message whose topic matches the pattern."""

    queue: str
    pattern: str


class Bindings(msgspec.Struct, frozen=True):
    """All bindings of a store in order, and the version of their record; 0 without a record."""

    table: tuple[Binding, ...] = ()
    version: int = 0

    def queues_for(self, topic: str) -> list[str]:
        """The names of the queues that are bound to a topic, in order."""
        return sorted({one.queue for one in self.table if matches(one.pattern, topic)})


_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(tuple[Binding, ...]).decode


def bindings(store: Store) -> Bindings:
    (record,) = store.schedules([BINDINGS])
    return Bindings(_decode(record.body), record.version) if record else Bindings()


def bind(store: Store, queue: str, pattern: str) -> bool:
    """Bind a queue to a pattern, and make the queue if it is new; False when it was bound."""
    store.set_queue(queue)
    return _change(store, lambda table: table | {Binding(queue, pattern)})


def unbind(store: Store, queue: str, pattern: str) -> bool:
    """Delete a binding; False when there is no such binding."""
    return _change(store, lambda table: table - {Binding(queue, pattern)})


def unbind_all(store: Store, queue: str) -> bool:
    """Delete all bindings of a queue; False when the queue has none."""
    return _change(store, lambda table: {one for one in table if one.queue != queue})


def _change(store: Store, edit: Callable[[Set[Binding]], Set[Binding]]) -> bool:
    while True:
        before = bindings(store)
        after = tuple(sorted(edit({*before.table})))
        if after == before.table:
            return False
        change = Change(BINDINGS, before.version, body=_encode(after), gone=not after)
        if store.change_schedules([change])[0].done:
            return True
