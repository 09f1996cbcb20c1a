"""The dashboard of a real server: its pages, its login, and what the API keeps apart."""

from __future__ import annotations

import contextlib
import http.client
import re
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from servers.http import Answer, JobServer

from tidemill.server import tokens
from tidemill.server.tokens import Role

FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture(scope="module")
def server() -> Iterator[JobServer]:
    server = JobServer("--quiet")
    server.post("/v1/queues/mail/messages", "hello")
    yield server
    server.close()


@pytest.fixture(scope="module")
def auth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("auth") / "tokens"


@pytest.fixture(scope="module")
def guarded(auth: Path) -> Iterator[JobServer]:
    secret = tokens.create(auth, "boss", Role.ADMIN)
    server = JobServer("--quiet", "--auth", str(auth), "--see-arguments", "operator")
    server.post("/v1/queues/mail/messages", "x", headers={"Authorization": f"Bearer {secret}"})
    yield server
    server.close()


class Browser:
    """A browser with cookies, without a token in its headers; a proxy may demand a password."""

    def __init__(self, server: JobServer, authorization: str = "") -> None:
        self.server = server
        self.cookies: dict[str, str] = {}
        self.authorization = authorization

    def send(self, method: str, path: str, form: dict[str, str] | None = None) -> Answer:
        headers = {"Cookie": "; ".join(f"{k}={v}" for k, v in self.cookies.items())}
        headers |= {"Accept": "text/html", "Sec-Fetch-Site": "same-origin"}
        headers |= FORM if form is not None else {}
        headers |= {"Authorization": self.authorization} if self.authorization else {}
        body = urlencode(form).encode() if form is not None else None
        answer = self.server.request(method, path, body, headers=headers)
        for name, value in re.findall(
            r"(tidemill_\w+)=([^;,]*)", answer.headers.get("set-cookie", "")
        ):
            self.cookies[name] = value
        return answer

    def page(self, path: str) -> str:
        answer = self.send("GET", path)
        assert answer.status == 200, (answer.status, answer.data[-400:])
        return answer.data.decode()

    def post(self, path: str, **form: str) -> Answer:
        return self.send("POST", path, form)

    def log_in(self, secret: str) -> Answer:
        return self.post("/login", token=secret)


def test_an_open_server_shows_its_dashboard_to_this_machine(server: JobServer) -> None:
    browser = Browser(server)
    assert "/queues/mail" in browser.page("/")
    assert browser.post("/queues/mail/pause").status == 303
    assert server.get("/v1/queues/mail").json["paused"] is True


