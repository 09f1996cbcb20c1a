"""Fuzzes the job server: no request makes it fail or lose a job (case W2).

    python -m tests.faults.fuzz --seed 7 --seconds 600

schemathesis sends requests inside and outside of the API's own description: boundaries of every
field, random requests, and chains in which one call uses the answer of another. No answer may be a
500 or be missing from the description. Afterwards the server is killed. Every job whose put was
confirmed must be in the store, except jobs that the run itself removed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from servers.http import JobServer  # noqa: E402

from tidemill import Tidemill  # noqa: E402

PHASES = "coverage,fuzzing,stateful"
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_headers_conformance", "response_schema_conformance", "unsupported_method"),
    *("negative_data_rejection", "positive_data_acceptance"),
    *("missing_required_header", "allow_header_conformance"),
)
"""All checks but those that follow a name through calls, since the hooks replace names."""

SETTINGS = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "404", "409", "410", "429"]
"""
"""The server serves every request that the description allows. It may also answer that a name does
not exist (404), that there is a conflict (409), that a job is no longer kept (410), or that a queue
is full (429)."""

DELETED = ("DELETE", "/v1/queues/{queue}")
NEW = ("created", "replaced", "successor")
ENDLESS = "/v1/events"


def fuzz(*options: str, seed: int) -> dict[str, int]:
    """One run of schemathesis with these options, against a new server; counts of what it did.

    Raises:
        AssertionError: a law is broken; the message has the output of schemathesis.
    """
    server = JobServer("--quiet", "--longest-poll", "0.05")
    try:
        notes = server.path / "notes"
        notes.write_text("".join(f"{json.dumps(call)}\n" for call in _begin(server)))
        _run(server, notes, [*options, "--seed", str(seed)])
        assert "Traceback" not in server.output, server.output[-6000:]
        assert server.get("/health").status == 200
        server.kill()
        calls = [json.loads(line) for line in notes.read_text().splitlines()]
        return _count(calls, server.where)
    finally:
        server.close()


def _begin(server: JobServer) -> Iterator[dict[str, Any]]:
    """A finding, with the calls that led to it."""
    jobs: list[dict[str, Any]] = [
        {"task": "math.sqrt", "queue": "a", "args": [n]} for n in range(30)
    ]
    jobs += [{"queue": queue, "body": n, "ttr": 3600} for n in range(30) for queue in ("a", "b")]
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", "/v1/jobs/batch", {"jobs": jobs}),
        ("POST", "/v1/reserve", {"queues": ["a"], "count": 10}),
        ("POST", "/v1/tasks/reserve", {"tasks": ["math.sqrt"], "queues": ["a"], "count": 10}),
        ("PUT", "/v1/schedules/{name}", {"task": "math.sqrt", "queue": "a", "every": 3600}),
    ]
    for method, path, body in asked:
        answer = server.request(method, path.replace("{name}", "a"), body)
        assert answer.status in (200, 201), answer
        call = {"method": method, "path": path, "names": {"name": "a"}, "body": body}
        yield call | {"status": answer.status, "answer": answer.json}


def _run(server: JobServer, notes: Path, options: list[str]) -> None:
    settings = server.path / "schemathesis.toml"
    settings.write_text(SETTINGS)
    command = [str(Path(sys.executable).parent / "st"), "--config-file", str(settings)]
    command += ["run", f"{server.url}/v1/openapi.json"]
    command += ["-c", ",".join(CHECKS), "--exclude-path", ENDLESS, "--warnings", "off"]
    environment = os.environ | {
        "SCHEMATHESIS_HOOKS": "fuzz_hooks",
        "PYTHONPATH": str(_HERE),
        "FUZZ_NOTES": str(notes),
    }
    done = subprocess.run(
        [*command, "--no-color", *options],
        cwd=server.path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


# -- what became of the jobs ----------------------------------------------------------------------


def _count(calls: list[dict[str, Any]], where: str) -> dict[str, int]:
    """Check that every expected job is in the store."""
    there: dict[str, str] = {}  # the queue of each that was put, where it was said
    held: dict[str, str] = {}  # the job of each receipt
    seen = {"calls": len(calls), "jobs put": 0, "jobs taken away": 0}
    for call in calls:
        if call["status"] not in (200, 201, 204):
            continue
        for job_id, queue in _put(call):
            there[job_id] = queue
            seen["jobs put"] += 1
        for job_id in list(_taken_away(call, there, held)):
            seen["jobs taken away"] += there.pop(job_id, None) is not None
    with Tidemill(where) as mill:
        lost = [job_id for job_id in there if mill.broker.get(job_id) is None]
    told = {job_id: [c for c in calls if job_id in json.dumps(c)] for job_id in lost[:3]}
    assert not lost, f"{len(lost)} jobs are lost: {json.dumps(told)[:6000]}"
    return seen | {"jobs there": len(there)}


def _put(call: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The ids of the jobs that a call has put, with their queues if known."""
    names, body, answer = call["names"] or {}, call["body"], call["answer"]
    if call["path"] == "/v1/jobs/batch":
        bodies, answers = body["jobs"], answer["jobs"]
    else:
        bodies, answers = [body], [answer]
    for given, placed in zip(bodies, answers, strict=True):
        # One that was kept, or that another went into, was put before; it may have ended since.
        if isinstance(placed, dict) and placed.get("placed") in NEW:
            queue = given.get("queue") if isinstance(given, dict) else None
            by_schedule = call["path"].startswith("/v1/schedules/")
            yield placed["id"], names.get("queue") or queue or ("" if by_schedule else "default")


def _taken_away(call: dict[str, Any], there: dict[str, str], held: dict[str, str]) -> Iterator[str]:
    """The jobs that a call has removed, or may have removed."""
    names, body, answer, path = call["names"] or {}, call["body"], call["answer"], call["path"]
    if path in ("/v1/reserve", "/v1/tasks/reserve"):
        for job in answer["jobs"]:
            held[job["receipt"]] = job["id"]
            if job["ttr"] is None:  # gone when it is taken
                yield job["id"]
    elif path in ("/v1/reservations/{receipt}/ack", "/v1/reservations/{receipt}/complete"):
        # A task that is done is kept for its result_ttl, which may be 0.
        yield held.get(names["receipt"], "")
    elif path in ("/v1/ack", "/v1/complete"):
        receipts = body.get("receipts") or [one["receipt"] for one in body.get("results", ())]
        yield from (
            held.get(r, "") for r, done in zip(receipts, answer["done"], strict=True) if done
        )
    elif call["method"] == "DELETE" and path == "/v1/jobs/{job_id}":
        yield names["job_id"]
    elif path == "/v1/jobs/delete":
        yield from (id for id, done in zip(body["ids"], answer["done"], strict=True) if done)
    elif path == "/v1/matching/delete":
        yield from (id for id, done in zip(answer["ids"], answer["done"], strict=True) if done)
    elif path == "/v1/queues/{queue}/purge" or (call["method"], path) == DELETED:
        # Where no queue was said it is not known here.
        yield from (id for id, queue in there.items() if queue in ("", names["queue"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--seconds", type=int, default=600)
    options = parser.parse_args()
    print(f"fuzz: seed {options.seed}, {options.seconds} s", flush=True)
    begun = time.monotonic()
    try:
        more = ("--phases", PHASES, "--max-time", str(options.seconds))
        seen = fuzz(*more, seed=options.seed)
    except AssertionError as error:
        print(f"FAILED with seed {options.seed}: {error}")
        return 1
    for what, count in seen.items():
        print(f"{count:8d}  {what}")
    print(f"no mistake, and nothing lost, in {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
