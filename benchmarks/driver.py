"""One measurement of one system, in a process and an interpreter of its own.

``run.py`` starts it as ``python driver.py SYSTEM MEASURE OPTIONS`` with the folder in
``$BENCH_TMP`` and reads the answer from ``result.json`` there.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from measures import MEASURES, Options, Unsupported
from systems import SYSTEMS


def measure(name: str, measure: str, options: Options) -> dict[str, Any]:
    """Set the system up, measure, close it."""
    known = SYSTEMS[name]
    answer: dict[str, Any] = {"version": importlib.metadata.version(known.package)}
    system = importlib.import_module(known.module(name))
    system.setup(os.environ["BENCH_TMP"])
    try:
        return answer | {"values": MEASURES[measure](system, options)}
    except Unsupported as what:
        return answer | {"unsupported": str(what)}
    finally:
        system.stop()


def main() -> None:
    """Write the answer, or the error, as JSON."""
    # A polite kill runs the finally clauses that end the workers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    name, what, options = sys.argv[1:]
    try:
        answer = measure(name, what, Options(**json.loads(options)))
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    Path(os.environ["BENCH_TMP"], "result.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
    # Not every system ends its threads and event loops cleanly; nothing is left to be done.
    sys.stdout.flush()
    os._exit(0)
