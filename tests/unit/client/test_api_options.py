"""A wrong declaration or call raises at the line that wrote it, with a clear sentence."""

from __future__ import annotations

import datetime as dt
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from tidemill import InvalidOption, Key, Retries, Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.client import options
from tidemill.client.task import task_name
from tidemill.core.job import Conflict
from tidemill.core.retry import RetryPolicy
from tidemill.errors import FeatureMissing
from tidemill.testing import run_all, worker
from tidemill.typing import CallOptions, PutOptions, TaskOptions


@pytest.fixture
def mill() -> Tidemill:
    return Tidemill("memory://")


def work(size: int, name: str = "x") -> int:
    return size


def test_an_unknown_option_is_refused_and_the_nearest_named(mill: Tidemill) -> None:
    with pytest.raises(InvalidOption, match=r"unknown option 'priorty'.*'priority'"):
        mill.task(priorty=5)
    task = mill.task(work)
    with pytest.raises(InvalidOption, match=r"unknown option 'dealy'.*work.*'delay'"):
        task.using(dealy=5)
    with pytest.raises(InvalidOption, match=r"'secret_key' of Tidemill.*'secret_keys'"):
        Tidemill("memory://", secret_key=["a"])
    with pytest.raises(InvalidOption, match=r"'tiemout' of put.*'ttr'|known are"):
        mill.queue("q").put(1, tiemout=3)


