"""``tidemill bind`` and ``unbind``, and bindings in ``queues`` and ``info``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tidemill import Tidemill
from tidemill.cli import main

pytestmark = pytest.mark.everyday


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"lmdb://{tmp_path}/store"
    with Tidemill(url) as mill:
        assert mill.broker.stats() == []  # makes the store
    return url


def call(url: str, *words: str) -> Result:
    return CliRunner().invoke(main, [*words, "--url", url])


def shown(url: str, *words: str) -> Any:
    return json.loads(call(url, *words, "--json").stdout)


def test_a_queue_is_bound_and_unbound(url: str) -> None:
    assert call(url, "bind", "mail", "orders.*").stdout == "mail is bound to orders.*\n"
    assert call(url, "bind", "mail", "orders.*").stdout == "mail is bound to orders.* already\n"
    with Tidemill(url) as mill:
        assert len(mill.publish("orders.new", 1)) == 1
    done = call(url, "unbind", "mail", "orders.*")
    assert (done.exit_code, done.stdout) == (0, "mail is bound to orders.* no more\n")
    with Tidemill(url) as mill:
        assert mill.publish("orders.new", 1) == []


def test_programs_get_the_bindings(url: str) -> None:
    assert shown(url, "bind", "mail", "b") == {"queue": "mail", "bindings": ["b"]}
    assert shown(url, "bind", "mail", "a") == {"queue": "mail", "bindings": ["a", "b"]}
    for verb in ("queues", "info"):
        (queue,) = shown(url, verb)["queues"]
        assert (queue["name"], queue["bindings"]) == ("mail", ["a", "b"])
    assert shown(url, "unbind", "mail", "a") == {"queue": "mail", "bindings": ["b"]}


def test_tables_show_bindings(url: str) -> None:
    call(url, "bind", "mail", "orders.*")
    for pattern in ("a", "b", "c", "d"):
        call(url, "bind", "audit", pattern)
    for verb in ("queues", "info"):
        text = call(url, verb).stdout
        assert "bound to orders.*" in text
        assert "bound to 4 patterns" in text


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (("unbind", "mail", "order.*"), 1, "not bound to 'order.*'; did you mean 'orders.*'?"),
        (("unbind", "other", "x"), 1, "queue 'other' is not bound to 'x'; it has no bindings"),
        (("bind", "mail", "a..b"), 2, "pattern 'a..b' has an empty word"),
    ],
)
def test_a_mistake_is_one_sentence(url: str, words: tuple[str, ...], code: int, why: str) -> None:
    call(url, "bind", "mail", "orders.*")
    done = call(url, *words)
    assert done.exit_code == code
    assert why in done.stderr


def test_a_broker_without_topics_refuses_a_binding() -> None:
    done = call("amqp://127.0.0.1:1/", "bind", "mail", "a")
    assert done.exit_code == 1
    assert "tidemill bind needs the feature topics, which amqp:// does not have" in done.stderr


@pytest.mark.parametrize("form", ["--url {}", "--url={}"])
def test_a_store_may_be_named_before_the_verb(url: str, form: str) -> None:
    words = form.format(url).split()
    for verb in (["bind", "mail", "orders.*"], ["schedule", "list"], ["queues"]):
        done = CliRunner().invoke(main, [*words, *verb])
        assert done.exit_code == 0, done.output


def test_a_store_without_a_verb_is_refused_with_an_example(url: str) -> None:
    done = CliRunner().invoke(main, ["--url", url])
    assert (done.exit_code, done.output.count("tidemill jobs --url URL")) == (2, 1)


def test_a_message_is_published(url: str) -> None:
    # Given two queues, of which one is bound to the topic.
    for queue, pattern in (("mail", "orders.*"), ("audit", "users.#")):
        call(url, "bind", queue, pattern)
    # When a message is published.
    put = shown(url, "publish", "orders.new", '{"order": 7}')
    # Then it lies in that queue.
    assert put["topic"] == "orders.new"
    assert [one["queue"] for one in put["messages"]] == ["mail"]
    with Tidemill(url) as mill:
        message = mill.queue("mail").get(timeout=0)
        assert (message.id, message.body) == (put["messages"][0]["id"], {"order": 7})
    assert call(url, "publish", "orders.new", "text").stdout.startswith("mail ")


def test_a_message_that_reaches_no_queue_is_told(url: str) -> None:
    done = call(url, "publish", "orders.new", "1")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "no queue is bound to orders.new" in done.stderr
    assert shown(url, "publish", "orders.new", "1") == {"topic": "orders.new", "messages": []}
    assert call(url, "publish", "orders.new", "1", "--mandatory").exit_code == 1
