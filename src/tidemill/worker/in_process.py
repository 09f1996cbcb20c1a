"""A worker in threads of the calling process: for tests, scripts and notebooks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tidemill.errors import TidemillError
from tidemill.worker.banner import Start
from tidemill.worker.settings import Settings
from tidemill.worker.supervisor import Supervisor

if TYPE_CHECKING:
    from tidemill.runtime import Runtime

PATIENCE = 30.0
"""Seconds that running jobs have to finish at the end."""


@contextlib.contextmanager
def running_worker(mill: Runtime, settings: Settings) -> Iterator[Supervisor]:
    """Run a worker during a ``with`` block. The block begins when the worker serves.

    Raises:
        TidemillError: the worker could not serve, or a job did not end.
    """
    supervisor = Supervisor(settings, mill)
    outcome: list[int | BaseException] = []
    begun = threading.Event()
    announce = supervisor.announce

    def serves(start: Start) -> None:
        announce(start)
        begun.set()

    def serve() -> None:
        try:
            outcome.append(supervisor.run())
        except BaseException as error:
            outcome.append(error)
        begun.set()

    supervisor.announce = serves

    thread = threading.Thread(target=serve, name="tidemill-worker", daemon=True)
    thread.start()

    def end() -> None:
        supervisor.stop()
        thread.join(2 * PATIENCE)

    begun.wait(PATIENCE)
    if outcome:
        judge(outcome)
    mill.before_close.append(end)  # end the worker if the app is closed inside the block
    try:
        yield supervisor
    finally:
        mill.before_close.remove(end)
        end()
    judge(outcome)


def judge(outcome: Sequence[int | BaseException]) -> None:
    """Raise the error of a worker by its exit code, or by its exception.

    Raises:
        TidemillError: the worker could not serve, or a job did not end.
    """
    if not outcome:
        raise TidemillError("the worker did not end: one of its jobs still runs")
    (how,) = outcome
    if isinstance(how, BaseException):
        raise how
    if how == 1:
        raise TidemillError(f"jobs still ran {PATIENCE:g} s after the worker was told to stop")
    if how:
        raise TidemillError("the worker could not serve; the log says why")
