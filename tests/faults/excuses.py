"""The effects that a server's misfortunes explain, and no others.

A server forgets steps that it had answered when a replica takes over that lags, or when an old
image takes its place. The *lost span* of such a misfortune begins with the first step that may be
forgotten: half a second before the replica was cut off, or the moment of the image. It ends when
the server that had answered is dead. Then, and only then:

    missing    a job may be missing if its put was answered within the lost span
    again      a run may be repeated, although it ended well, if its steps reach into the lost span
    overlap    two runs of a job may overlap if the first was leased within the lost span

Every other misfortune only delays: a verdict of that time is settled some seconds after the
misfortune's end, and its run is repeated only if something was killed before. RabbitMQ alone hands
out anew what was held over a line that breaks, so that each of its misfortunes counts as a kill.

A server that is killed is *away* until it takes connections again. The server may have forgotten
who holds which job, and learns of the runs that ended meanwhile only when it is back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

ALONE = "kills alone"
"""The row of what happened while the server had no misfortune."""

ASYNCHRONOUS = 0.5
"""Seconds that a replica may be behind although nothing keeps it from following."""


class Span(NamedTuple):
    """A time, in seconds of the wall clock."""

    begin: float
    end: float

    def meets(self, begin: float, end: float) -> bool:
        """Whether the two have a moment in common."""
        return self.begin <= end and begin <= self.end


class Blow(NamedTuple):
    """One misfortune that struck.

    ``lost`` is the span whose steps the server may have forgotten. ``redelivers`` says that it may
    have handed out again what was held.
    """

    name: str
    span: Span
    lost: Span | None = None
    redelivers: bool = False


class Put(NamedTuple):
    """One put of a producer: what it said (``accepted``, ``may-fail`` or ``refused``), and when."""

    said: str
    span: Span
    ids: tuple[str, ...]


def read_puts(notes: Iterable[str]) -> list[Put]:
    """The puts that producers noted."""
    puts = []
    for note in notes:
        said, *words = note.split()
        if said in ("accepted", "may-fail", "refused"):
            puts.append(Put(said, Span(float(words[0]), float(words[1])), tuple(words[2:])))
    return puts


@dataclass
class Row:
    """What was seen in the time of one kind of misfortune; seconds are the worst."""

    struck: int = 0
    accepted: int = 0
    refused: int = 0
    lost: int = 0
    again: int = 0
    beyond_patience: float | None = None
    beyond_timeout: float | None = None


@dataclass
class Excuses:
    """What the blows of one storm permit. It counts in ``rows`` what was seen, and when.

    ``away`` says when a server was killed, and when it was back.
    ``settling`` is how many seconds a verdict may take to be settled on a server that is well.
    """

    blows: Sequence[Blow] = ()
    puts: Sequence[Put] = ()
    away: Sequence[Span] = ()
    settling: float = 4.0
    rows: dict[str, Row] = field(default_factory=lambda: defaultdict(Row))

    def __post_init__(self) -> None:
        self._answered = {job_id: put.span for put in self.puts for job_id in put.ids}
        for blow in self.blows:
            self.rows[blow.name].struck += 1
        for put in self.puts:
            row = self.row(put.span.end)
            if put.said == "refused":
                row.refused += 1
            row.accepted += len(put.ids)

    def row(self, moment: float) -> Row:
        """The row of the latest blow that a moment falls into, or follows by some seconds."""
        name = ALONE
        for blow in self.blows:
            if blow.span.begin <= moment <= blow.span.end + self.settling:
                name = blow.name
        return self.rows[name]

    def late_puts(self, patience: float) -> float:
        """Note by how much each put went beyond its patience; the worst."""
        for put in self.puts:
            row, beyond = self.row(put.span.end), put.span.end - put.span.begin - patience
            row.beyond_patience = max(row.beyond_patience or -patience, beyond)
        return max((row.beyond_patience or 0.0 for row in self.rows.values()), default=0.0)

    def late_timeouts(self, ends: Iterable[tuple[float, float]]) -> float:
        """Note when runs were over, and how long after their timeout; the worst."""
        for moment, beyond in ends:
            row = self.row(moment)
            row.beyond_timeout = max(row.beyond_timeout or 0.0, beyond)
        return max((row.beyond_timeout or 0.0 for row in self.rows.values()), default=0.0)

    # -- what is permitted ----------------------------------------------------------------------

    def missing(self, job_id: str) -> bool:
        """Whether a job may be missing that was accepted."""
        put = self._answered.get(job_id)
        for blow in self.blows:
            if put and blow.lost and blow.lost.meets(*put):
                self.rows[blow.name].lost += 1
                return True
        return False

    def forgotten(self, began: float, ended: float) -> bool:
        """Whether the server may have forgotten a step of a run in this time."""
        return any(
            blow.lost.begin - self.settling <= ended and began <= blow.span.end + self.settling
            for blow in self.blows
            if blow.lost
        )

    def again(self, ended: float) -> None:
        """Note that a run was repeated that ended at this moment."""
        self.row(ended).again += 1

    def settled(self, ended: float, settling: float) -> float:
        """The moment at which the verdict of a run that ended must be settled."""
        until = ended + settling
        for blow in self.blows:
            if blow.span.meets(ended, until):
                until = max(until, blow.span.end + settling)
        return until

    def was_away(self, begin: float, end: float) -> bool:
        """Whether a server that was killed was not back for some of this time."""
        return any(span.meets(begin, end) for span in self.away)

    def handed_out_again(self, begin: float, end: float) -> bool:
        """Whether the server may have handed out anew what was held in this time."""
        return any(blow.redelivers and blow.span.meets(begin, end) for blow in self.blows)


def forgets_from(moment: float) -> float:
    """The begin of the lost span of a replica that is cut off at this moment."""
    return moment - ASYNCHRONOUS
