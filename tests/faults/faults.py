"""The storm on servers that have misfortunes of their own; what each cost, in one table.

    python -m tests.faults.faults --broker redis --kills 200 --seed 7 --write

While the storm kills, the servers and disks of the broker suffer their misfortunes one after the
other: fail-overs, SIGSTOP, locks, a full disk or memory, cut lines, old images. Afterwards the
storm's checker looks at everything, and :mod:`.excuses` says what a misfortune may have cost. No
put may outlast its ``patience``, and no run its timeout, by more than a second and the slack of a
busy machine. ``--write`` puts the rows of the broker into ``docs/brokers/faults.md``.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from excuses import ALONE, Excuses, Row, read_puts  # noqa: E402
from harness import SLACK, Place, open_place, runs_of  # noqa: E402
from misfortunes import Rig, Series  # noqa: E402
from misfortunes.http import HttpRig  # noqa: E402
from misfortunes.lmdb import LmdbRig  # noqa: E402
from misfortunes.postgresql import PostgresRig  # noqa: E402
from misfortunes.rabbitmq import RabbitRig  # noqa: E402
from misfortunes.redis import RedisRig  # noqa: E402
from storm import Storm  # noqa: E402
from storm_app import TIMEOUT  # noqa: E402

from tidemill.brokers.contract.features import Feature  # noqa: E402

PATIENCE = 3.0
"""Seconds that a put waits: less than most misfortunes last, so that puts are refused."""

PAUSE = 0.3
"""Seconds that a producer rests after a put: what waits is to be done within a minute."""

WORD = 1.0
"""Seconds within which a put keeps to its patience, and a run to its timeout."""

PAGE = _HERE.parent.parent / "docs" / "brokers" / "faults.md"

RIGS: dict[str, type[Rig]] = {
    "redis": RedisRig,
    "postgresql": PostgresRig,
    "lmdb": LmdbRig,
    "rabbitmq": RabbitRig,
    "http": HttpRig,
}


class Outcome(NamedTuple):
    """What a storm came to: the storm's own table, and a row for each misfortune."""

    seen: dict[str, int]
    rows: dict[str, Row]


def faults(
    path: Path,
    broker: str,
    *,
    seed: int,
    kills: int,
    chosen: Collection[str] = (),
    times: int = 1,
    seconds: float = 20.0,
    rest: float = 5.0,
    slack: float = SLACK,
) -> Outcome:
    """One storm in the directory ``path``, with the misfortunes of a broker.

    Raises:
        AssertionError: a law is broken.
    """
    with RIGS[broker](chosen) as rig:
        series = Series(rig.chosen(), random.Random(seed + 1), times, seconds, rest)
        url = rig.url + ("&" if "?" in rig.url else "?") + f"patience={PATIENCE:g}"
        if broker not in ("lmdb", "rabbitmq"):
            url += "&owner_lease=3"
        with open_place(path, url) as place, series:
            storm = Storm(place, seed, servers=rig.servers, series=series, pause=PAUSE)
            seen = storm.run(kills)
            _keep_time(place, storm.excuses, slack)
            return Outcome(seen, dict(storm.excuses.rows))


def _keep_time(place: Place, excuses: Excuses, slack: float) -> None:
    """Puts keep to their patience, and runs to their timeouts, on a machine as busy as this."""
    late = excuses.late_puts(PATIENCE)
    assert late < WORD + slack, f"a put ended {late:.1f} s beyond its patience: {excuses.rows}"
    ends = list(_ends(place))
    for moment, beyond, run in ends:
        if beyond > WORD:
            print(f"{beyond:.1f} s beyond its timeout at {moment:.3f}: {run}")
    late = excuses.late_timeouts((moment, beyond) for moment, beyond, _ in ends)
    assert late < WORD + slack, f"a run ended {late:.1f} s beyond its timeout: {excuses.rows}"


def _ends(place: Place) -> Iterator[tuple[float, float, str]]:
    """When runs were over that went beyond their timeout, by how much, and which."""
    if Feature.INSPECT in place.mill.broker.features:
        for record in place.records():
            for attempt in record.attempts:
                if attempt.error.startswith("JobTimeout"):
                    beyond = attempt.ended - attempt.started - TIMEOUT
                    yield attempt.ended, beyond, f"{record.envelope.id} {attempt}"
        return
    limited = {i for put in read_puts(place.notes()) if put.said == "may-fail" for i in put.ids}
    for job_id, runs in runs_of(place.ledger()).items():
        for begin, end in runs:
            if job_id in limited and end and end.time > begin.time + TIMEOUT:
                yield end.time, end.time - begin.time - TIMEOUT, job_id


# -- the table ------------------------------------------------------------------------------------


HEAD = (
    "| broker | misfortune | struck | accepted | refused | lost | ran twice | leaked "
    "| worst put beyond patience | worst run beyond timeout |"
)


def lines_of(broker: str, rows: dict[str, Row]) -> list[str]:
    """The rows of a broker, those of kills alone last."""
    names = sorted(rows, key=lambda name: (name == ALONE, name))
    return [_line(broker, name, rows[name]) for name in names]


def _line(broker: str, name: str, row: Row) -> str:
    struck = str(row.struck) if name != ALONE else ""
    counts = (row.accepted, row.refused, row.lost, row.again, 0)  # a leak ends the storm
    late = [_late(row.beyond_patience), _late(row.beyond_timeout)]
    cells = [f"`{broker}`", name, struck, *(f"{count:,}" for count in counts), *late]
    return f"| {' | '.join(cells)} |"


def _late(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.1f} s" if seconds > 0 else "none"


def written(page: str, broker: str, lines: list[str]) -> str:
    """The page with the rows of a broker in place of those it had."""
    before, head, rest = page.partition(HEAD + "\n")
    assert head, f"{PAGE} has no table of misfortunes"
    rule, *lines_after = rest.splitlines(keepends=True)
    rows = list(itertools.takewhile(lambda line: line.startswith("| "), lines_after))
    after = lines_after[len(rows) :]
    others = [line for line in rows if not line.startswith(f"| `{broker}` ")]
    table = [*others, *(line + "\n" for line in lines)]
    rows = [line for name in RIGS for line in table if line.startswith(f"| `{name}` ")]
    return "".join([before, head, rule, *rows, *after])


def main() -> int:
    """Run; 1 when a law was broken."""
    options = _options()
    broken = False
    for broker in [options.broker] if options.broker else RIGS:
        print(f"faults: {broker}, seed {options.seed}, {options.kills} kills", flush=True)
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            path = Path(folder) / "p"
            path.mkdir()
            try:
                outcome = faults(
                    path,
                    broker,
                    seed=options.seed,
                    kills=options.kills,
                    chosen=options.only,
                    times=options.times,
                    seconds=options.seconds,
                    slack=0.0,  # nothing else runs beside a storm that is made by hand
                )
            except AssertionError as error:
                print(f"FAILED with seed {options.seed}: {error}", flush=True)
                broken = True
                continue
        for what, count in outcome.seen.items():
            print(f"{count:8d}  {what}")
        lines = lines_of(broker, outcome.rows)
        print("\n".join([HEAD, *lines]))
        print(f"all laws held, in {time.monotonic() - started:.0f} s", flush=True)
        if options.write:
            PAGE.write_text(written(PAGE.read_text(), broker, lines))
    return int(broken)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--broker", choices=list(RIGS), help="all of them when not given")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--only", nargs="*", default=(), help="names of misfortunes")
    parser.add_argument("--times", type=int, default=2, help="how often each strikes")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each lasts")
    parser.add_argument("--write", action="store_true", help=f"write the rows to {PAGE.name}")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
