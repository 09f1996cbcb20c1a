"""The access log has a line for each request, and steps of workers only when asked for."""

from __future__ import annotations

import asyncio
import io
from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.server.http.access_log import AccessLog


def request(path: str, status: int = 200) -> Any:
    scope = {"method": "POST", "raw_path": path.encode()}
    return SimpleNamespace(scope=scope, status=status, address="::1", name="", id="x")


def lines(*requests: Any, **options: bool) -> list[str]:
    """The paths that a log has of these requests."""

    async def log() -> str:
        stream = io.StringIO()
        access_log = AccessLog(stream, **options)
        for made in requests:
            access_log.add(made, 0.001)
        access_log.flush()
        return stream.getvalue()

    return [line.split()[3] for line in asyncio.run(log()).splitlines()]


@pytest.mark.parametrize("name", ["exchange", "wait", "present", "tick"])
def test_a_step_of_a_worker_has_a_line_only_if_asked_for_or_refused(name: str) -> None:
    step, put = request(f"/v1/broker/{name}"), request("/v1/broker/put")
    assert lines(step, put) == ["/v1/broker/put"]
    assert lines(step, put, steps=True) == [f"/v1/broker/{name}", "/v1/broker/put"]
    assert lines(request(f"/v1/broker/{name}", 403)) == [f"/v1/broker/{name}"]
