"""Stacks that the threads of another process write into a file."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidemill.client.worker_reports import Answer
from tidemill.worker import stacks
from tidemill.worker.child_protocol import Outbox

INNER = 'Current thread 0x01 (most recent call first):\n  File "app.py", line 7 in hold\n'
OUTER = '  File "threading.py", line 1002 in _bootstrap\n'


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The stack that is read when the thread writes these pieces, each after a look at the file."""

    def read(*pieces: str) -> str:
        path, looked = tmp_path / "stacks", threading.Semaphore(0)
        path.write_text("an earlier stack\n")

        def write() -> None:
            for piece in pieces:
                for _ in range(3):
                    assert looked.acquire(timeout=60)
                with path.open("a") as file:
                    file.write(piece)

        writer = threading.Thread(target=write)

        def start(pid: int, thread: int) -> bool:
            writer.start()
            return True

        def look(path: str, offset: int) -> str:
            looked.release()
            return text_from(path, offset)

        text_from = stacks._text_from
        monkeypatch.setattr(stacks, "_signal_thread", start)
        monkeypatch.setattr(stacks, "_text_from", look)
        found = stacks.stacks_of_threads(str(path), 1, [1], 60.0)
        for _ in pieces:
            looked.release(3)
        writer.join()
        return found

    return read


def test_a_stack_that_is_written_in_pieces_is_read_whole(
    written: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "_STILL", 10_000)
    assert written(INNER, OUTER) == INNER + OUTER


def test_a_stack_with_another_end_is_read_when_it_grows_no_more(
    written: Callable[..., str],
) -> None:
    assert written(INNER) == INNER


def test_a_process_that_leaves_sends_its_stacks_first() -> None:
    stub: Any = None
    outbox = Outbox(stub, stub, stub)
    assert outbox.empty()
    outbox.answers.append(Answer("question", 1, OUTER))
    assert not outbox.empty()
