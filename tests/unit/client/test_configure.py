"""An app that gets its store and keys after its tasks are declared, and middleware by decorator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tidemill import InvalidOption, JobContext, Tidemill
from tidemill.errors import FeatureMissing
from tidemill.testing import run_all


def test_a_factory_names_the_store_after_the_tasks(tmp_path: Path) -> None:
    mill = Tidemill()
    task = mill.task(double)
    mill.configure(f"lmdb://{tmp_path}/store")
    with mill:
        job = task.enqueue(2)
        run_all(mill)
        assert job.result() == 4
        assert mill.url == f"lmdb://{tmp_path}/store"
        assert (tmp_path / "store").exists()


def double(number: int) -> int:
    return 2 * number


def test_the_store_cannot_change_after_its_first_use(tmp_path: Path) -> None:
    with Tidemill(f"lmdb://{tmp_path}/one") as mill:
        mill.configure(f"lmdb://{tmp_path}/two")
        mill.queues()
        mill.configure(f"lmdb://{tmp_path}/two")
        with pytest.raises(InvalidOption, match=f"already uses lmdb://{tmp_path}/two; configure"):
            mill.configure(f"lmdb://{tmp_path}/one")
        mill.close()
        mill.configure(f"lmdb://{tmp_path}/one")
        mill.queues()
        assert mill.broker.url == f"lmdb://{tmp_path}/one"


def test_a_wrong_value_changes_nothing(tmp_path: Path) -> None:
    mill = Tidemill(f"lmdb://{tmp_path}", secret_keys=["k"], serializer="pickle")
    for url, keys in (("lmbd://x", None), (None, []), (f"lmdb://{tmp_path}/b", "k")):
        with pytest.raises(InvalidOption):
            mill.configure(url, secret_keys=keys)
    assert mill.url == f"lmdb://{tmp_path}"
    assert mill.runtime.keys == [b"k"]
    mill.configure(secret_keys=["new", "k"])
    assert mill.runtime.keys == [b"new", b"k"]


def test_the_options_of_declared_tasks_are_checked_against_the_store() -> None:
    mill = Tidemill()

    @mill.task(key="once")
    def sync() -> None: ...

    with pytest.raises(FeatureMissing, match="key"):
        mill.configure("amqp://localhost")
    assert not mill.url.startswith("amqp")


def test_a_decorated_middleware_is_inside_the_earlier_ones() -> None:
    seen = []

    def outer(context: JobContext) -> Iterator[None]:
        seen.append("outer")
        yield

    mill = Tidemill("memory://", middleware=[outer], sync=True)

    @mill.around
    def inner(context: JobContext) -> Iterator[None]:
        seen.append("inner")
        yield

    @mill.task
    def task() -> None:
        seen.append("task")

    task.enqueue()
    assert seen == ["outer", "inner", "task"]
    assert mill.middleware == (outer, inner)
    assert len(mill.runtime.layers) == 3  # with the layer that tries the encoding of a result
    with pytest.raises(InvalidOption, match="middleware"):
        mill.around(3)  # type: ignore[type-var]