@pytest.mark.parametrize(
    ("option", "values", "sentence"),
    [
        *((name, (-1, math.nan, math.inf, 1e12, "5", True, [1]), f"^{name} ")  # case Q17
          for name in ("delay", "timeout", "expires", "result_ttl")),
        ("priority", (101, -101, math.nan, "high", True), "^priority "),
        ("at", (-5, math.inf, "noon", True, 0), "^at "),
        ("at", (dt.datetime(2030, 1, 1),), "without a time zone"),
        ("retries", (-1, 1.5, "3", Retries(-2), Retries(3, cap=-1)), "retries"),
        ("retries", (Retries(3, jitter="no"),), "jitter of retries must be True or False"),
        ("queue", ("", "a\nb", "x" * 201, 5), "^queue "),  # case Q13
        ("key", ("", "\x00", "k" * 201, 7), "^key "),
        ("id", ("", "a\tb", "x" * 201, 7), "^id "),
        ("tags", ("abc", [""], [1]), "tag"),
        ("headers", ([("a", "b")], {"a": 1}), "headers"),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_by_name(
    mill: Tidemill, option: str, values: tuple[Any, ...], sentence: str
) -> None:
    task = mill.task(work)
    for value in values:
        with pytest.raises(InvalidOption, match=sentence):
            task.using(**{option: value})


def test_every_option_has_a_type_and_a_check() -> None:
    typed = {
        name: kind
        for of in (TaskOptions, CallOptions, PutOptions)
        for name, kind in get_type_hints(of).items()
    }
    assert set(typed) == set(options._CHECKS)
    assert set(get_args(get_type_hints(Key)["on_conflict"])) == set(Conflict)
    # every option may be None, which leaves it as it is
    assert all(kind is Any or type(None) in get_args(kind) for kind in typed.values())


def test_delay_and_at_exclude_each_other(mill: Tidemill) -> None:
    task = mill.task(work)
    with pytest.raises(InvalidOption, match="either delay or at"):
        task.using(delay=1, at=2e9)
    with pytest.raises(InvalidOption, match="either delay or at"):
        task.using(delay=0, at=2e9)
    with pytest.raises(InvalidOption, match="either delay or at"):
        mill.queue("q").put(1, delay=1, at=2e9)
    # of two layers the later one decides
    call = task.using(delay=50).using(at=2e9).call(1)
    assert (call.options.delay, call.options.at) == (0, 2e9)


def test_durations_may_be_timedeltas_and_moments_datetimes(mill: Tidemill) -> None:
    noon = dt.datetime(2030, 1, 1, 12, tzinfo=dt.UTC)
    task = mill.task(timeout=dt.timedelta(minutes=1))(work)
    assert task.options.timeout == 60
    assert task.using(at=noon).call(1).options.at == noon.timestamp()
    assert task.using(timeout=None).call(1).options.timeout == 0


def test_0_and_none_mean_what_the_page_of_options_says(mill: Tidemill) -> None:
    task = mill.task(timeout=5, expires=9, retries=7)(work)
    for given, timeout, expires, retries in (
        ({"timeout": None}, 0, 9, 7),
        ({"timeout": 0}, 0, 9, 7),
        ({"expires": None}, 5, 9, 7),
        ({"expires": 0}, 5, 0, 7),
        ({"retries": None}, 5, 9, 7),
        ({"retries": 0}, 5, 9, 0),
    ):
        record = task.using(**given).enqueue(1).record
        envelope = record.envelope
        assert (envelope.timeout, envelope.expires) == (timeout, expires), given
        assert envelope.retries.limit == retries
        assert bool(record.expires) == bool(expires)


def test_the_text_of_an_app_names_its_store_and_its_tasks(tmp_path: Path) -> None:
    app = Tidemill("redis://ann:secret@localhost:6379/0?patience=1")
    assert repr(app) == "<Tidemill redis://***@localhost:6379/0, 0 tasks>"
    for n in range(12):
        app.task(name=f"t{n:02}")(work)
    assert repr(app).endswith(", 12 tasks: t00, t01, t02, t03, t04, t05, t06, t07, t08, t09 …>")
    store = Tidemill(f"lmdb://{tmp_path}/store")
    assert repr(store) == f"<Tidemill lmdb://{tmp_path}/store, 0 tasks>"
    assert not [*tmp_path.iterdir()]


def test_options_go_from_app_to_task_to_call() -> None:
    # case T3, T7
    mill = Tidemill("memory://", retries=7, timeout=9, queue="all")
    task = mill.task(timeout=5, tags=["a"])(work)
    call = task.using(retries=Retries(1, delay=2)).call(1).using(priority=10)
    envelope = mill.runtime.envelope(call)
    assert (envelope.timeout, envelope.queue, envelope.tags) == (5, "all", ("a",))
    assert envelope.retries == RetryPolicy(1, delay=2)
    assert envelope.rank < mill.runtime.envelope(task.call(1)).rank


def test_a_number_of_retries_keeps_the_other_fields_of_the_policy() -> None:
    # given a policy of the app, and one of a task
    cautious = Retries(5, delay=60, factor=3, cap=600, jitter=False, immediate=1)
    mill = Tidemill("memory://", retries=cautious)
    plain = mill.task(name="plain")(work)
    patient = mill.task(name="patient", retries=Retries(4, delay=9, jitter=False))(work)
    # when a later layer gives a number, then it changes the number alone
    again = mill.task(name="again", retries=2)(work)
    assert again.options.retries == RetryPolicy(2, 60, 3, 600, jitter=False, immediate=1)
    assert patient.using(retries=0).call(1).options.retries == RetryPolicy(0, delay=9, jitter=False)
    # in every later layer
    call = plain.using(retries=1).using(retries=8).call(1).using(retries=7)
    assert call.options.retries == RetryPolicy(7, 60, 3, 600, jitter=False, immediate=1)
    assert mill.runtime.envelope(call).retries == call.options.retries
    # and a Retries replaces the whole policy, and None nothing
    assert plain.using(retries=Retries(1)).call(1).options.retries == RetryPolicy(1)
    assert plain.using(retries=None).call(1).options.retries == cautious.policy
    # and without a policy of its own a task keeps the default one
    assert Tidemill("memory://", retries=7).runtime.defaults.retries == RetryPolicy(7)


def test_a_name_can_be_taken_once_but_redefined(mill: Tidemill) -> None:
    mill.task(name="job")(work)

    def other() -> None: ...

    with pytest.raises(InvalidOption, match=r"'job' is declared twice.*work.*other.*name="):
        mill.task(name="job")(other)

    def make(answer: int) -> Callable[[], int]:
        @mill.task
        def cell() -> int:
            return answer

        return cell

    make(1)
    make(2)  # as when a notebook's cell is run again
    [latest] = [task for name, task in mill.tasks.items() if name.endswith("cell")]
    assert latest() == 2


def many() -> Any:
    yield 1


@pytest.mark.parametrize(
    ("thing", "sentence"),
    [
        (lambda: 1, "lambda.*use def"),
        (many, "generator"),
        ("text", "must be a function"),
        (int, "must be a function, not the class int"),
        (runpy, "must be a function"),
    ],
)
def test_things_that_cannot_be_a_task_are_refused(
    mill: Tidemill, thing: Any, sentence: str
) -> None:
    with pytest.raises(InvalidOption, match=sentence):
        mill.task(thing)


def test_a_task_of_main_gets_the_name_its_module_really_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "shop.py"
    file.write_text("def sell(): ...\n")
    found = runpy.run_path(str(file), run_name="__main__")["sell"]
    found.__module__ = "__main__"
    monkeypatch.setattr("sys.modules", {"__main__": type("m", (), {"__file__": str(file)})})
    assert task_name(found) == "shop.sell"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"secret_keys": "key"}, "secret_keys must be a list"),
        ({"secret_keys": [""]}, "non-empty"),
        ({"serializer": "pickle"}, "needs secret_keys"),
        ({"serializer": "json"}, "msgpack or pickle"),
        ({"allow_imports": "math.*"}, r"allow_imports must be a list"),
        ({"env": object()}, "either url or env"),
        ({"url": "nonsense"}, "not a broker URL"),
    ],
)
def test_a_bad_app(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidOption, match=sentence):
        Tidemill(**{"url": "memory://", **options})


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("carrier-pigeon://loft", r"no broker for carrier-pigeon://.*lmdb://"),
        ("lmbd://./never", r"no broker for lmbd://.*; did you mean 'lmdb'"),
        ("lmdb://./never?durabilty=full", "did you mean 'durability'"),
        ("lmdb://./never?durability=some", "durability in the url must be full or relaxed"),
        ("lmdb://./never?keep=long", "keep in the url must be a number"),
        ("lmdb://./never?map_size=5", "map_size in the url must be at least"),
        ("lmdb://", "names no directory"),
        ("amqp://host?store=redis://host", r"unknown option 'store' of an amqp:// url; known are"),
        ("memory://?kep=5", "did you mean 'keep'"),
        ("memory://?keep=-1", "keep in the url must be a number"),
    ],
)
def test_a_bad_url_is_refused_where_it_is_written(
    url: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidOption, match=sentence):
        Tidemill(url)
    monkeypatch.setenv("TIDEMILL_URL", url)
    with pytest.raises(InvalidOption, match=sentence):
        Tidemill()
    Tidemill("lmdb://./good")
    assert list(tmp_path.iterdir()) == []  # nothing was opened for it


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        ({"hold": 60, "on_conflict": "replace"}, "^hold .*'replace'"),
        ({"hold": 60, "on_conflict": "replace"}, "^hold refuses .*'replace'"),
        ({"max_wait": 60}, "^max_wait is .*'replace'"),
        ({"hold": -1}, "^hold "),
        ({"on_conflict": "replace", "max_wait": "5"}, "^max_wait "),
        ({"on_conflict": "ignore"}, "^on_conflict .* keep, reject, replace, merge"),
    ],
)
def test_rules_of_a_key_that_cannot_be_used(rules: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidOption, match=sentence):
        Key("k", **rules)


