"""Breaks of the product, each with tests of ``make test`` that must notice it.

A test that cannot fail proves nothing. ``make breaks`` copies ``src``, breaks one place of the
copy, runs the tests named here against the copy, and demands that they fail. Then it does the same
with the next place. ``tests/unit/test_breaks.py`` checks that each place still exists.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "tidemill"


class Break(NamedTuple):
    """One break: in ``file``, ``new`` replaces ``old``; ``tests`` then fail."""

    what: str
    file: str
    old: str
    new: str
    tests: str

    def place(self, source: Path = SOURCE) -> Path:
        """The file that the break changes."""
        return source / self.file


BREAKS = (
    Break(
        "The fence is not checked: tokens repeat, so a late verdict settles the next lease.",
        "brokers/lmdb/claim/claim.py",
        "token, dates, ttr_used = commit.next_number(), self._undated, 0.0",
        "token, dates, ttr_used = commit.next_number() and seq + 1, self._undated, 0.0",
        "tests/conformance/test_contract_leases.py -k lmdb",
    ),
    Break(
        "An expired job starts.",
        "brokers/lmdb/claim/claim.py",
        "if expires and expires <= commit.now:",
        "if expires and expires < 0:",
        "tests/unit/brokers/lmdb/test_lmdb_time.py",
    ),
    Break(
        "A settled job keeps its place in the limit of its queue or key.",
        "brokers/lmdb/claim/limits.py",
        "        partition.running -= 1\n        if back:\n",
        "        if back:\n",
        "tests/conformance/test_contract_limits.py -k lmdb",
    ),
    Break(
        "A put wakes no sleeping owner.",
        "brokers/lmdb/engine/wakeup.py",
        "for slot in self._marked():\n            taken, mask, waits",
        "for slot in ():\n            taken, mask, waits",
        "tests/conformance/test_contract_put.py tests/conformance/test_contract_leases.py -k lmdb",
    ),
    Break(
        "The rollback of a failed step is ignored: its half is stored.",
        "brokers/lmdb/engine/transactions.py",
        "                self._txn.abort()\n",
        "                self._txn.commit()\n",
        "tests/conformance/test_contract_put.py tests/unit/brokers/lmdb -k 'not http'",
    ),
    Break(
        "A second job with the id of a kept job takes its place.",
        "brokers/lmdb/put/put.py",
        "header + envelope, overwrite=False, db=commit.t.job",
        "header + envelope, overwrite=True, db=commit.t.job",
        "tests/conformance/test_contract_put.py -k lmdb",
    ),
    Break(
        "A plain put leases a job that is not the first of its queue.",
        "brokers/lmdb/put/put_one.py",
        "if not certain or (takes and row.ready):",
        "if not certain:",
        "tests/unit/brokers/lmdb/test_lmdb_put_one.py",
    ),
    Break(
        "A plain put stores a second job under the id of a kept job.",
        "brokers/lmdb/put/put_one.py",
        "header + envelope, overwrite=False, db=tables.job",
        "header + envelope, overwrite=True, db=tables.job",
        "tests/unit/brokers/lmdb/test_lmdb_put_one.py",
    ),
    Break(
        "The death of a process counts no attempt.",
        "worker/process.py",
        "lease.token, Outcome.RETRY, error=self._cause",
        "lease.token, Outcome.RELEASE, error=self._cause",
        "tests/simulation",
    ),
    Break(
        "The retry of a stuck job may start while its old run lives.",
        "worker/pool.py",
        "        verdict.hold = True\n",
        "",
        "tests/simulation",
    ),
    Break(
        "A verdict is dropped when the store does not answer.",
        "worker/steps.py",
        "self._pool.verdicts = [*step.verdicts, *self._pool.verdicts]",
        "self._pool.verdicts = [*self._pool.verdicts]",
        "tests/simulation",
    ),
    Break(
        "A worker removes its scoreboard although the store has not taken its last verdicts.",
        "worker/supervisor.py",
        "        if self._runtime is None:\n            self._machine.exit(INTERRUPTED)\n",
        "",
        "tests/simulation/test_simulated_shutdown.py",
    ),
    Break(
        "A stuck job that ends at last is settled again.",
        "worker/execute.py",
        "        if self._timeouts.finished(run):\n            return True\n",
        "        if self._timeouts.finished(run) or True:\n            return True\n",
        "tests/unit/worker/test_ends_and_timeouts.py",
    ),
    Break(
        "Any signature of a job is good.",
        "core/codec.py",
        "    return any(compare_digest(_digest(key, part), signature) for key in keys)\n",
        "    return True\n",
        "tests/unit/core tests/unit/client -k sign",
    ),
    Break(
        "The role of a client is not checked.",
        "server/http/exchange.py",
        "    if exchange.role < role:\n",
        "    if exchange.role < 0:\n",
        "tests/unit/server/test_who_may_what.py",
    ),
    Break(
        "The role of a client does not hide the arguments of jobs.",
        "server/http/endpoints.py",
        "        return record if self.sees_arguments else record.without_values()\n",
        "        return record\n",
        "tests/unit/server/test_who_may_what.py",
    ),
    Break(
        "A step of a chain takes a result that nobody signed.",
        "client/compositions.py",
        "            verify_result(end.id, end.result, keys)\n",
        "            pass\n",
        "tests/conformance/test_compositions.py -k 'signed and (memory or lmdb)'",
    ),
    Break(
        "Retries have no delay.",
        "core/retry.py",
        "    return random.uniform(0.0, bound) if policy.jitter else bound\n",
        "    return 0.0\n",
        "tests/unit/core tests/unit/worker -k 'backoff or retr'",
    ),
    Break(
        "PostgreSQL: a put sends no NOTIFY.",
        "brokers/postgres/sql/45_wakeup.sql",
        "PERFORM pg_notify(s.channel, s.owner::text);\n            END LOOP;\n        END LOOP;",
        "NULL;\n            END LOOP;\n        END LOOP;",
        "tests/conformance tests/unit/brokers/postgres -k 'postgresql and (wake or sleep)'",
    ),
    Break(
        "PostgreSQL: a put does not tell the lease that it hands over.",
        "brokers/postgres/sql/25_handoff.sql",
        "        PERFORM pg_notify(w.channel, word), ",
        "        PERFORM ",
        "tests/unit/brokers/test_handoff.py",
    ),
    Break(
        "Redis: a hint is not published.",
        "brokers/redis/lua/wakeup.lua",
        "return call('PUBLISH', B .. ':w:' .. sleeper, text or '') > 0 end",
        "return true end",
        "tests/conformance tests/unit/brokers/redis -k 'redis and (wake or sleep)'",
    ),
    Break(
        "Redis: a put wakes a sleeper that now waits for another queue.",
        "brokers/redis/lua/wakeup.lua",
        "return slept and tonumber(slept) == tonumber(since) and ",
        "return ",
        "tests/conformance/test_contract_messages.py -k 'redis and wake'",
    ),
    Break(
        "Redis: a verdict settles a task that its worker has not heard of.",
        "brokers/redis/lua/report.lua",
        "if id and tokens[i] ~= x.unheard then",
        "if id then",
        "tests/unit/brokers/redis/test_redis_handoff.py",
    ),
)


def broken_source(one: Break, folder: Path) -> Path:
    """A copy of the source with the break."""
    copy = folder / "src"
    shutil.copytree(SOURCE, copy / "tidemill")
    file = one.place(copy / "tidemill")
    file.write_text(file.read_text().replace(one.old, one.new))
    return copy


def is_noticed(one: Break) -> bool:
    """True when a test fails because of the break."""
    with tempfile.TemporaryDirectory() as folder:
        path = broken_source(one, Path(folder))
        command = f"{sys.executable} -m pytest -n 2 -x -q --tier test {one.tests}"
        environment = {**os.environ, "PYTHONPATH": str(path)}
        run = subprocess.run(
            command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True
        )
        failed = [line for line in run.stdout.splitlines() if line.startswith("FAILED")]
        print(f"{'noticed' if failed else 'MISSED '}  {one.what}", flush=True)
        for line in failed or run.stdout.splitlines()[-3:]:
            print(f"         {line}", flush=True)
        return bool(failed)


def main(words: list[str]) -> int:
    """Try all breaks, or the breaks whose text has one of these words."""
    tried = [one for one in BREAKS if not words or any(word in one.what for word in words)]
    missed = [one for one in tried if not is_noticed(one)]
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
