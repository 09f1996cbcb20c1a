"""The broker seam: what a store must do, and nothing of how.

Small, synchronous, thread-safe. Every call is one atomic step: killed in the middle, it happened
wholly or not at all. Batches everywhere. A broker keeps the laws it claims in ``features``; what it
lacks is refused by name where the option is used.

The conversation of an owner is ``attach``, then ``exchange`` and ``wait`` in turn: an exchange
hands in verdicts and takes leases and never sleeps; a wait sleeps until the next due time, a hint,
or a descriptor of the caller's. Hints may lie, the store is the truth: whoever wakes exchanges
again.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import msgspec

from tidemill.config import Url, parse_url
from tidemill.errors import FeatureMissing, InvalidOption
from tidemill.job import Command, Envelope, Lease, Note, Owner, Put, Record, State, Verdict

__all__ = [
    "DEFAULT_TTR",
    "KEEP_ATTEMPTS",
    "Broker",
    "Feature",
    "Filter",
    "Mode",
    "Page",
    "QueueStats",
    "Reply",
    "Retention",
    "Step",
    "Want",
    "matches",
    "need",
    "number_option",
    "open_broker",
    "register_scheme",
]

DEFAULT_TTR = 60.0
"""Seconds a consumer has for a message that was put without ``ttr``."""


KEEP_ATTEMPTS = 20
"""Attempts a trail shows at most: the latest. The count goes on."""


class Feature(enum.StrEnum):
    """What a broker may be able to do beyond put, lease and settle."""

    DURABLE = "durable"  # survives kill -9 of everything
    PROCESSES = "processes"  # several processes may share it
    DELAY = "delay"
    PRIORITY = "priority"
    KEYS = "keys"
    RESULTS = "results"
    INSPECT = "inspect"
    CANCEL = "cancel"
    PAUSE = "pause"
    MAX_SIZE = "max_size"
    MERGED = "merged"  # Mode.MERGED: one order across queues
    TRANSACTIONS = "transactions"  # txn=
    BACKUP = "backup"


class Mode(enum.StrEnum):
    """In what order a want takes from several queues."""

    FAIR = "fair"  # every queue gets its turn
    STRICT = "strict"  # the first is emptied before the second
    MERGED = "merged"  # priority and age across all as if they were one


class Want(msgspec.Struct, frozen=True):
    """How many jobs an owner can take, of which queues. No queues means all.

    ``tasks`` and ``messages`` say which kinds: a worker never takes raw messages, nor a consumer
    tasks, unless it asks for them. Without ``sleep`` the owner does not mean to wait when nothing
    is there, and is not hinted.
    """

    count: int
    queues: tuple[str, ...] = ()
    mode: Mode = Mode.FAIR
    tasks: bool = True
    messages: bool = False
    sleep: bool = True


class Step(msgspec.Struct):
    """One exchange: what an owner hands in and what it wants.

    ``touch`` renews message leases: (token, seconds), 0 for the message's own ttr.
    """

    owner: str
    verdicts: Sequence[Verdict] = ()
    want: Want | None = None
    touch: Sequence[tuple[int, float]] = ()
    notes: Sequence[Note] = ()


class Reply(msgspec.Struct):
    """What an exchange did.

    ``settled`` and ``touched`` answer in order; False means the lease was lost and nothing changed.
    ``next_due`` is seconds until something in the store becomes due; infinity when nothing will.
    """

    settled: list[bool] = []
    touched: list[bool] = []
    leases: list[Lease] = []
    commands: list[Command] = []
    next_due: float = float("inf")


class QueueStats(msgspec.Struct, kw_only=True):
    """One queue in numbers. Totals count since the store was made."""

    name: str
    waiting: int = 0
    scheduled: int = 0
    ready: int = 0
    running: int = 0
    paused: bool = False
    max_size: int = 0
    accepted: int = 0
    succeeded: int = 0
    failed: int = 0
    retried: int = 0
    cancelled: int = 0
    expired: int = 0
    oldest: float = 0.0

    @property
    def size(self) -> int:
        """Unfinished jobs: waiting, scheduled, ready and running."""
        return self.waiting + self.scheduled + self.ready + self.running


class Filter(msgspec.Struct, kw_only=True, frozen=True):
    """Which jobs to look at; every condition given must hold."""

    states: frozenset[State] = frozenset()
    queue: str = ""
    task: str = ""
    key: str = ""
    tag: str = ""
    text: str = ""


class Page(msgspec.Struct):
    """Some records, newest first, and where to go on; an empty cursor means there are no more.

    Newest first holds for ids made by tidemill; a store may sort by id, so that a user's own ids
    come in descending order instead.
    """

    records: list[Record]
    cursor: str = ""


class Broker(Protocol):
    """A store of jobs."""

    url: str
    features: frozenset[Feature]

    @property
    def boards(self) -> str:
        """A folder on this machine where an owner's board may lie.

        Empty when the broker has none: the worker then uses a temporary one.
        """
        ...

    # -- producing ------------------------------------------------------------------------------

    def put(self, jobs: Sequence[Envelope], *, txn: Any = None) -> list[Put]:
        """Accept jobs, all or none, in order.

        When it returns they are kept (law 1); with ``txn`` they exist if and only if the caller's
        transaction commits.

        Raises:
            DuplicateJob, QueueFull, StoreFull: nothing was stored.
        """
        ...

    # -- owning ---------------------------------------------------------------------------------

    def attach(self, owner: Owner) -> None:
        """Make an owner known, and alive until it detaches or its process dies."""
        ...

    def detach(self, owner_id: str) -> None:
        """Take an owner off the list; what it still holds goes back uncounted."""
        ...

    def exchange(self, step: Step) -> Reply:
        """Note, settle, touch and lease, in that order, as one step. Never sleeps.

        What has come due moves first. An owner that was given up (``release``) meanwhile has lost
        everything: it gets no leases, and the command ``stop``. Followers of a verdict are stored
        whatever ``max_size`` or the reserve say, since settling must not fail; one whose id is
        taken, or whose key rejects it, is left out.
        """
        ...

    def wait(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        """Sleep until a hint, a readable descriptor or the timeout; returns the readable ones.

        Returns at once if anything of interest happened since the owner's last exchange. The
        timeout should not be beyond that exchange's ``next_due``. Exchange once more after the last
        wait: a hint not followed up is a job not taken.
        """
        ...

    def wake(self, owner_id: str) -> None:
        """Make the owner's wait return, from any thread."""
        ...

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        """Give back all that a dead owner held; returns how many jobs that were.

        ``causes`` is a witness's account: a token in it was running and used an attempt, with the
        cause as its error; the others go back uncounted. None means there was no witness: every job
        gets a loss instead. The owner is off the list afterwards.
        """
        ...

    def tick(self) -> float:
        """Reap dead owners and prune; seconds until it matters again."""
        ...

    # -- waiting for jobs -----------------------------------------------------------------------

    def wait_for(self, ids: Sequence[str], timeout: float) -> list[Record | None]:
        """Sleep until all the jobs have finished or the time is over; the records as they stand.

        None stands for an id the store does not have.
        """
        ...

    def wait_space(self, queue: str, timeout: float) -> bool:
        """Sleep until the queue is below its ``max_size``; False when the time is over."""
        ...

    # -- inspecting -----------------------------------------------------------------------------

    def get(self, job_id: str) -> Record | None:
        """The record of a job, or None."""
        ...

    def was_here(self, job_id: str) -> bool:
        """True when an id the store does not have could be one it pruned: an own id, made since."""
        ...

    def find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        """Records that match, newest first."""
        ...

    def stats(self) -> list[QueueStats]:
        """Every queue in numbers, by name."""
        ...

    def owners(self) -> list[Owner]:
        """The owners attached now."""
        ...

    def info(self) -> dict[str, Any]:
        """Facts about the store for ``tidemill info`` and ``doctor``."""
        ...

    # -- acting ---------------------------------------------------------------------------------

    def cancel(self, job_ids: Iterable[str], *, terminate: bool = False) -> list[bool]:
        """Cancel: an unfinished job at once, a running one through its owner. False: too late."""
        ...

    def kick(self, job_ids: Iterable[str]) -> list[bool]:
        """Make failed, cancelled, expired or scheduled jobs ready, with fresh attempts."""
        ...

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        """Forget jobs in any state; a running one loses its lease."""
        ...

    def set_queue(
        self, queue: str, *, paused: bool | None = None, max_size: int | None = None
    ) -> None:
        """Change a queue's settings; None leaves one as it is."""
        ...

    def purge(self, queue: str) -> int:
        """Delete everything in the queue that is not running or finished; returns how many."""
        ...

    def command(self, owner_id: str, command: Command) -> bool:
        """Tell an owner something; False when it is not there."""
        ...

    def backup(self, target: str) -> None:
        """Copy the whole store to a new place while it is in use."""
        ...

    def close(self) -> None:
        """Give up everything this object holds. Idempotent."""
        ...


