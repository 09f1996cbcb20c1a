"""A worker that is started with its standard descriptors closed, as some process managers do."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
from harness import open_place

CLOSED = ("sh", "-c", 'exec "$0" "$@" 0<&- 1>&- 2>&-')


def test_a_worker_without_standard_descriptors_serves_and_harms_no_file(tmp_path: Path) -> None:
    with open_place(tmp_path) as place:
        # given a worker whose every line of log goes to a descriptor that was closed
        place.write(
            """
            @mill.task
            def shout(n):
                for fd in (1, 2):
                    os.write(fd, b"a line of a task " * 1000)
                return n
            """,
            load=False,
        )
        worker = place.worker(under=CLOSED)
        jobs = [place.mill.enqueue(place.task("shout"), n) for n in range(20)]
        # then its jobs run, and the descriptors lead nowhere, in each of its processes
        assert [job.result(timeout=60) for job in jobs] == list(range(20))
        for process in (psutil.Process(worker.pid), *worker.children()):
            ends = {os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in range(3)}
            assert ends == {"/dev/null"}
        assert worker.stop() == 0
        # and the store is whole
        place.mill.close()
        assert {job.refresh().state.value for job in jobs} == {"succeeded"}
