"""Settings of the user are read, or refused with a sentence that names the setting."""

from __future__ import annotations

import datetime as dt
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tidemill import Tidemill
from tidemill.brokers.registry import open_broker
from tidemill.core import config
from tidemill.core.config import parse_url
from tidemill.core.retry import Retries, RetryPolicy
from tidemill.errors import FeatureMissing, InvalidOption

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "empty"), ("x" * 201, "201 bytes"), ("é" * 101, "202 bytes"), ("a\nb", "control"),
        ("\0", "control"), ("a\x7f", "control"), ("\u200b", "control"),
        ("\ud800", "not valid text"),
        (17, "must be a string, not int"), (None, "must be a string"), (b"x", "must be a string"),
    ],
)  # fmt: skip
def test_bad_names_are_refused_naming_the_field(name: Any, why: str) -> None:
    # case Q13
    for field in ("id", "queue", "key"):
        with pytest.raises(InvalidOption, match=rf"^{field} .*{why}"):
            config.check_name(field, name)


@pytest.mark.parametrize("name", ["a", "x" * 200, "é" * 100, "thumb:a b/c.png", "日本", "-", "a.b"])
def test_good_names_are_kept(name: str) -> None:
    # case Q13
    assert config.check_name("id", name) == name


@pytest.mark.parametrize(
    "value",
    [-1, -0.001, NAN, INF, -INF, 1e300, 10**400, 10**5000, "5", "-5 minutes",
     "soon", "2 months", "100 weeks ago", "9999999999 days", None, True, [], 1j,
     dt.timedelta(-1), dt.timedelta.max],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_bad_durations_are_refused_by_name_never_0(value: Any) -> None:
    # case Q17
    for field in ("delay", "ttr", "timeout", "expires"):
        with pytest.raises(InvalidOption, match=rf"^{field} "):
            config.check_seconds(field, value)


def test_a_text_that_is_no_duration_is_shown_one() -> None:
    with pytest.raises(InvalidOption, match=r"^delay '2 months' is no duration; .* as '5 minutes'"):
        config.check_seconds("delay", "2 months")


def test_retries_store_their_durations_in_seconds() -> None:
    given = Retries(delay=dt.timedelta(minutes=1), cap="1 hour")  # type: ignore[arg-type]
    assert config.check_retries(given) == RetryPolicy(delay=60.0, cap=3600.0)


def test_a_moment_as_a_duration_is_shown_its_place() -> None:
    moment = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
    with pytest.raises(InvalidOption, match=r"^expires must be seconds .*; pass the seconds from"):
        config.check_seconds("expires", moment)
    with pytest.raises(InvalidOption, match=r"^delay must be .*; give the moment as at=$"):
        config.check_seconds("delay", moment)


def test_good_durations_are_seconds() -> None:
    assert config.check_seconds("delay", 0) == 0.0
    assert config.check_seconds("delay", 3) == 3.0
    assert config.check_seconds("delay", dt.timedelta(minutes=1.5)) == 90.0
    for text, seconds in (
        *(("5 minutes", 300), ("1.5 hours", 5400), ("minute", 60), ("2days", 172_800)),
        *(("1 week", 604_800), ("0 seconds", 0)),
    ):
        assert config.check_seconds("delay", text) == seconds
    assert isinstance(config.check_seconds("delay", 3), float)


@pytest.mark.parametrize(
    "value",
    [
        *(NAN, INF, -5, 0, 1e300, 10**400, "now", None, True, dt.date.today()),
        dt.datetime(1970, 1, 1, tzinfo=dt.UTC),
        dt.datetime(1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=10))),
        dt.datetime.max.replace(tzinfo=dt.timezone(dt.timedelta(hours=-10))),
    ],
)
def test_bad_moments_are_refused(value: Any) -> None:
    # case Q17
    with pytest.raises(InvalidOption, match=r"^at "):
        config.check_moment("at", value)


def test_moments_need_a_zone() -> None:
    aware = dt.datetime(2030, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=2)))
    assert config.check_moment("at", aware) == aware.timestamp()
    assert config.check_moment("at", 1.5e9) == 1.5e9
    with pytest.raises(InvalidOption, match=r"without a time zone"):
        config.check_moment("at", dt.datetime(2030, 1, 1))


@pytest.mark.parametrize("value", [NAN, INF, 101, -101, 10**400, "high", None, True])
def test_bad_priorities_are_refused(value: Any) -> None:
    # case Q17
    with pytest.raises(InvalidOption, match=r"^priority "):
        config.check_priority(value)


