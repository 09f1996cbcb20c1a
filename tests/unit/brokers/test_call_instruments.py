"""Instruments see every call of the brokers opened after them, and of no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tidemill.brokers.registry import instrument_calls, open_broker
from tidemill.core.envelope import Envelope


def counter(seen: list[str]) -> Callable[[str, Callable[..., Any]], Callable[..., Any]]:
    """An instrument that notes the name of each call."""

    def count(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return call(*args, **kwargs)

        return counted

    return count


def test_an_instrument_sees_each_call_of_a_broker_by_name() -> None:
    seen: list[str] = []
    before = open_broker("memory://")
    undo = instrument_calls(counter(seen))
    try:
        broker = open_broker("memory://")
    finally:
        undo()
    after = open_broker("memory://")

    for one in (before, broker, after):
        one.put([Envelope(id="a")])
    assert broker.get("a") is not None
    assert seen == ["put", "get"]