def test_a_page_of_another_site_cannot_use_an_open_server(server: JobServer) -> None:
    rebound = server.get("/", headers={"Host": "evil.example", "Accept": "text/html"})
    assert rebound.status == 403
    cross = {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example", **FORM}
    assert server.post("/queues/mail/pause", b"back=/", headers=cross).status == 403


def test_the_api_has_its_paths_and_its_problems(server: JobServer) -> None:
    assert b"A job server" in server.get("/v1/docs").data
    assert server.get("/health").json == {"status": "ok"}
    assert b"tidemill_" in server.get("/metrics", headers={"Accept": "text/html"}).data
    for path in ("/v1/nothing", "/nothing"):
        answer = server.get(path)
        assert (answer.status, answer.headers["content-type"]) == (404, "application/problem+json")
    assert b"<html" in Browser(server).send("GET", "/nothing").data


def test_without_a_dashboard_the_api_is_alone() -> None:
    server = JobServer("--quiet", "--no-dashboard")
    try:
        assert b"A job server" in server.get("/").data
        assert server.get("/queues", headers={"Accept": "text/html"}).status == 404
    finally:
        server.close()


def test_a_server_with_tokens_asks_for_one(guarded: JobServer, auth: Path) -> None:
    browser = Browser(guarded)
    asked = browser.send("GET", "/queues?sort=name")
    assert (asked.status, asked.headers["location"]) == (303, "/login?next=%2Fqueues%3Fsort%3Dname")
    form = browser.page("/login")
    assert "Log in to Tidemill" in form
    assert "<nav" not in form
    assert 'name="q"' not in form
    assert browser.log_in("tidemill_wrong").status == 403
    assert browser.log_in("wrong token; Path=/").status == 403
    secret = tokens.create(auth, "anna", Role.OPERATOR)
    time_limit = time.monotonic() + 30
    while (answer := browser.log_in(secret)).status != 303:  # the server reads the file again
        assert time.monotonic() < time_limit
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "anna" in browser.page("/queues?sort=name")
    assert browser.post("/queues/mail/pause").status == 303
    assert browser.post("/queues/mail/purge", confirm="mail").status == 403
    assert "anna paused queue" in " ".join(re.sub("<[^>]*>", " ", browser.page("/audit")).split())
    # when the token is revoked, then the cookie is worth nothing
    tokens.revoke(auth, "anna")
    # (the server closes the connection of a request that was under way)
    status = 0
    while status != 303:
        with contextlib.suppress(http.client.RemoteDisconnected, ConnectionResetError):
            status = browser.send("GET", "/queues").status
        assert time.monotonic() < time_limit + 30


def log_in_anew(browser: Browser, secret: str) -> None:
    """Log in with a token that the server may not have read yet."""
    until = time.monotonic() + 30
    while browser.log_in(secret).status != 303:
        assert time.monotonic() < until


def test_behind_a_proxy_with_a_password_the_cookie_counts(guarded: JobServer, auth: Path) -> None:
    # given a browser that answers the question of a proxy in each request
    browser = Browser(guarded, "Basic cHJveHk6c2VjcmV0")
    log_in_anew(browser, tokens.create(auth, "paula", Role.OPERATOR))
    # then the token of the login counts
    assert "paula" in browser.page("/queues")
    assert browser.post("/queues/mail/pause").status == 303
    assert browser.post("/queues/mail/resume").status == 303
    browser.post("/logout")
    assert browser.send("GET", "/queues").status == 303


def test_a_bearer_token_counts_before_the_cookie(guarded: JobServer, auth: Path) -> None:
    browser = Browser(guarded)
    log_in_anew(browser, tokens.create(auth, "carla", Role.VIEWER))
    other = Browser(guarded)
    secret = tokens.create(auth, "dora", Role.OPERATOR)
    log_in_anew(other, secret)  # now the server knows this token
    browser.authorization = f"Bearer {secret}"
    assert "dora" in browser.page("/queues")
    browser.authorization = "Bearer tidemill_wrong"
    assert browser.send("GET", "/queues").status == 303


def test_the_cookie_of_the_dashboard_does_not_open_the_api(guarded: JobServer, auth: Path) -> None:
    secret = tokens.create(auth, "berta", Role.ADMIN)
    browser = Browser(guarded)
    log_in_anew(browser, secret)
    assert browser.send("GET", "/v1/queues").status == 401
    assert browser.page("/queues")
    browser.post("/logout")
    assert browser.send("GET", "/queues").status == 303


def test_a_token_for_some_queues_cannot_log_in(guarded: JobServer, auth: Path) -> None:
    secret = tokens.create(auth, "carl", Role.ADMIN, queues=["mail"])
    browser = Browser(guarded)
    until = time.monotonic() + 30
    while (answer := browser.log_in(secret)).status == 403:
        assert time.monotonic() < until
    assert answer.status == 400
    assert b"is for some queues only" in answer.data
    header = {"Authorization": f"Bearer {secret}", "Accept": "text/html"}
    assert guarded.get("/queues", headers=header).status == 303


def test_a_guarded_server_streams_to_no_stranger(guarded: JobServer) -> None:
    assert guarded.get("/live").status == 401


def test_a_server_ends_at_once_though_viewers_watch() -> None:
    server = JobServer("--quiet")
    try:
        with server.stream("/live") as events:
            server.post("/v1/queues/mail/messages", "hello")
            assert next(events)[0] == "changed"
            began = time.monotonic()
            assert server.end() == 0
        assert time.monotonic() - began < 20  # --shutdown-timeout is 30 s
    finally:
        server.close()


def test_arguments_are_for_the_roles_that_may_see_them(guarded: JobServer, auth: Path) -> None:
    for name, role, sees in (("vera", Role.VIEWER, "no"), ("olga", Role.OPERATOR, "yes")):
        browser = Browser(guarded)
        log_in_anew(browser, tokens.create(auth, name, role))
        assert f"<dt>sees arguments</dt><dd>{sees}</dd>" in browser.page("/settings")
