"""tidemill side by side with other task queues, in the same run: ``python benchmarks/run.py``.

For each measure and each run every system has its turn (A B C, A B C, …), in a fresh process and on
an empty store, so that what the machine does meanwhile falls on all of them alike.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measures import MEASURES, Options
from processes import Postgres, Redis, private_postgres, private_redis, stop
from rabbitmq import RabbitMQ, private_rabbitmq
from systems import FLOORS, OURS, PEERS, SYSTEMS
from table import Results, lines_for, render

HERE = Path(__file__).resolve().parent
IMPORTS = f"{HERE}{os.pathsep}{HERE.parent / 'src'}"
"""The code measured is that of this checkout, whatever is installed."""

Servers = dict[str, Redis | Postgres | RabbitMQ]
STARTS = {"redis": private_redis, "postgres": private_postgres, "rabbitmq": private_rabbitmq}
GROUPS = {"enqueue": ["single", "bulk", "async", "threads"], "delayed": ["burst", "alone"]}
QUICK = Options(jobs=4_000, seconds=0.7, budget=20, latency_jobs=100, burst=500, alone=40, idle=10)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--peers",
        default=",".join(PEERS),
        help="comma-separated, or none (default: %(default)s)",
    )
    parser.add_argument(
        "--ours",
        default="tidemill,tidemill-redis",
        help="of tidemill itself, or of the bare drivers below it; ratios are those of the first"
        " (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        default="",
        help=f"comma-separated: {', '.join([*GROUPS, *MEASURES])} (default: all)",
    )
    parser.add_argument("--jobs", type=int, help="jobs of the drain (default: 20,000)")
    parser.add_argument(
        "--backlog",
        default="",
        help="further drains of these sizes, such as 100000,1000000",
    )
    parser.add_argument("--runs", type=int, help="runs to take the median of (default: 3)")
    parser.add_argument(
        "--budget", type=float, help="seconds a fill or a drain may take (default: 60)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here")
    parser.add_argument("--quick", action="store_true", help="one small run, to see that it works")
    parser.add_argument("--tmp", type=Path, help="a folder on the disk to measure")
    chosen = parser.parse_args()
    chosen.peers = [] if chosen.peers == "none" else [p for p in chosen.peers.split(",") if p]
    for name in chosen.peers:
        if name not in PEERS:
            parser.error(f"unknown peer {name!r}; there are {', '.join(PEERS)}")
    chosen.ours = [name for name in chosen.ours.split(",") if name]
    for name in chosen.ours:
        if name not in OURS:
            parser.error(f"unknown {name!r}; there are {', '.join(OURS)}")
    wanted = [name for name in chosen.only.split(",") if name]
    chosen.measures = [m for name in wanted for m in GROUPS.get(name, [name])] or list(MEASURES)
    for name in chosen.measures:
        if name not in MEASURES:
            parser.error(f"unknown measure {name!r}; there are {', '.join([*GROUPS, *MEASURES])}")
    try:
        chosen.backlog = [int(size) for size in chosen.backlog.split(",") if size]
    except ValueError:
        parser.error(f"--backlog wants numbers of jobs, not {chosen.backlog!r}")
    chosen.runs = chosen.runs or (1 if chosen.quick else 3)
    given = {"jobs": chosen.jobs, "budget": chosen.budget}
    basis = QUICK if chosen.quick else Options()
    chosen.options = basis._replace(**{name: value for name, value in given.items() if value})
    return chosen


def say(text: str) -> None:
    """Progress goes to stderr, the table to stdout."""
    print(text, file=sys.stderr, flush=True)


def peers_python() -> str:
    """The interpreter of benchmarks/.venv, installed anew when the requirements have changed."""
    requirements = HERE / "requirements.txt"
    python = HERE / ".venv" / "bin" / "python"
    state = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()
    stamp = HERE / ".venv" / "installed"
    if not stamp.exists() or stamp.read_text() != state:
        say("installing the peers into benchmarks/.venv …")
        subprocess.run(
            [sys.executable, "-m", "venv", "--clear", HERE / ".venv"], check=True, timeout=120
        )
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-r", requirements], check=True, timeout=900)
        stamp.write_text(state)
    return str(python)


def has_tidemill() -> bool:
    """Whether this interpreter can import it; says why if not."""
    check = [sys.executable, "-c", "from tidemill import Tidemill"]
    environment = os.environ | {"PYTHONPATH": IMPORTS}
    tried = subprocess.run(check, capture_output=True, text=True, timeout=60, env=environment)
    if tried.returncode:
        say(f"measuring the peers alone: {tried.stderr.strip().splitlines()[-1]}")
    return tried.returncode == 0


def measure(
    python: str, name: str, what: str, options: Options, servers: Servers, tmp: Path
) -> dict[str, Any]:
    """One turn of one system: its figures, ``unsupported`` or ``error``."""
    with tempfile.TemporaryDirectory(dir=tmp, ignore_cleanup_errors=True) as folder:
        environment = os.environ | {
            "BENCH_TMP": folder,
            "BENCH_CAPACITY": str(options.jobs + options.burst + 50_000),
            "PYTHONPATH": IMPORTS,
            # FlexiQ starts its children by the name "python".
            "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
        }
        environment.pop("TIDEMILL_URL", None)
        for kind, server in servers.items():
            if getattr(SYSTEMS[name], kind):
                server.flush()
                environment[f"BENCH_{kind.upper()}_URL"] = server.url
                environment["BENCH_SERVER_PID"] = str(server.pid)
        log = Path(folder) / "driver.log"
        with log.open("wb") as output:
            driver = subprocess.Popen(
                [python, HERE / "driver.py", name, what, json.dumps(options._asdict())],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        limit = 180 + 2 * options.budget + options.seconds + options.idle
        try:
            driver.wait(limit)
            answer = json.loads((Path(folder) / "result.json").read_text())
        except subprocess.TimeoutExpired:
            answer = {"error": f"not done after {limit:.0f} s"}
        except (OSError, ValueError):
            answer = {"error": f"the driver ended with code {driver.returncode}"}
        finally:
            stop([driver], grace=10)
        if "error" in answer:
            for path in [log, *sorted(Path(folder).glob("worker-*.log"))]:
                for line in path.read_text(errors="replace").splitlines()[-8:]:
                    say(f"    {path.name}: {line}")
        return answer


def turns(
    chosen: argparse.Namespace, systems: list[str]
) -> list[tuple[str, str, int, str, Options]]:
    """(label, measure, run, system, options) in the order of the work: A B C, A B C, …"""
    plan = []
    for what in chosen.measures:
        sizes = [chosen.options.jobs]
        if what == "drain":
            sizes += chosen.backlog
        for size in sizes:
            options = chosen.options._replace(jobs=size)
            label = f"drain {size}" if what == "drain" else what
            # Idling long enough is its own average.
            for run in range(1 if what == "idle" else chosen.runs):
                plan += [(label, what, run, name, options) for name in systems]
                if what == "single":
                    floors = {FLOORS[name] for name in systems if name in FLOORS} - {*systems}
                    plan += [(label, what, run, name, options) for name in floors]
    return plan


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    return {
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
        "when": time.strftime("%Y-%m-%d %H:%M"),
    }


def run(chosen: argparse.Namespace, systems: list[str], pythons: dict[str, str]) -> Results:
    """Do all turns; an interrupt ends with what there is."""
    results = Results()
    with contextlib.ExitStack() as stack:
        tmp = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-", dir=chosen.tmp))
        )
        servers: Servers = {}
        for kind, start in STARTS.items():
            if not any(getattr(SYSTEMS[name], kind) for name in systems):
                continue
            server = stack.enter_context(start(tmp))
            if server is None:
                say(f"no {kind} is installed: leaving out the systems that need it")
                systems[:] = [name for name in systems if not getattr(SYSTEMS[name], kind)]
            else:
                servers[kind] = server
        plan = turns(chosen, systems)
        try:
            for number, (label, what, turn, name, options) in enumerate(plan, 1):
                answer = measure(pythons[name], name, what, options, servers, tmp)
                results.add(label, name, turn, answer)
                figures = answer.get("values") or answer.get("error") or "not offered"
                if isinstance(figures, dict):
                    figures = " ".join(f"{key} {value:,.5g}" for key, value in figures.items())
                say(f"[{number}/{len(plan)}] {label} {name}: {figures}")
        except KeyboardInterrupt:
            say("interrupted; this is what there is")
    return results


def main() -> None:
    """Measure and print."""
    # A polite kill is an interrupt too, so that every finally clause runs.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    chosen = arguments()
    pythons = dict.fromkeys(OURS, sys.executable)
    if chosen.peers:
        pythons |= dict.fromkeys(chosen.peers, peers_python())
    systems = list(chosen.peers)
    if has_tidemill():
        systems[:0] = chosen.ours
    before = machine()
    results = run(chosen, systems, pythons)
    drains = [chosen.options.jobs, *chosen.backlog]
    print(f"{before['when']}, {before['cores']} cores, Python {before['python']}, ", end="")
    print(f"load {before['load']} at the start, medians of {chosen.runs}")
    print(f"(nx): {systems[0]} is n times better than that column\n")
    print(render(results, systems, lines_for(drains, chosen.options.burst)))
    print()
    for name in systems:
        print(f"{name} {results.versions.get(name, '?')}: {SYSTEMS[name].set_up}")
    if chosen.json:
        report = {"machine": before, "options": chosen.options._asdict(), **results.as_json()}
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
