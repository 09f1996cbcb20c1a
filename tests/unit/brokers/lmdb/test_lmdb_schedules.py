"""Schedules on LMDB: a firing leases its job at once, and what is stored outlives its process."""

from __future__ import annotations

import os
from pathlib import Path

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.schedules import Change
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import clock
from tidemill.core.envelope import Envelope
from tidemill.core.job import Outcome, State, Verdict
from tidemill.core.owner import Owner


def test_the_owner_that_fires_a_schedule_leases_its_job_in_the_same_commit(tmp_path: Path) -> None:
    # law 9: not first the job's commit, and then that of its lease
    broker = open_broker(f"lmdb://{tmp_path}/store")
    broker.attach(Owner(id="w", name="w"))
    [made] = broker.change_schedules([Change("s", 0, clock.wall() - 1)])
    want = Want(2)
    reply = broker.exchange(Step("w", want=want, fires=5))
    assert [s.name for s in reply.schedules] == ["s"]
    job = Envelope(id="j", task="t")
    broker.change_schedules([Change("s", made.version, clock.wall() + 60, jobs=(job,))])
    record = broker.get("j")
    assert record is not None
    assert record.state is State.RUNNING
    size = os.stat(tmp_path / "store" / "data.mdb").st_mtime_ns
    reply = broker.exchange(Step("w", want=want, fires=5))
    assert os.stat(tmp_path / "store" / "data.mdb").st_mtime_ns == size  # nothing was written
    assert [lease.open().id for lease in reply.leases] == ["j"]
    verdicts = [Verdict(reply.leases[0].token, Outcome.SUCCESS)]
    assert broker.exchange(Step("w", verdicts=verdicts)).settled == [True]
    broker.close()


def test_a_schedule_outlives_the_process_that_stored_it(tmp_path: Path) -> None:
    # law 1
    url = f"lmdb://{tmp_path}/store"
    pid = os.fork()
    if not pid:
        broker = open_broker(url)
        broker.change_schedules([Change("s", 0, clock.wall() - 1, b"body")])
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    broker = open_broker(url)
    broker.attach(Owner(id="w", name="w"))
    [schedule] = broker.exchange(Step("w", fires=5)).schedules
    assert (schedule.name, schedule.body) == ("s", b"body")
    broker.close()
