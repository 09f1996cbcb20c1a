"""Calls of the contract that only pass their arguments on: one line in the class of a broker."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from tidemill.brokers.contract.broker import Broker, RemoteOwners
from tidemill.brokers.contract.features import Feature, lacks
from tidemill.brokers.contract.inspection import Inspection
from tidemill.brokers.shared.waits import Parked, sleep
from tidemill.core.job import Record

P = ParamSpec("P")
R = TypeVar("R")
Call = Callable[Concatenate[Any, P], R]


def forwarded_to(method: Call[P, R], answer: Callable[..., Any]) -> Call[P, R]:
    """A call with the name and the signature of a method of the contract."""
    # ``answer`` gets the broker, and then the arguments by their names.
    by_name = inspect.Parameter.KEYWORD_ONLY
    _, *parameters = inspect.signature(method).parameters.values()
    places = [parameter.name for parameter in parameters if parameter.kind is not by_name]

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > len(places):
            many = f"{len(places)} positional argument{'s' * (len(places) != 1)}"
            raise TypeError(f"{method.__name__}() takes {many}, and {len(args)} were given")
        answered: R = answer(self, **dict(zip(places, args, strict=False)), **kwargs)
        return answered

    return call


def by(part: str, method: Call[P, R], name: str = "") -> Call[P, R]:
    """A call that a part of the broker answers, under the same name or another."""
    name = name or method.__name__

    def answer(broker: Any, **given: Any) -> Any:
        broker._check_open()
        return getattr(getattr(broker, part), name)(**given)

    return forwarded_to(method, answer)


class StoreCalls:
    """The calls that every broker with a list of owners answers in the same way."""

    url: str
    _owners: Any

    def _check_open(self) -> None:
        """Raise TidemillError when the broker is closed."""
        raise NotImplementedError

    def get_many(self, ids: Sequence[str]) -> list[Record | None]:
        """The records of several jobs, in the order of the ids."""
        raise NotImplementedError

    def parked(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> Parked:
        """Wait as :meth:`wait`, but let the caller sleep."""
        raise NotImplementedError

    attach = by("_owners", Broker.attach)
    detach = by("_owners", Broker.detach)
    release = by("_owners", Broker.release)
    count_silence = by("_owners", RemoteOwners.count_silence)
    owners = by("_owners", Inspection.owners, "listed")

    def wait(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        return sleep(self.parked(owner_id, timeout, fds))

    def wake(self, owner_id: str) -> None:
        self._owners.wake(owner_id)

    def get(self, job_id: str) -> Record | None:
        return self.get_many([job_id])[0]

    def backup(self, target: str) -> None:
        raise lacks(self.url, Feature.BACKUP, "backup")
