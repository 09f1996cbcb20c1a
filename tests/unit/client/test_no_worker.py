"""A wait in vain says that no worker serves the queue of which store, and how to start one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from servers import STORES, new_store

from tidemill import ResultTimeout, Tidemill, as_completed, group
from tidemill.testing import join

SHOP = """
import sys
from tidemill import Tidemill

shop = Tidemill(sys.argv[1])

@shop.task
def stamp(): ...
"""
APP = """
from shop import stamp  # a task stands before the app, and is no app
from shop import shop
from tidemill import ResultTimeout

@shop.task(queue="mail")
def send(): ...

if __name__ == "__main__":
    try:
        send.enqueue().result(timeout=0)
    except ResultTimeout as error:
        print(error)
"""


@pytest.mark.everyday
def test_the_error_of_a_script_names_the_command_that_starts_a_worker(tmp_path: Path) -> None:
    # case M14
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "post.py").write_text(APP)
    url = f"lmdb://{tmp_path}/store"
    ran = subprocess.run(
        [sys.executable, "post.py", url], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ran.stdout.endswith(
        f" is still ready after 0 s: no worker serves queue 'mail' of {url}: start one with "
        "`tidemill worker post:shop`, or here by `with mill.worker():`\n"
    )


@pytest.mark.everyday
@pytest.mark.parametrize("kind", STORES)
def test_each_wait_in_vain_names_the_queue_and_the_store(kind: str, tmp_path: Path) -> None:
    # case M14
    with Tidemill(new_store(kind, tmp_path)) as mill:

        @mill.task(queue="mail")
        def send(n: int = 0) -> None: ...

        job, later = send.enqueue(), send.using(delay=60).enqueue()
        both = mill.enqueue(group([send.call(1), send.call(2)]))
        said = f"no worker serves queue 'mail' of {mill.broker.url}"
        for wait in (
            lambda: job.result(timeout=0),
            lambda: job.wait(0.01),
            lambda: later.result(timeout=0),
            lambda: asyncio.run(job.aresult(timeout=0.01)),
            lambda: both.result(timeout=0),
            lambda: asyncio.run(both.aresult(timeout=0.01)),
            lambda: list(as_completed([job, later], timeout=0.01)),
            lambda: join(mill, timeout=0.01),
        ):
            with pytest.raises(ResultTimeout) as caught:
                wait()
            assert said in str(caught.value)


def test_a_worker_of_another_queue_does_not_count(mill: Tidemill) -> None:  # case M14
    @mill.task
    def nothing() -> None: ...

    job, late = nothing.enqueue(), nothing.using(queue="late", delay=60).enqueue()
    with mill.worker(queues=["late"]):
        with pytest.raises(ResultTimeout, match="goes on"):
            late.result(timeout=0)
        with pytest.raises(ResultTimeout, match="no worker serves queue 'default'"):
            job.result(timeout=0)
