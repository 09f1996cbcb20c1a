"""What an app does while it is imported by its name: puts are left out, a long import is told."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidemill import JobNotFound, State, Tidemill, TidemillError, app_loader
from tidemill.app_loader import load_app
from tidemill.errors import InvalidOption
from tidemill.testing import run_all

APP = """
import asyncio
from tidemill import Tidemill, chain, group
mill = Tidemill({url!r})
@mill.task
def work(n=0): return n
{lines}
"""
PUTS = {
    "enqueue": "job = work.enqueue(1)",
    "many": "mill.enqueue_many([work.call(1), work.call(2)])",
    "async": "asyncio.run(work.aenqueue(1))",
    "by name": "mill.enqueue(f'{__name__}.work', 1)",
    "message": "mill.queue('q').put({'n': 1})",
    "chain": "mill.enqueue(chain(work.call(1), work.call()))",
    "group": "mill.enqueue(group([work.call(1)] * 3))",
    "long group": "mill.enqueue(group(work.call(n) for n in range(2000)))",
    "batch": "with mill.batch(): work.enqueue(1)",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", "").startswith(str(tmp_path)):
            del sys.modules[name]


def write(folder: Path, lines: str) -> str:
    name = f"app_{folder.name[-12:]}"
    (folder / f"{name}.py").write_text(APP.format(url=f"lmdb://{folder}/store", lines=lines))
    return name


@pytest.mark.parametrize("way", PUTS)
def test_a_put_of_the_import_is_left_out_and_told(
    way: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:  # case M16
    name = write(folder, PUTS[way])
    with load_app(name) as mill:
        records = [r for r in caplog.records if "is put while the app is imported" in r.message]
        assert records
        assert f"{folder}/{name}.py, line 7" in records[0].message
        assert mill.jobs().page().records == []
        # and after the import the app puts as ever
        mill.queue("q").put(1)
        assert len(mill.jobs().page().records) == 1


@pytest.mark.parametrize(
    "call",
    [
        "work.enqueue(1).result",
        "mill.enqueue(chain(work.call(1), work.call())).wait",
        "mill.enqueue(chain(work.call(1), work.call())).steps[0].wait",
        "mill.enqueue(group([work.call(1)] * 3)).result",
        "mill.enqueue(group([work.call(1)] * 3))[1].wait",
    ],
)
def test_a_wait_of_the_import_fails_at_once(folder: Path, call: str) -> None:  # case M16
    name = write(folder, f"print({call}(timeout=60))")
    with pytest.raises(InvalidOption, match="it was put while the app was imported") as caught:
        load_app(name)
    assert JobNotFound.__name__ in str(caught.value)


def test_a_thread_that_the_import_starts_may_put(folder: Path) -> None:
    name = write(
        folder, "import threading\nt = threading.Thread(target=work.enqueue)\nt.start()\nt.join()"
    )
    with load_app(name) as mill:
        assert len(mill.jobs().page().records) == 1


def test_a_context_that_the_import_left_behind_may_put(folder: Path) -> None:
    # case M16; given a copy of the context, as each asyncio task of the import has one
    spec = write(folder, "import contextvars; later = contextvars.copy_context()")
    mill = load_app(spec)
    module = sys.modules[spec.partition(":")[0]]
    # when the copy puts a job after the import, then the job is stored
    job = module.later.run(module.work.enqueue, 3)
    assert mill.job(job.id).state is State.READY


def test_a_long_import_is_told_with_its_stack(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # case M16
    monkeypatch.setattr(app_loader, "LONG", 0.01)
    tell, slow, told = app_loader._tell, threading.Event(), threading.Event()
    monkeypatch.setattr(app_loader, "_tell", lambda *args: slow.wait(60) and tell(*args))
    records: list[logging.LogRecord] = []

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)
            told.set()

    handler = Told()
    monkeypatch.setattr(threading, "events", (slow, told), raising=False)
    lines = "slow, told = threading.events; slow.set(); told.wait(60)"
    name = write(folder, f"def slow():\n    import threading\n    {lines}\nslow()")
    app_loader.log.addHandler(handler)
    try:
        load_app(name).close()
    finally:
        app_loader.log.removeHandler(handler)
    (message,) = [record.getMessage() for record in records]
    assert "the import of the app" in message
    assert f'"{folder}/{name}.py", line 9, in slow' in message
    assert "app_loader" not in message


def test_a_short_import_is_not_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_app(write(folder, "")).close()
    assert not caplog.records


@pytest.mark.parametrize("value", [object(), "x" * 2_000_000, None], ids=["odd", "big", "unknown"])
def test_a_schedule_that_cannot_be_stored_names_itself(value: object, url: str) -> None:  # case M16
    with Tidemill(url) as mill:

        @mill.task
        def work(what: object = None) -> None: ...

        mill.schedule("fine", work.call(1), 60)
        call = work.call(value) if value is not None else mill.call("not.here")
        mill.schedule("hourly report", call, 3600)
        with pytest.raises(TidemillError, match=r"^schedule 'hourly report' cannot be stored: "):
            mill.runtime.code_schedules.bodies()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import a_module_that_is_missing\n", "ModuleNotFoundError: No module named 'a_module_t"),
        ("from os import nothing_of_this_name\n", "ImportError: cannot import name 'nothing_of_t"),
        ("import os\nos.nothing\n", "AttributeError: module 'os' has no attribute 'nothing'"),
    ],
)
def test_an_allowed_path_whose_module_cannot_be_imported_fails_with_its_error(
    text: str, error: str, folder: Path, url: str
) -> None:  # case M16
    sys.path.insert(0, str(folder))
    (folder / "broken_module_of_an_app.py").write_text(f"{text}\ndef run(): ...\n")
    with Tidemill(url, allow_imports=["broken_module_of_an_app.*"], retries=0) as mill:
        job = mill.enqueue("broken_module_of_an_app.run")
        run_all(mill)
        assert job.state == "failed"
        assert f"broken_module_of_an_app.run cannot be imported: {error}" in job.error


def test_an_allowed_path_that_names_nothing_waits_aside(folder: Path, url: str) -> None:
    sys.path.insert(0, str(folder))
    (folder / "whole_module_of_an_app.py").write_text("import os\ndef run(): ...\n")
    with Tidemill(url, allow_imports=["whole_module_of_an_app.*"]) as mill:
        jobs = [mill.enqueue(f"whole_module_of_an_app.{name}") for name in ("gone", "os.getpid")]
        run_all(mill)
        assert [job.state for job in jobs] == ["scheduled", "scheduled"]
