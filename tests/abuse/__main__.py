"""All misdeeds in all pools; writes ``docs/misdeeds.md``.

python -m tests.abuse [--only NAME …] [--pool POOL] [--jobs 4] [--within 2] [--write]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from abuse.catalogue import Misdeed, catalogue
from abuse.rig import CELLS, WITHIN, Outcome, one_cell, try_misdeed
from abuse.table import PAGE, Results, page


def main() -> int:
    """Run; 1 when a promise was broken."""
    options = _options()
    entries = catalogue()
    chosen = [entries[name] for name in options.only] if options.only else [*entries.values()]
    cells = [
        (entry, pool, slots)
        for entry in chosen
        for pool, slots in CELLS
        if pool in entry.ends and pool.startswith(options.pool)
        if not options.quick or (pool, slots) == one_cell(entry)
    ]
    results: Results = {}
    broken = 0
    with ThreadPoolExecutor(options.jobs) as pool_of_rigs:
        asked = [(cell, pool_of_rigs.submit(_try, *cell, options.within)) for cell in cells]
        for (entry, pool, slots), future in asked:
            outcome = results[entry.name, pool, slots] = future.result()
            broken += bool(outcome.problems)
            _tell(entry, pool, slots, outcome, options.verbose)
            if options.write:  # now and then: a run takes long
                PAGE.write_text(page(results, options.jobs))
    print(f"{len(cells)} tried, {broken} broke a promise")
    return bool(broken)


def _try(entry: Misdeed, pool: str, slots: int, within: float) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="abuse-") as folder:
        return try_misdeed(entry, pool, slots, Path(folder) / "cell", within)


def _tell(entry: Misdeed, pool: str, slots: int, outcome: Outcome, verbose: bool) -> None:
    moment = time.strftime("%H:%M:%S")
    said = "; ".join(outcome.problems) or "as promised"
    print(
        f"{moment} {entry.name} [{pool} x {slots}] {outcome.job[:80]!r}: {said[:1500]}", flush=True
    )
    if verbose and outcome.problems:
        print(outcome.output[-6000:])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="All misdeeds in all pools.")
    parser.add_argument("--only", nargs="*", help="names of misdeeds")
    parser.add_argument("--pool", default="", help="the beginning of a pool's name")
    parser.add_argument("--quick", action="store_true", help="one pool for each misdeed, in turn")
    parser.add_argument("--jobs", type=int, default=4, help="rigs at a time")
    parser.add_argument("--within", type=float, default=WITHIN, help="seconds for the next job")
    parser.add_argument("--write", action="store_true", help="write docs/misdeeds.md")
    parser.add_argument("--verbose", action="store_true", help="print outputs of workers")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
