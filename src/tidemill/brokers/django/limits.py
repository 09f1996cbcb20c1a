"""Limits and their keys as the containers that the memory broker works on; see :mod:`.tables`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from tidemill.brokers.django.tables import Rows
from tidemill.brokers.rules.transitions import Limit, Partition
from tidemill.core.envelope import LimitSettings
from tidemill.limits.arithmetic import Limiter


class _Settings(msgspec.Struct, array_like=True):
    terms: LimitSettings
    declared: LimitSettings | None
    by_hand: bool
    limiter: Limiter


_encode = msgspec.msgpack.Encoder().encode
_settings = msgspec.msgpack.Decoder(_Settings)
_limiter = msgspec.msgpack.Decoder(Limiter)


class Limits(dict[str, Limit]):
    """The limits of queues, or the limits with names. All are read at once: there are few."""

    def __init__(self, rows: Rows, prefix: str) -> None:
        super().__init__()
        self._rows = rows
        self._prefix = prefix
        self._before: dict[str, bytes] = {}

    def load(self, name: str, raw: bytes) -> None:
        settings = _settings.decode(raw)
        limit = self[name] = Limit()
        limit.terms, limit.declared = settings.terms, settings.declared
        limit.by_hand, limit.limiter = settings.by_hand, settings.limiter
        self._before[name] = raw

    def flush(self) -> None:
        rows = []
        for name, limit in self.items():
            raw = _encode(_Settings(limit.terms, limit.declared, limit.by_hand, limit.limiter))
            if raw != self._before.get(name):
                rows.append((self._prefix + name, raw))
                self._before[name] = raw
        self._rows.upsert("tidemill_limit", ["name"], ("name", "facts"), rows)


class Partitions(dict[tuple[str, str], Partition]):
    """The keys of limits; see ``Jobs.partitions``."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self._rows = rows
        self._before: dict[tuple[str, str], tuple[Any, ...]] = {}
        self._looked: set[tuple[str, str]] = set()
        self._all = False

    def need(self, places: Iterable[tuple[str, str]]) -> None:
        new = [place for place in dict.fromkeys(places) if place not in self._looked]
        if not new or self._all:
            return
        self._looked.update(new)
        text = "SELECT share, running, turn, limiter FROM tidemill_partition WHERE share IN"
        self._load(self._rows.select_in(text, [f"{name}\x1f{key}" for name, key in new]))

    def need_all(self) -> None:
        if not self._all:
            self._all = True
            text = "SELECT share, running, turn, limiter FROM tidemill_partition"
            self._load(self._rows.execute(text, []))

    def _load(self, rows: Iterable[Sequence[Any]]) -> None:
        for share, running, turn, limiter in rows:
            name, _, key = share.partition("\x1f")
            if (name, key) in self:
                continue
            partition = Partition()
            partition.running, partition.turn = running, turn
            partition.limiter = _limiter.decode(bytes(limiter))
            self[name, key] = partition
            self._before[name, key] = running, turn, bytes(limiter)

    def setdefault(self, place: tuple[str, str], default: Any = None) -> Any:
        if place not in self:
            self.need([place])
        return super().setdefault(place, default)

    def items(self) -> Any:
        self.need_all()
        return super().items()

    def __iter__(self) -> Any:
        self.need_all()
        return super().__iter__()

    def flush(self) -> None:
        """Write the changed partitions, and delete the forgotten partitions."""
        rows, present = [], dict(super().items())
        for place, partition in present.items():
            values = partition.running, partition.turn, _encode(partition.limiter)
            if values != self._before.get(place):
                rows.append(("\x1f".join(place), *values))
                self._before[place] = values
        columns = ("share", "running", "turn", "limiter")
        self._rows.upsert("tidemill_partition", ["share"], columns, rows)
        for place in [place for place in self._before if place not in present]:
            del self._before[place]
            share = "\x1f".join(place)
            self._rows.send("DELETE FROM tidemill_partition WHERE share = %s", [share])