def need(broker: Broker, feature: Feature, option: str) -> None:
    """Refuse an option whose feature the broker lacks, naming both.

    Raises:
        FeatureMissing: it does.
    """
    if feature not in broker.features:
        scheme = broker.url.split("://", 1)[0]
        raise FeatureMissing(
            f"{option} needs the feature {feature!s}, which {scheme}:// does not have"
        )


_SCHEMES: dict[str, str | Callable[[Url], Broker]] = {
    "memory": "tidemill.brokers.memory",
    "lmdb": "tidemill.brokers.lmdb",
}
_EXTRAS = {"redis": "redis", "psycopg": "postgres", "psycopg_pool": "postgres", "pika": "rabbitmq"}


def register_scheme(scheme: str, opener: str | Callable[[Url], Broker]) -> None:
    """Teach ``open_broker`` a scheme: a function, or a module that has one named ``open_url``."""
    _SCHEMES[scheme] = opener


def open_broker(text: str) -> Broker:
    """Open the broker a URL names. Drivers are imported only now.

    Raises:
        InvalidOption: no broker has the scheme, or an option in the URL is wrong.
        FeatureMissing: the driver is not installed; the sentence names the extra to install.
        BrokerUnavailable: the store cannot be opened.
    """
    url = parse_url(text)
    opener = _SCHEMES.get(url.scheme)
    if opener is None:
        raise InvalidOption(
            f"no broker for {url.scheme}:// in url {text!r}; known are "
            + ", ".join(f"{name}://" for name in sorted(_SCHEMES))
        )
    if isinstance(opener, str):
        try:
            opener = cast("Callable[[Url], Broker]", importlib.import_module(opener).open_url)
        except ModuleNotFoundError as error:
            extra = _EXTRAS.get(error.name or "")
            if extra is None:
                raise
            raise FeatureMissing(
                f"{url.scheme}:// needs {error.name}; install it: pip install 'tidemill[{extra}]'"
            ) from error
    return opener(url)


