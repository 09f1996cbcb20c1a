"""Fingerprints: one for each failure of the code, whatever values its messages carry."""

from __future__ import annotations

import asyncio
import time

import pytest

from tidemill.core.fingerprint import failure_of, place_of, shape_of
from tidemill.worker.verdicts import describe

TRACE = """Traceback (most recent call last):
  File "/srv/releases/41/shop/tasks.py", line 12, in charge
    pay(order)
  File "/srv/venv/lib/python3.12/site-packages/stripe/client.py", line 300, in post
    raise CardError(message)
stripe.CardError: card declined
"""


def fingerprint(error: str, traceback: str = "") -> str:
    return failure_of(error, traceback).fingerprint


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ValueError: order 17 is gone", "ValueError: order 18 is gone"),
        ("ValueError: no row 'ann'", "ValueError: no row 'bob'"),
        (
            "KeyError: 3f2b8c1e-77aa-4c1d-9e0f-1234567890ab",
            "KeyError: 00000000-11aa-4c1d-9e0f-abcdefabcdef",
        ),
        ("E: <object at 0x7f1c22>", "E: <object at 0x7f9d30>"),
        ("E: took 1.5 s at 12:30:01", "E: took 20.25 s at 23:59:59"),
        ("E: one\nparameters: (1, 2)", "E: one\nparameters: (3, 4)"),
    ],
)
def test_values_in_the_message_do_not_count(one: str, other: str) -> None:
    assert fingerprint(one) == fingerprint(other)


def test_class_message_and_place_each_count() -> None:
    base = fingerprint("ValueError: too long", TRACE)
    assert fingerprint("TypeError: too long", TRACE) != base
    assert fingerprint("ValueError: too short", TRACE) != base
    assert fingerprint("ValueError: too long", TRACE.replace("in charge", "in refund")) != base


def test_the_line_number_and_the_folder_of_a_release_do_not_count() -> None:
    moved = TRACE.replace("line 12", "line 15").replace("releases/41", "releases/42")
    assert fingerprint("ValueError: too long", TRACE) == fingerprint("ValueError: too long", moved)


def test_the_place_is_the_innermost_frame_of_the_users_code() -> None:
    failure = failure_of("stripe.CardError: card declined", TRACE)
    assert failure.place == "shop/tasks.py:charge"
    assert (failure.error, failure.message) == ("stripe.CardError", "card declined")


def test_a_failure_inside_a_library_has_a_place_in_the_library() -> None:
    only = "\n".join(TRACE.splitlines()[3:])
    assert place_of(only) == "stripe/client.py:post"


def test_a_failure_without_an_exception_has_no_class() -> None:
    failure = failure_of("worker process 4711 was killed by SIGKILL")
    assert (failure.error, failure.place) == ("", "")
    assert failure.message == "worker process 4711 was killed by SIGKILL"
    assert failure.fingerprint == fingerprint("worker process 12 was killed by SIGKILL")


def test_the_place_of_an_exception_group_is_where_the_group_was_raised() -> None:
    async def fails() -> None:
        raise ValueError("inside")

    async def gathers() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(gathers())
    _, trace = describe(caught.value)
    assert place_of(trace).endswith(":gathers")


def test_a_chained_exception_has_the_place_of_the_last_one() -> None:
    def first() -> None:
        raise KeyError("one")

    def second() -> None:
        try:
            first()
        except KeyError as error:
            raise ValueError("two") from error

    with pytest.raises(ValueError, match="two") as caught:
        second()
    assert place_of(describe(caught.value)[1]) == "core/test_fingerprint.py:second"


def test_a_hostile_message_takes_no_time() -> None:
    begun = time.process_time()
    for text in ("'" * 2000, "1." * 1000, "a" * 2000, '"' + "0x" * 1000, "\n" * 16_000):
        failure_of(f"ValueError: {text}", text * 8)
    assert time.process_time() - begun < 1.0


def test_spaces_are_one() -> None:
    assert shape_of("a   b\tc") == "a b c"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("cannot reach ann@example.org", "cannot reach x299@e.org"),
        ("GET https://example.org/a?b=c failed", "GET https://example.net/d failed"),
        ("no such file: /srv/upload/a.png", "no such file: /srv/other/deep/b.txt"),
    ],
)
def test_addresses_and_paths_do_not_tell_failures_apart(one: str, other: str) -> None:
    assert shape_of(one) == shape_of(other)
