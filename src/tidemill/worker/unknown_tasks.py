"""The tasks that the processes of a worker know, and the jobs of unknown tasks.

A process answers a job of an unknown task with the verdict ``UNKNOWN``. The store then sets the job
aside: the job waits for a worker that knows the task. To a broker that cannot set jobs aside, the
job goes back with a delay. The replies of the store name the tasks that have jobs set aside. The
supervisor asks for the jobs of those tasks that all its processes know (``Want.knows``).
"""

from __future__ import annotations

import fnmatch

from tidemill.brokers.contract.exchange import Reply
from tidemill.core.clock import clock
from tidemill.core.job import Lease, Outcome, Verdict
from tidemill.worker.child_protocol import Hello
from tidemill.worker.safe_logging import SafeLog

UNKNOWN = int(Outcome.UNKNOWN)
"""A plain int: every verdict is compared with this value, and an int is faster than an enum."""

log = SafeLog("tidemill.worker")

_LOGGED_MOST = 1000
"""The most task names that a worker logs."""

_LONGEST_DELAY = 30.0
"""The most seconds until the next try of a job that the broker cannot set aside."""


class KnownTasks:
    """The tasks a worker knows, and the unknown tasks it has logged.

    ``grace`` is how long a job may be set aside before it fails; None for no limit.
    """

    def __init__(self, grace: float | None) -> None:
        self.names: tuple[str, ...] = ()  # tasks that this worker knows, with jobs set aside
        # The highest number of a name in the replies of the store; -1 to ask for no names.
        self.told = -1
        self._grace = grace
        self._hellos: list[Hello] = []
        self._tasks: frozenset[str] = frozenset()
        self._imports: frozenset[str] = frozenset()
        # Names that ``allow_imports`` allows, but that a process could not import.
        self._refused: set[str] = set()
        self._logged: set[str] = set()

    def begin(self) -> None:
        """From now on, ask for tasks with jobs set aside: the broker can set jobs aside."""
        self.told = 0

    def load(self, hellos: list[Hello]) -> None:
        """Use the tasks that all serving processes know, if the serving processes have changed."""
        if [id(hello) for hello in hellos] == [id(hello) for hello in self._hellos]:
            return
        self._hellos = hellos
        told = hellos or [Hello()]
        self._tasks = frozenset.intersection(*(frozenset(hello.names) for hello in told))
        self._imports = frozenset.intersection(*(frozenset(hello.imports) for hello in told))
        self.forget()

    def forget(self) -> None:
        """Ask for all names again, since the code or the store may have changed."""
        self.names = ()
        self._refused.clear()
        self.told = min(self.told, 0)

    def hear(self, reply: Reply) -> bool:
        """Take in the names in a reply; return True when jobs for this worker are set aside."""
        if not reply.told:
            return False
        self.told = max(self.told, reply.told)
        new = [name for name in reply.unknown if name not in self.names and self._knows(name)]
        self.names += tuple(new)
        return bool(new)

    def _knows(self, name: str) -> bool:
        if name in self._refused:
            return False
        allowed = (fnmatch.fnmatchcase(name, pattern) for pattern in self._imports)
        return name in self._tasks or any(allowed)

    def judge(self, lease: Lease, verdict: Verdict) -> Verdict:
        """Complete a process's verdict on a job of an unknown task."""
        envelope = lease.open()
        self._refused.add(envelope.task)
        if envelope.task in self.names:
            self.names = tuple(name for name in self.names if name != envelope.task)
        self._say(envelope.task, verdict.error)
        now, grace = clock.wall(), self._grace
        age = max(0.0, now - envelope.created)
        if grace is not None and (grace <= 0 or (self.told < 0 and age >= grace)):
            verdict.outcome, verdict.started, verdict.ended = Outcome.FAIL, now, now
        elif self.told >= 0:
            verdict.delay = grace or 0.0
        else:
            verdict.outcome = Outcome.SNOOZE
            left = _LONGEST_DELAY if grace is None else grace - age
            verdict.delay = max(0.05, min(_LONGEST_DELAY, max(1.0, age / 4), left))
        return verdict

    def _say(self, task: str, error: str) -> None:
        """Log an unknown task, once."""
        if task in self._logged or len(self._logged) >= _LOGGED_MOST:
            return
        self._logged.add(task)
        where = "are set aside" if self.told >= 0 else "are tried again later"
        log.warning(
            "%s: this app has %d task(s), and none of that name; does the app import the module "
            "that declares it? Its jobs %s for a worker that knows it",
            error,
            len(self._tasks),
            where,
        )
