"""Long answers, such as exports: made as fast as they are read, and no longer than that."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import Generator
from typing import Any

import pytest
from dashboard_desk import Reader, Visitor
from werkzeug.test import Client

from tidemill import Tidemill
from tidemill.dashboard import asgi, wsgi
from tidemill.dashboard import jobs as jobs_module
from tidemill.dashboard.dashboard import parts_of
from tidemill.dashboard.http import LongResponse
from tidemill.dashboard.job_search import pages_of
from tidemill.dashboard.routes import Routes


class Source:
    """A body without an end. It counts its parts, and notes that it was closed."""

    def __init__(self, part: bytes = b"x" * 1000) -> None:
        self.part = part
        self.made = 0
        self.is_closed = False

    def body(self) -> Generator[bytes]:
        try:
            while True:
                self.made += 1
                yield self.part
        finally:
            self.is_closed = True

    def routes(self) -> list[Any]:
        routes = Routes()
        routes.get("/export")(lambda page: LongResponse(self.body(), {}, "text/csv"))
        return routes.list


def test_a_part_is_made_when_the_part_before_it_was_taken(mill: Tidemill) -> None:
    source = Source()

    async def run() -> None:
        reader = Reader(asgi(mill, user=None, extra=source.routes()), "/export")
        for count in range(1, 4):
            await asyncio.wait_for(_until(lambda: reader.parts.qsize() > 0), 30)
            assert source.made == count
            await reader.part()
        await reader.leave()

    asyncio.run(run())


async def _until(check: Any) -> None:
    while not check():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("part", [b"x", b""], ids=["parts", "nothing found"])
def test_an_answer_ends_when_its_reader_goes(mill: Tidemill, part: bytes) -> None:
    source = Source(part)

    async def run() -> None:
        reader = Reader(asgi(mill, user=None, extra=source.routes()), "/export")
        await asyncio.wait_for(_until(lambda: source.made), 30)
        await reader.leave()  # in the middle of a part, or while the part is on its way
        assert source.is_closed

    asyncio.run(run())


def test_a_wsgi_server_closes_the_body(mill: Tidemill) -> None:
    source = Source()
    answer = Client(wsgi(mill, user=None, extra=source.routes())).get("/export", buffered=False)
    parts = answer.iter_encoded()
    assert next(parts) == source.part
    answer.close()
    assert source.is_closed


@pytest.mark.parametrize("query", ["", "args:7"])
def test_an_export_reads_a_page_of_the_store_for_each_part(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    monkeypatch.setattr(jobs_module, "pages_of", lambda *args: pages_of(*args, size=10))
    bodies = [f"number {n}" for n in range(45)]
    mill.queue("mail").put_many(bodies)
    count = sum("7" in body for body in bodies) if query else 45
    anna = Visitor(mill)
    lines = list(parts_of(anna.send("GET", f"/jobs.json?q={query}")))
    rows = [json.loads(line) for line in b"".join(lines).splitlines()]
    assert len(rows) == count
    parts = list(parts_of(anna.send("GET", f"/jobs.csv?q={query}")))
    table = list(csv.DictReader(io.StringIO(b"".join(parts).decode())))
    assert [row["id"] for row in table] == [row["id"] for row in rows]
    if not query:
        assert (len(lines), len(parts)) == (5, 5)


def test_an_export_that_the_store_cannot_answer_is_refused_before_it_begins(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = mill.broker.features - {"inspect"}
    monkeypatch.setattr(mill.broker, "features", features)
    assert "cannot" in Visitor(mill).get("/jobs.json", 501)