def test_priorities_are_ranks_higher_first() -> None:
    ranks = [config.check_priority(p) for p in (100, 0.5, 0, -0.5, -100)]
    assert ranks == sorted(ranks)
    assert len(set(ranks)) == 5
    assert config.check_priority(0) == 1024


@pytest.mark.parametrize(
    "value",
    [-1, 1.5, "3", None, True, 10**9, 10**5000, Retries(limit=-1), Retries(delay=NAN),
     Retries(cap=-1), Retries(factor=0.5), Retries(factor=NAN), Retries(factor="x")],  # type: ignore[arg-type]
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_bad_retries_are_refused(value: Any) -> None:
    # case Q17
    with pytest.raises(InvalidOption, match=r"retries"):
        config.check_retries(value)


def test_good_retries() -> None:
    assert config.check_retries(0).max_attempts == 1
    assert config.check_retries(Retries(5, delay=0.1)).max_attempts == 6
    assert config.check_retries(2, Retries(5, delay=0.1)) == Retries(2, delay=0.1)


def test_urls_are_taken_apart() -> None:
    url = parse_url("LMDB://./a%20b?keep=5&x=")
    assert (url.scheme, url.path, url.options) == ("lmdb", "./a b", {"keep": "5", "x": ""})
    assert parse_url("lmdb:///abs/dir").path == "/abs/dir"
    for wrong in ("", "jobs", "/tmp/jobs", "lmdb:jobs", None, 5):
        with pytest.raises(InvalidOption, match=r"is not a broker URL"):
            parse_url(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match=r"after \?"):
        parse_url("lmdb://x?keep")


@pytest.mark.parametrize("scheme", ["postgres", "POSTGRES", "postgresql"])
def test_both_schemes_of_postgresql_name_the_same_broker(scheme: str) -> None:
    url = parse_url(f"{scheme}://me@db/shop?schema=s")
    assert (url.scheme, url.path) == ("postgresql", "me@db/shop")
    assert url.options == {"schema": "s"}


@pytest.mark.parametrize("driver", ["redis", "hiredis"])
def test_unknown_schemes_and_missing_drivers_are_named(
    monkeypatch: pytest.MonkeyPatch, driver: str
) -> None:
    with pytest.raises(InvalidOption, match=r"no broker for sqs://.*lmdb://"):
        open_broker("sqs://x")

    def missing(name: str) -> Any:
        raise ModuleNotFoundError("no", name=driver)

    monkeypatch.setattr("tidemill.brokers.registry.importlib.import_module", missing)
    with pytest.raises(FeatureMissing, match=r"tidemill\[redis\]"):
        open_broker("memory://")


@pytest.mark.parametrize("version", ["3.5.3", "4.6.0"])
def test_a_driver_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    for name in [name for name in sys.modules if name.startswith("tidemill.brokers.redis")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("redis.__version__", version)
    said = r"^redis:// needs redis>=5; install it: pip install 'tidemill\[redis\]'$"
    with pytest.raises(FeatureMissing, match=said):
        open_broker("redis://127.0.0.1:1")


@pytest.mark.parametrize("name", ["a b", "100%41", "#1", "what?x=1", "~", "grün", "a+b&c"])
def test_odd_folders_survive_the_way_through_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # given a project in a folder with an odd name
    monkeypatch.delenv("TIDEMILL_URL", raising=False)
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.chdir(folder)
    # when an app opens its store, and another one by the first one's url
    with Tidemill() as mill:
        mill.queue("q").put(1)
        url = mill.url
    assert url.isascii()
    monkeypatch.chdir(tmp_path)
    with Tidemill(url) as again:
        assert again.queues()[0].ready == 1
    # then the store is in that folder and nowhere else
    assert (folder / ".tidemill" / "data.mdb").exists()
    assert (folder / ".tidemill" / ".gitignore").read_text() == "*\n"
    assert os.listdir(tmp_path) == [name]


def test_body_headers_and_tags_have_one_bound() -> None:
    with Tidemill("memory://") as mill:
        queue = mill.queue("q")
        half = "x" * 600_000
        queue.put(half)
        queue.put(1, headers={"trace": half})
        with pytest.raises(InvalidOption, match=r"the headers and tags have 1,200,010 bytes"):
            queue.put(1, headers={"trace": half, "again": half})
        with pytest.raises(InvalidOption, match="bytes together; store large data elsewhere"):
            queue.put(half, headers={"trace": half})
        assert queue.size() == 2
