"""Notes on their way to the store: those that the store would not keep are left out."""

from __future__ import annotations

from tidemill.core.job import Note
from tidemill.worker.child_protocol import add_notes, latest_notes


def line(token: int, number: int) -> Note:
    return Note(token, line=f"line {number}", time=float(number))


def test_the_last_hundred_lines_of_each_job_stay_in_their_order() -> None:
    notes = [line(token, n) for n in range(250) for token in (1, 2)]
    kept = latest_notes(notes)
    assert kept == [line(token, n) for n in range(150, 250) for token in (1, 2)]


def test_the_last_progress_of_each_job_stays_in_its_place() -> None:
    first, other, last = Note(1, 1.0, 9.0), Note(2, 4.0, 9.0), Note(1, 2.0, 9.0)
    assert latest_notes([first, line(1, 0), other, last, line(1, 1)]) == [
        line(1, 0),
        other,
        last,
        line(1, 1),
    ]


def test_an_empty_line_does_not_replace_the_progress() -> None:
    progress, empty = Note(1, 3.0, 9.0), Note(1, line="", time=1.0)
    assert progress in latest_notes([progress, empty])


def test_the_number_of_waiting_notes_is_bounded() -> None:
    waiting: list[Note] = []
    for n in range(20_000):
        add_notes(waiting, [line(1, n), Note(1, float(n), 0.0)])
    assert len(waiting) <= 1000
    assert waiting[-2:] == [line(1, 19_999), Note(1, 19_999.0, 0.0)]