def test_a_task_is_throttled_or_debounced_as_it_asks(mill: Tidemill) -> None:
    once = Key(lambda size: f"k{size}", hold=dt.timedelta(minutes=1))
    throttled = mill.task(key=once)(work)
    first = throttled.enqueue(1)
    run_all(mill)
    again = throttled.enqueue(1)
    assert (again.id, again.placed, again.result(0)) == (first.id, "kept", 1)
    assert throttled.enqueue(2).placed == "created"
    debounced = throttled.using(key=Key("d", on_conflict="replace", max_wait=0.01), delay=5)
    debounced.enqueue(3)
    assert debounced.enqueue(4).placed == "replaced"
    orders = mill.queue("orders")
    orders.put("a", key=Key("o", hold=60))
    with orders.get(timeout=5):
        pass
    assert orders.put("b", key="o").placed == "kept"
    assert orders.size() == 0


def test_a_broker_that_cannot_hold_keys_says_so(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(mill.broker), "features", mill.broker.features - {Feature.UNIQUE})
    with pytest.raises(FeatureMissing, match=r"hold= .* needs the feature unique"):
        mill.task(work).using(key=Key("k", hold=5)).enqueue(1)
    Tidemill(sync=True).task(name="work", key=Key("k", hold=5))(work).enqueue(1)


