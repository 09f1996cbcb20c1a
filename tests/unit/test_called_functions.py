"""A job whose task calls a function by its path has the name of the function for people."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tidemill import Tidemill
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.shared.lost_jobs import LostJob, log_lost
from tidemill.cli import main
from tidemill.core.envelope import FUNCTION, Envelope
from tidemill.core.job import Owner


def test_lists_and_logs_name_the_function(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Tidemill(f"lmdb://{tmp_path}") as mill:
        # given a job that runs
        mill.broker.attach(Owner(id="w1", name="box:1", concurrency=1))
        mill.enqueue(mill.call("run").using(queue="q", headers={FUNCTION: "shop.receipt"}))
        [lease] = mill.broker.exchange(Step("w1", want=Want(1))).leases
        # then each list names its function
        for verb in (["jobs"], ["top", "--once"]):
            done = CliRunner().invoke(main, [*verb, "--url", mill.broker.url])
            assert " shop.receipt " in done.stdout, done
        # and so does the log, when its worker is lost
        log_lost([LostJob(lease.open(), "lost")])
        assert caplog.records[-1].getMessage().startswith(f"shop.receipt[{lease.open().id}] failed")
        assert vars(caplog.records[-1])["tidemill_task"] == "shop.receipt"


def test_a_name_that_cannot_be_printed_is_not_shown() -> None:
    for name in ("", "shop.receipt\n2026-01-01 CRITICAL"):
        assert Envelope(id="j", task="run", headers={FUNCTION: name}).called == "run"
