"""Asking a worker for a report: the stacks of its processes, or a profile.

The question is a command that the store passes to the worker. The answer is a note in the store. So
the worker may run on any machine that has the same store.
"""

from __future__ import annotations

import threading
import time
import zlib

import msgspec

from tidemill.brokers.contract.store import Store
from tidemill.brokers.generic.notes import Notes
from tidemill.core.clock import new_id
from tidemill.core.errors import InvalidOption, TidemillError
from tidemill.core.owner import Command, Owner
from tidemill.core.suggest import hint

KIND = "report"
"""The kind of the notes that hold reports."""

PATIENCE = 15.0
"""Seconds after the end of a profile in which the worker must answer."""

LONGEST, MOST_HERTZ = 600.0, 1000.0
"""The most seconds of a profile, and the most samples per second."""

_LOOK_EVERY = 0.1


class Question(msgspec.Struct, frozen=True):
    """A request for a report: ``dump``, or ``profile`` for some seconds."""

    verb: str
    id: str
    seconds: float = 0.0
    hertz: float = 0.0

    @property
    def command(self) -> Command:
        """The question as a command of the store."""
        numbers = f" {self.seconds:g} {self.hertz:g}" if self.verb == "profile" else ""
        return Command(f"{self.verb} {self.id}{numbers}")


def question_of(command: str) -> Question | None:
    """The question in a command; None for another command, or numbers out of their range."""
    try:
        verb, question_id, *numbers = command.split()
        seconds, hertz = map(float, numbers) if verb == "profile" else (0.0, 0.0)
    except ValueError:
        return None
    in_range = 0 < seconds <= LONGEST and 1 <= hertz <= MOST_HERTZ
    if verb == "dump" or (verb == "profile" and in_range):
        return Question(verb, question_id, seconds, hertz)
    return None


class Answer(msgspec.Struct, array_like=True):
    """The answer of one worker process.

    Attributes:
        question: the id of the question.
        pid: the process.
        stacks: the stacks of its threads as text, for a dump.
        profile: collapsed stacks with their samples, for a profile.
        samples: the number of samples of a profile.
    """

    question: str
    pid: int = 0
    stacks: str = ""
    profile: dict[str, int] = {}
    samples: int = 0


class Report(msgspec.Struct, array_like=True):
    """The answers of all processes of a worker; ``silent`` are the processes without an answer."""

    worker: str
    verb: str
    answers: list[Answer] = []
    silent: list[int] = []

    @property
    def stacks(self) -> dict[str, int]:
        """The collapsed stacks of all processes, summed."""
        total: dict[str, int] = {}
        for answer in self.answers:
            for stack, count in answer.profile.items():
                total[stack] = total.get(stack, 0) + count
        return total

    @property
    def samples(self) -> int:
        """The number of samples of all processes together."""
        return sum(answer.samples for answer in self.answers)


def encode_report(report: Report) -> bytes:
    """A report as the bytes of a note."""
    return zlib.compress(msgspec.msgpack.encode(report))


def find_worker(broker: Store, name: str = "") -> Owner:
    """Find a worker by its name or id, or by the beginning of its name or id.

    Without a ``name``, find the only worker.

    Raises:
        InvalidOption: there is no such worker, or several.
    """
    workers = [owner for owner in broker.owners() if owner.kind == "worker"]
    if not workers:
        raise InvalidOption("no worker is alive; start one: tidemill worker MODULE:VAR")
    exact = [owner for owner in workers if name in (owner.name, owner.id)]
    found = exact or [o for o in workers if o.name.startswith(name) or o.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    names = sorted(owner.name for owner in found or workers)
    if not found:
        raise InvalidOption(f"no worker has the name {name!r}; {hint(name, names)}")
    text = (
        f"{len(found)} workers begin with {name!r}" if name else f"there are {len(found)} workers"
    )
    raise InvalidOption(f"{text}; name one of them: {', '.join(names[:10])}")


def ask_worker(
    broker: Store, worker: Owner, verb: str, seconds: float = 0.0, hertz: float = 0.0
) -> Report:
    """Ask a worker for a report, and wait for it.

    Args:
        broker: the store of the worker.
        worker: the worker.
        verb: ``dump`` or ``profile``.
        seconds: the length of a profile.
        hertz: the samples per second of a profile.

    Raises:
        FeatureMissing: the broker cannot bring the answer.
        TidemillError: the worker has ended, or does not answer.
    """
    notes = Notes(broker, KIND, f"the command {verb}")
    question = Question(verb, new_id(), seconds, hertz)
    if not broker.command(worker.id, question.command):
        raise TidemillError(f"worker {worker.name} has ended")
    until = time.monotonic() + seconds + PATIENCE
    pause, looked = threading.Event(), time.monotonic()
    while time.monotonic() < until:
        pause.wait(_LOOK_EVERY)
        if note := notes.get(question.id):
            notes.delete(note)
            return msgspec.msgpack.decode(zlib.decompress(note.body), type=Report)
        if time.monotonic() - looked > 1.0:
            looked = time.monotonic()
            if worker.id not in [owner.id for owner in broker.owners()]:
                raise TidemillError(f"worker {worker.name} ended before it answered")
    raise TidemillError(
        f"worker {worker.name} did not answer within {seconds + PATIENCE:g} s; "
        f"kill -USR1 {worker.pid} on {worker.host} makes it write its stacks to its log"
    )
