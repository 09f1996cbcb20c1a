"""The dashboard inside sites of others: ASGI and WSGI."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import httpx
import pytest
from dashboard_desk import Reader
from fastapi import FastAPI
from flask import Flask
from starlette.applications import Starlette
from starlette.routing import Mount
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import Client

from tidemill import Tidemill
from tidemill.dashboard import User, asgi, wsgi
from tidemill.dashboard import look as look_module
from tidemill.dashboard.dashboard import AsgiDashboard
from tidemill.errors import BrokerUnavailable


@pytest.fixture
def mill(mill: Tidemill) -> Tidemill:
    mill.queue("a/b").put("hello")
    return mill


def who(scope: Any) -> User | None:
    headers = dict(scope["headers"])
    name = headers.get(b"x-user", b"").decode()
    return User(name) if name else None


async def who_later(scope: Any) -> User | None:
    await asyncio.sleep(0)
    return who(scope)


@pytest.fixture(params=["fastapi", "starlette", "bare"])
def site(request: pytest.FixtureRequest, mill: Tidemill) -> Any:
    app = asgi(mill, user=who_later if request.param == "starlette" else who)
    if request.param == "fastapi":
        site = FastAPI()
        site.mount("/jobs", app)
        return site
    if request.param == "starlette":
        return Starlette(routes=[Mount("/jobs", app)])
    return app


def visit(site: Any, user: str = "anna") -> httpx.AsyncClient:
    prefix = "" if isinstance(site, AsgiDashboard) else "/jobs"
    headers = {"x-user": user} if user else {}
    transport = httpx.ASGITransport(site)
    return httpx.AsyncClient(
        transport=transport, base_url=f"http://shop.example{prefix}", headers=headers
    )


def test_an_asgi_site_shows_the_pages_with_its_own_paths(site: Any) -> None:
    async def run() -> None:
        async with visit(site) as client:
            page = await client.get("/")
            assert page.status_code == 200
            links = re.findall(r'(?:href|src)="(/[^"]*)"', page.text)
            root = client.base_url.path.rstrip("/")
            assert links
            assert all(link.startswith(f"{root}/") for link in links)
            for link in links:
                found = await client.get(f"http://shop.example{link}")
                assert found.status_code in (200, 404 if "/jobs?q=" in link else 200), link

    asyncio.run(run())


def test_an_asgi_site_acts_once_it_knows_the_user(site: Any, mill: Tidemill) -> None:
    async def run() -> None:
        async with visit(site) as client:
            page = await client.get("/queues")
            action = re.search(r'action="([^"]*/pause)"', page.text)
            assert action
            url = f"http://shop.example{action[1]}"
            refused = await client.post(url)
            done = await client.post(url, headers={"origin": "http://shop.example"})
            assert (refused.status_code, done.status_code) == (403, 303)
        async with visit(site, "") as client:
            assert (await client.get("/queues")).status_code == 403

    asyncio.run(run())
    assert [row.paused for row in mill.queues()] == [True]


def test_a_form_that_is_too_large_is_413(site: Any) -> None:
    async def run() -> int:
        async with visit(site) as client:
            return (
                await client.post("/queues/x/pause", data={"back": "a" * (2 << 20)})
            ).status_code

    assert asyncio.run(run()) == 413


# -- news ------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_module, "EVERY", 0.02)


@pytest.mark.usefixtures("quick")
def test_news_come_to_all_viewers_from_one_look(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    stats = mill.broker.stats

    def counted() -> Any:
        nonlocal looks
        looks += 1
        return stats()

    monkeypatch.setattr(mill.broker, "stats", counted)

    async def run() -> None:
        app = asgi(mill, user=who)
        viewers = [Reader(app, "/live") for _ in range(20)]
        for viewer in viewers:
            assert (await viewer.part()).startswith(b": ")
        while not app.dashboard.news._latest:
            await asyncio.sleep(0.01)
        before, began = looks, time.monotonic()
        await mill.queue("a/b").aput("more")
        for viewer in viewers:
            assert (await viewer.part()).startswith(b"event: changed\n")
        assert looks - before <= (time.monotonic() - began) / look_module.EVERY + 2
        for viewer in viewers:
            await viewer.leave()
        while not app.dashboard.news._looking.done():
            await asyncio.sleep(0.01)
        looked = looks
        await asyncio.sleep(5 * look_module.EVERY)  # nobody looks while nobody watches
        assert looks == looked

    asyncio.run(run())


@pytest.mark.usefixtures("quick")
def test_news_go_on_after_the_store_was_away(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats, is_away, failed = mill.broker.stats, True, asyncio.Event()

    def sometimes() -> Any:
        if is_away:
            loop.call_soon_threadsafe(failed.set)
            raise BrokerUnavailable("away")
        return stats()

    monkeypatch.setattr(mill.broker, "stats", sometimes)

    async def run() -> None:
        nonlocal is_away, loop
        loop = asyncio.get_running_loop()
        viewer = Reader(asgi(mill, user=who), "/live")
        assert (await viewer.part()).startswith(b": ")
        await failed.wait()
        is_away = False
        assert (await viewer.part()).startswith(b"event: changed\n")
        await viewer.leave()

    loop: Any = None
    asyncio.run(run())


def test_a_stranger_gets_no_stream(mill: Tidemill) -> None:
    async def run() -> int:
        viewer = Reader(asgi(mill, user=who), "/live", user="")
        await viewer.part()
        await viewer.task
        return viewer.status

    assert asyncio.run(run()) == 403


# -- WSGI ------------------------------------------------------------------------------------------


@pytest.fixture
def flask_client(mill: Tidemill) -> Client:
    def person(environ: dict[str, Any]) -> User | None:
        name = environ.get("HTTP_X_USER")
        return User(name) if name else None

    site = Flask("shop")
    pages = DispatcherMiddleware(site.wsgi_app, {"/jobs": wsgi(mill, user=person)})  # type: ignore[dict-item]
    return Client(pages)


def test_a_wsgi_site_shows_the_pages_and_acts(flask_client: Client, mill: Tidemill) -> None:
    headers = {"X-User": "anna"}
    page = flask_client.get("/jobs/queues", headers=headers)
    assert page.status_code == 200
    assert 'data-live="poll"' in page.text
    action = re.search(r'action="(/jobs/queues/[^"]*/pause)"', page.text)
    assert action
    form, ours = {"back": "/jobs/queues"}, {**headers, "Sec-Fetch-Site": "same-origin"}
    assert flask_client.post(action[1], data=form, headers=headers).status_code == 403
    done = flask_client.post(action[1], data=form, headers=ours)
    assert (done.status_code, done.headers["location"]) == (303, "/jobs/queues")
    assert [row.paused for row in mill.queues()] == [True]
    assert "is paused" in flask_client.get("/jobs/queues", headers=headers).text


def test_a_wsgi_site_refuses_nobody_and_large_forms(flask_client: Client) -> None:
    assert flask_client.get("/jobs/queues").status_code == 403
    large = {"back": "a" * (2 << 20)}
    assert flask_client.post("/jobs/queues/x/pause", data=large).status_code == 413


def test_a_wsgi_site_has_no_stream_and_says_so(flask_client: Client) -> None:
    assert flask_client.get("/jobs/live", headers={"X-User": "anna"}).status_code == 404
