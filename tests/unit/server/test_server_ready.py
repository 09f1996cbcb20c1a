"""/ready: whether the store answers, and the server goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tidemill.errors import BrokerUnavailable
from tidemill.server.http import application
from tidemill.server.http.request_pipeline import RequestPipeline
from tidemill.server.settings import Settings


def served(info: Callable[[], Any]) -> tuple[RequestPipeline, asyncio.Event]:
    """The application on a store that says this of itself; and what says that it is to end."""

    async def run(call: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(call)

    broker = SimpleNamespace(info=info, url="fake://", features=frozenset())
    backend: Any = SimpleNamespace(
        mill=SimpleNamespace(broker=broker),
        run=run,
        settings=Settings(dashboard=False),
        refusal=lambda facts: facts.get("puts_refused", ""),
        stopping=asyncio.Event(),
        waits=None,
    )
    return application.make_app(backend), backend.stopping


async def ask(pipeline: RequestPipeline, path: str) -> tuple[int, Any]:
    """The status and the document of an answer."""
    said: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        said.append(message)

    scope = {
        "type": "http", "method": "GET", "path": path, "raw_path": path.encode(),
        "query_string": b"", "headers": [(b"host", b"localhost")], "root_path": "",
    }  # fmt: skip
    await pipeline(scope, receive, send)
    return said[0]["status"], json.loads(said[1]["body"])


def test_a_server_is_ready_while_its_store_answers() -> None:
    away = False

    def info() -> dict[str, Any]:
        if away:
            raise BrokerUnavailable("it is away")
        return {}

    async def main() -> None:
        nonlocal away
        pipeline, stopping = served(info)
        assert await ask(pipeline, "/ready") == (200, {"status": "ready"})
        away = True
        status, problem = await ask(pipeline, "/ready")
        assert (status, problem["detail"]) == (503, "it is away")
        assert (await ask(pipeline, "/health"))[0] == 200  # it serves all the same
        away = False
        assert (await ask(pipeline, "/ready"))[0] == 200
        stopping.set()
        status, problem = await ask(pipeline, "/ready")
        assert (status, problem["detail"]) == (503, "the server is shutting down")

    asyncio.run(main())
