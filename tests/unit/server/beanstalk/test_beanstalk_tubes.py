"""The tubes of the beanstalk port: when they are forgotten, and what the sweep costs."""

from __future__ import annotations

import pytest

from tidemill.server.beanstalk import client as tubes
from tidemill.server.beanstalk.client import Tubes


def test_new_tubes_beside_many_in_use_cost_few_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    # given more tubes in use than are kept for their counters
    monkeypatch.setattr(tubes, "KEPT", 100)
    looks = 0
    forget = Tubes._forget

    def counted(self: Tubes) -> None:
        nonlocal looks
        looks += 1
        forget(self)

    monkeypatch.setattr(Tubes, "_forget", counted)
    known = Tubes()
    # when a thousand are made, each in use
    for number in range(1000):
        known[f"t{number}"].using = 1
    # then all are there, and few looks were made for those that nobody uses
    assert len(known.in_use()) == 1001
    assert looks <= 4


def test_unused_tubes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tubes, "KEPT", 100)
    known = Tubes()
    for number in range(1000):
        assert known[f"t{number}"].name == f"t{number}"
    assert len(known.places()) <= 102
    assert next(iter(known.places())) == "default"
