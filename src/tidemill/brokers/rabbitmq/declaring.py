"""Making queues and exchanges on the server, on a channel of its own.

To declare what is there changes nothing, so nobody needs to know whether it is: what this process
has not declared over this connection is declared before it is used. The answer also says how many
messages lie in a queue, and that is all the server tells of one.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pika
from pika.channel import Channel

from tidemill.brokers.rabbitmq.delays import LEVELS, Clockwork
from tidemill.brokers.rabbitmq.names import Place

__all__ = ["SILENT", "Declarer"]

log = logging.getLogger("tidemill.rabbitmq")

_SILENT = 10.0
"""Seconds after which what is not answered is given up, and the rest goes on on another channel."""

SILENT = f"no answer in {_SILENT:g} s"

Answer = Callable[[str], None]
"""Told in the line's thread: empty when it is done, else why it could not be."""

_Act = Callable[[Channel, Callable[..., None]], Any]


class Declarer:
    """Declares over one line. All of it runs in the line's thread."""

    def __init__(self, clockwork: Clockwork) -> None:
        self._clockwork = clockwork
        self._connection: pika.SelectConnection | None = None
        self._channel: Channel | None = None
        self._known: set[str] = set()
        self._ways: set[tuple[int, ...]] = set()
        self._acts: deque[tuple[_Act, Callable[[Any, str], None]]] = deque()
        self._busy = self._watching = False
        self._turn = 0  # of the act that is under way

    # -- of the line ----------------------------------------------------------------------------

    def opened(self, connection: pika.SelectConnection) -> None:
        """Begin anew: the server may be another."""
        self._connection = connection
        self.forget_all()
        self._next()

    def unblocked(self) -> None:
        """Nothing waits for that here."""

    def lost(self, why: str) -> None:
        """What was asked for fails; who asked does so again when the line is back."""
        self._connection = self._channel = None
        self._busy = self._watching = False
        self._fail_all(why)

    # -- asking ---------------------------------------------------------------------------------

    def knows(self, place: Place) -> bool:
        """Whether it was declared already."""
        return place.name in self._known

    def knows_waits(self, digits: tuple[int, ...]) -> bool:
        """Whether all that a delay of these digits goes through was declared already."""
        return digits in self._ways

    def forget_all(self) -> None:
        """Somebody deletes queues: nothing is taken for granted any more."""
        self._known.clear()
        self._ways.clear()

    def declare(self, places: Sequence[Place], then: Answer) -> None:
        """Make queues that may not be there yet."""
        todo = [place for place in places if place.name not in self._known]
        acts: list[_Act] = []
        if any(place.due for place in todo):
            acts += self._exchange(-1)
        for place in todo:
            acts.append(_queue(place))
            if place.due:
                acts.append(
                    _bind(place.name, self._clockwork.exchange(-1), Clockwork.arrival(place.name))
                )
        self._run(acts, [place.name for place in todo], then)

    def declare_waits(self, digits: tuple[int, ...], then: Answer) -> None:
        """Make what a delay of these digits goes through."""
        clockwork, acts, names = self._clockwork, [], []
        if clockwork.exchange(LEVELS - 1) not in self._known:
            for level in range(-1, LEVELS):
                acts += self._exchange(level)
            names.append(clockwork.exchange(LEVELS - 1))
        for place, level, digit in clockwork.waits(digits):
            if place.name not in self._known:
                pattern = Clockwork.binding(level, digit)
                acts += [_queue(place), _bind(place.name, clockwork.exchange(level), pattern)]
                names.append(place.name)

        def over(why: str) -> None:
            if not why:
                self._ways.add(digits)
            then(why)

        self._run(acts, names, over)

    def count(self, place: Place, then: Callable[[int, str], None]) -> None:
        """How many messages are ready in a queue."""

        def answer(frame: Any, why: str) -> None:
            then(0 if why else int(frame.method.message_count), why)

        self._acts.append((_queue(place), answer))
        self._next()

    def purge(self, place: Place, then: Callable[[int, str], None]) -> None:
        """Delete what is ready in a queue; how many that were."""

        def answer(frame: Any, why: str) -> None:
            then(0 if why else int(frame.method.message_count), why)

        self._acts.append((_queue(place), lambda frame, why: None))
        self._acts.append((lambda ch, done: ch.queue_purge(place.name, callback=done), answer))
        self._next()

    def _exchange(self, level: int) -> list[_Act]:
        name = self._clockwork.exchange(level)
        acts: list[_Act] = [
            lambda ch, done: ch.exchange_declare(name, "topic", durable=True, callback=done)
        ]
        if level >= 0:
            below, pattern = self._clockwork.exchange(level - 1), Clockwork.binding(level, 0)
            acts.append(lambda ch, done: ch.exchange_bind(below, name, pattern, callback=done))
        return acts

    # -- one after the other --------------------------------------------------------------------

    def _run(self, acts: Sequence[_Act], names: Sequence[str], then: Answer) -> None:
        failed: list[str] = []

        def heard(_: Any, why: str) -> None:
            failed.extend([why] if why else [])

        def over(_: Any, why: str) -> None:
            heard(_, why)
            if not failed:
                self._known.update(names)
            then(failed[0] if failed else "")

        if not acts:
            then("")
            return
        self._acts.extend((act, heard) for act in acts[:-1])
        self._acts.append((acts[-1], over))
        self._next()

    def _next(self) -> None:
        if self._busy or not self._acts or self._connection is None:
            return
        if not self._connection.is_open:
            return  # it is being closed, and ``lost`` answers all
        if self._channel is None:
            self._busy = True
            self._connection.channel(on_open_callback=self._channel_opened)
            return
        self._busy = True
        self._turn += 1
        act, _ = self._acts[0]
        self._watch()
        act(self._channel, functools.partial(self._answered, self._turn))

    def _channel_opened(self, channel: Channel) -> None:
        channel.add_on_close_callback(self._channel_closed)
        self._channel = channel
        self._busy = False
        self._next()

    def _answered(self, turn: int, frame: Any) -> None:
        if turn != self._turn or not self._busy:
            return  # it was given up
        self._busy = False
        _, answer = self._acts.popleft()
        answer(frame, "")
        self._next()

    def _watch(self) -> None:
        if not self._watching and self._connection is not None:
            self._watching = True
            look = functools.partial(self._look, self._turn, self._connection)
            self._connection.ioloop.call_later(_SILENT, look)

    def _look(self, turn: int, connection: pika.SelectConnection) -> None:
        """A queue that has lost its log lets whoever asks for it wait, and all that is behind."""
        if connection is not self._connection:
            return
        self._watching = False
        if self._busy and turn == self._turn and self._channel is not None:
            self._channel, self._busy = None, False
            _, answer = self._acts.popleft()
            answer(None, SILENT)
            self._next()
        elif self._busy:
            self._watch()

    def _channel_closed(self, channel: Any, reason: Any) -> None:
        """The server closes the channel of whoever asks for what cannot be."""
        if channel is not self._channel:
            return
        self._channel, self._busy = None, False
        if self._acts and self._connection is not None and self._connection.is_open:
            _, answer = self._acts.popleft()
            answer(None, str(getattr(reason, "reply_text", reason)))
            self._next()

    def _fail_all(self, why: str) -> None:
        acts, self._acts = self._acts, deque()
        for _, answer in acts:
            answer(None, why)


def _queue(place: Place) -> _Act:
    return lambda ch, done: ch.queue_declare(
        place.name, durable=True, arguments=place.arguments, callback=done
    )


def _bind(queue: str, exchange: str, pattern: str) -> _Act:
    return lambda ch, done: ch.queue_bind(queue, exchange, pattern, callback=done)