class Retention(msgspec.Struct, frozen=True):
    """How long finished jobs are kept: by time, and the succeeded ones also by number.

    By number, jobs without a result go first, then the oldest results. A result other than None is
    never pruned before ``protect`` seconds, so that whoever asked for it can fetch it however busy
    the store is; only the job's own ``result_ttl`` may say less.
    """

    succeeded: float = 3600.0
    count: int = 100_000
    failed: float = 30 * 86400.0
    protect: float = 60.0

    def of_success(self, result_ttl: float, has_result: bool) -> float:
        """Seconds that a succeeded job is kept; a negative ``result_ttl`` means none was given."""
        if result_ttl >= 0:
            return result_ttl
        return max(self.succeeded, self.protect) if has_result else self.succeeded

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Retention:
        """From the ``keep``, ``keep_count`` and ``keep_failed`` of a URL."""
        default = cls()
        return cls(
            succeeded=number_option(options, "keep", default.succeeded),
            count=int(number_option(options, "keep_count", default.count)),
            failed=number_option(options, "keep_failed", default.failed),
        )


def number_option(options: Mapping[str, str], name: str, default: float) -> float:
    """A non-negative number among a URL's options."""
    text = options.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise InvalidOption(f"{name} in the url must be a number of 0 or more, not {text!r}")
    return value


def matches(record: Record, what: Filter) -> bool:
    """True when every condition given holds."""
    e = record.envelope
    return (
        (not what.states or record.state in what.states)
        and (not what.queue or e.queue == what.queue)
        and (not what.task or e.task == what.task)
        and (not what.key or e.key == what.key)
        and (not what.tag or what.tag in e.tags)
        and (not what.text or what.text.lower() in e.text.lower())
    )
