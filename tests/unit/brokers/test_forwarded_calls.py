"""Calls of the contract that only pass their arguments on."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.brokers.shared.forwarded import forwarded_to


class Contract:
    def get(self, job_id: str, *, late: bool = False) -> Any: ...


class Broker:
    get = forwarded_to(Contract.get, lambda broker, **given: given)


def test_a_call_passes_its_arguments_on_by_their_names() -> None:
    assert Broker().get("a") == Broker().get(job_id="a") == {"job_id": "a"}
    assert Broker().get("a", late=True) == {"job_id": "a", "late": True}


def test_a_call_with_too_many_arguments_is_refused() -> None:
    get: Any = Broker().get
    for surplus in (("b",), ("b", "c")):
        with pytest.raises(TypeError, match=r"^get\(\) takes 1 positional argument"):
            get("a", *surplus)