def test_a_call_by_name_is_the_tasks_own(mill: Tidemill) -> None:
    task = mill.task(name="job", queue="q")(work)
    by_name, by_task = mill.call("job", 1, name="b"), task.call(1, name="b")
    assert repr(by_name) == repr(by_task) == "job(1, name='b')"
    assert by_name.options == by_task.options
    assert mill.enqueue(by_name.using(priority=5)).refresh().envelope.queue == "q"
    with pytest.raises(TypeError):
        mill.enqueue(mill.call("job"))  # as a step of a chain it may yet get an argument
    with pytest.raises(TypeError):
        mill.call("job", 1, "b", 3)
    with pytest.raises(InvalidOption, match=r"'jbo' is no task .*did you mean 'job'"):
        mill.enqueue(mill.call("jbo", 1))


def test_a_dotted_path_needs_leave(mill: Tidemill) -> None:
    with pytest.raises(InvalidOption, match=r"'math.copysign' is no task.*allow_imports"):
        mill.enqueue("math.copysign", 2, -2)
    with pytest.raises(InvalidOption, match="a dotted path, not 5"):
        mill.enqueue(5)  # type: ignore[call-overload]
    with pytest.raises(InvalidOption, match="already has its arguments"):
        mill.enqueue(mill.task(work).call(1), 2)  # type: ignore[call-overload]
    assert Tidemill("memory://", allow_imports=["math.*"]).enqueue("math.copysign", 2, -2).id


def test_the_default_url_is_found_upward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("TIDEMILL_URL", raising=False)
    deep = tmp_path / "project" / "src" / "deep"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    assert Tidemill().url == f"lmdb://{deep}/.tidemill"
    (tmp_path / "project" / ".git").mkdir()
    assert Tidemill().url == f"lmdb://{tmp_path}/project/.tidemill"
    (tmp_path / "project" / "src" / "pyproject.toml").touch()
    mill = Tidemill()
    assert mill.url == f"lmdb://{tmp_path}/project/src/.tidemill"
    with caplog.at_level("INFO", "tidemill"):
        assert mill.queues() == []
    assert str(tmp_path / "project/src/.tidemill") in caplog.text  # the path is logged
    mill.close()
    monkeypatch.setenv("TIDEMILL_URL", "memory://")
    assert Tidemill().url == "memory://"
    assert Tidemill(f"lmdb://{tmp_path}/x").url == f"lmdb://{tmp_path}/x"


def test_a_task_inside_a_function_is_warned_about_once_if_workers_are_other_processes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def declare(mill: Tidemill, **options: Any) -> Any:
        @mill.task(**options)
        def inner() -> None: ...

        return inner

    said = "inside a function, so a worker"
    with Tidemill(f"lmdb://{tmp_path}/store") as mill:
        # when a process without a worker enqueues it, then it says so once
        task = declare(mill)
        task.enqueue()
        mill.enqueue_many([task.call(), task.call()])
        assert caplog.text.count(said) == 1
        assert ".declare.inner is declared inside" in caplog.text
        # but not where the name says that it is meant
        declare(mill, name="meant").enqueue()
        assert caplog.text.count(said) == 1
    # nor where this process runs the jobs
    caplog.clear()
    with Tidemill(f"lmdb://{tmp_path}/other") as mill, worker(mill):
        assert declare(mill).enqueue().result(timeout=30) is None
    for here in (Tidemill("memory://"), Tidemill(f"lmdb://{tmp_path}/third", sync=True)):
        declare(here).enqueue()
    assert said not in caplog.text


def test_the_times_of_a_key_are_seconds_whatever_was_given() -> None:
    key = Key("k", hold=dt.timedelta(0), max_wait=dt.timedelta(0))
    assert (key.hold, key.max_wait) == (0.0, 0.0)


def test_a_rule_of_a_key_beside_the_key_is_told_where_it_goes(mill: Tidemill) -> None:
    wrong: Any = {"key": "k", "on_conflict": "reject"}
    with pytest.raises(InvalidOption, match=r"key=Key\(…, on_conflict=…\)"):
        mill.task(**wrong)
