"""What happens to servers and disks in a storm, beside its kills: one class for each misfortune.

A :class:`Rig` is the servers of one broker, the URL of a store there, and the misfortunes that they
can have. A :class:`Series` strikes with them one after the other, in a thread of its own. What each
may cost, :mod:`excuses` says.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Collection, Sequence

from excuses import Blow, Span
from servers import Server

__all__ = ["Misfortune", "Rig", "Series"]


class Misfortune:
    """One kind of misfortune.

    Attributes:
        name: how the table calls it.
        redelivers: the server hands out again what was held over a line that breaks.
    """

    name = ""
    redelivers = False

    def strike(self, seconds: float) -> Span | None:
        """Happen, and last for some seconds; the lost span, if the server forgets steps."""
        raise NotImplementedError


class Rig(contextlib.ExitStack):
    """The servers of one broker, for the time of a block.

    Args:
        chosen: names of the misfortunes to prepare for; all of them when there is none.

    Attributes:
        servers: those that a storm may kill, at this moment.
        url: of a store, without the options of the storm.
        misfortunes: what may happen to it.
    """

    def __init__(self, chosen: Collection[str] = ()) -> None:
        super().__init__()
        self.servers: list[Server] = []
        self.url = ""
        self.misfortunes: list[Misfortune] = []
        self._chosen = chosen

    def wants(self, name: str) -> bool:
        """Whether a misfortune of that name is to strike."""
        return not self._chosen or name in self._chosen

    def chosen(self) -> list[Misfortune]:
        """The misfortunes that are to strike.

        Raises:
            ValueError: the broker has no misfortune of a name.
        """
        names = [misfortune.name for misfortune in self.misfortunes]
        if unknown := set(self._chosen) - set(names):
            raise ValueError(f"no misfortune {sorted(unknown)}; there are {names}")
        return [misfortune for misfortune in self.misfortunes if self.wants(misfortune.name)]


class Series:
    """Misfortunes one after the other, in a thread that lives for the time of a block.

    The kernel kills a server with the thread that started it, so the thread stays until the block
    ends.

    Args:
        misfortunes: each of them strikes, in an order drawn from ``rng``.
        times: how often each strikes.
        seconds: how long each lasts.
        rest: seconds of peace before each, at most.
    """

    def __init__(
        self,
        misfortunes: Sequence[Misfortune] = (),
        rng: random.Random | None = None,
        times: int = 1,
        seconds: float = 20.0,
        rest: float = 5.0,
    ) -> None:
        self.blows: list[Blow] = []
        self.servers_at_rest = threading.Lock()  # held by whoever kills a server, or strikes
        self._rng = rng or random.Random()
        self._left = [one for _ in range(times) for one in misfortunes]
        self._rng.shuffle(self._left)
        self._seconds, self._rest = seconds, rest
        self._begun, self._ended, self._stop = (threading.Event() for _ in range(3))
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="misfortunes")
        self.length = len(self._left) * (seconds + rest)

    def __enter__(self) -> Series:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._begun.set()
        self._thread.join()

    def begin(self) -> None:
        """Strike from now on."""
        self._begun.set()

    def over(self) -> bool:
        """Whether all have struck.

        Raises:
            Exception: one could not be brought about, or not be ended.
        """
        if self._error is not None:
            raise self._error
        return not self._left or self._ended.is_set()

    def _run(self) -> None:
        self._begun.wait()
        try:
            for misfortune in self._left:
                if self._stop.wait(self._rng.uniform(self._rest / 2, self._rest)):
                    return
                self._strike(misfortune)
        except Exception as error:
            self._error = error
        self._ended.set()
        self._stop.wait()

    def _strike(self, misfortune: Misfortune) -> None:
        with self.servers_at_rest:
            began = time.time()
            lost = misfortune.strike(self._seconds)
            span = Span(began, time.time())
        blow = Blow(misfortune.name, span, lost, misfortune.redelivers)
        self.blows.append(blow)
