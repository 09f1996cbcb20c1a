"""Requests that the dashboard refuses, and the headers of its answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dashboard_desk import Visitor, read

from tidemill import InvalidOption, Tidemill
from tidemill.dashboard.dashboard import Dashboard
from tidemill.dashboard.http import MOST_BODY
from tidemill.dashboard.roles import Role, User
from tidemill.dashboard.security import Login

HOSTILE = "<script>alert(1)</script>\"'&"
PAUSE = "/queues/mail/pause"


@pytest.fixture
def mill() -> Iterator[Tidemill]:
    with Tidemill("memory://") as mill:
        mill.queue("mail").put("hello")
        yield mill


@pytest.fixture
def anna(mill: Tidemill) -> Visitor:
    return Visitor(mill)


def is_paused(anna: Visitor) -> bool:
    [row] = anna.dashboard.mill.queues()
    return row.paused


def test_each_answer_forbids_scripts_of_others_frames_and_sniffing(anna: Visitor) -> None:
    # case S13
    for path in ("/", "/nowhere", "/static/dashboard.js", "/static/nothing"):
        response = anna.send("GET", path)
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "same-origin"


@pytest.mark.parametrize("path", ["/", "/queues", "/queues/mail", "/workers", "/audit", "/help"])
def test_no_page_has_inline_scripts_styles_or_links_elsewhere(anna: Visitor, path: str) -> None:
    text = anna.get(path)
    assert " style=" not in text
    assert "<style" not in text
    assert "javascript:" not in text
    assert " onclick=" not in text
    assert "<script>" not in text
    assert "https://" not in text
    assert "http://" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")


def test_a_form_of_a_page_acts(anna: Visitor) -> None:
    assert anna.act(PAUSE) == ("ok: Queue mail is paused: running jobs go on, no other job starts.")
    assert is_paused(anna)


@pytest.mark.parametrize(
    ("headers", "acts"),
    [
        ({"sec-fetch-site": "same-origin"}, True),
        ({"sec-fetch-site": "none"}, True),  # the user has sent the form again
        ({"sec-fetch-site": "same-origin", "origin": "https://outside.example"}, True),  # a proxy
        ({"origin": "http://jobs.example"}, True),  # a browser sends only this to http://
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "same-site"}, False),
        ({"sec-fetch-site": "cross-site", "origin": "http://jobs.example"}, False),
        ({"origin": "https://evil.example"}, False),
        ({"origin": "https://jobs.example.evil.example"}, False),
        ({"origin": "http://jobs.example:8080"}, False),
        ({"origin": "null"}, False),
        ({"origin": "null", "host": ""}, False),
        ({"origin": "http://", "host": ""}, False),
        ({}, False),
    ],
    ids=str,
)
def test_a_form_acts_only_from_a_page_of_this_site(
    anna: Visitor, headers: dict[str, str], acts: bool
) -> None:  # case S13
    sent = {"sec-fetch-site": "", "host": "jobs.example", **headers}
    answer = anna.send("POST", PAUSE, {"back": "/queues"}, sent)
    assert answer.status_code == (303 if acts else 403)
    assert is_paused(anna) == acts


def test_a_login_is_refused_from_a_page_of_another_site(mill: Tidemill) -> None:
    found = Login(User, "token")
    visitor = Visitor(Dashboard(mill, extra=found.routes.list), None)
    assert visitor.post("/login", token="anna").headers["location"] == "/"
    assert visitor.cookies["token"] == "anna"
    other = {"sec-fetch-site": "cross-site"}
    assert visitor.send("POST", "/login", {"token": "berta"}, other).status_code == 403
    assert visitor.cookies["token"] == "anna"


def test_two_processes_with_one_secret_show_each_others_messages(mill: Tidemill) -> None:
    one, other = (Visitor(Dashboard(mill, secret="s" * 32)) for _ in range(2))
    one.post(PAUSE)
    other.cookies = one.cookies
    assert "is paused: running" in other.get("/queues")


@pytest.mark.parametrize(
    ("path", "least"),
    [
        (PAUSE, Role.OPERATOR),
        ("/queues/mail/resume", Role.OPERATOR),
        ("/queues/pause", Role.OPERATOR),
        ("/queues/mail/purge", Role.ADMIN),
        ("/queues/mail/restore", Role.ADMIN),
        ("/queues/mail/bounds", Role.ADMIN),
        ("/workers/nobody/stop", Role.ADMIN),
    ],
)
def test_an_action_needs_its_role(mill: Tidemill, path: str, least: Role) -> None:  # case S5
    for role in Role:
        visitor = Visitor(mill, User("anna", role))
        status = 303 if role >= least else 403
        visitor.post(path, status, back="/queues")


def test_a_viewer_sees_no_buttons_of_actions(mill: Tidemill) -> None:
    text = Visitor(mill, User("anna", Role.VIEWER)).get("/queues/mail")
    assert 'method="post"' not in text
    assert 'method="post"' in Visitor(mill).get("/queues/mail")


def test_a_stranger_gets_no_page(mill: Tidemill) -> None:
    assert "mail" not in Visitor(mill, None).get("/queues", 403)


@pytest.mark.parametrize("name", ["a/b", "..", ".", "a~2Fb", "ü b?c#d%2F", HOSTILE])
def test_a_queue_of_any_name_has_its_page_and_its_actions(mill: Tidemill, name: str) -> None:
    mill.queue(name).put("hello")
    anna = Visitor(mill)
    text = anna.get(anna.dashboard_path(name))
    assert "Facts" in text
    assert anna.act(f"{anna.dashboard_path(name)}/pause").startswith("ok: ")
    assert {row.name for row in mill.queues() if row.paused} == {name}


@pytest.mark.parametrize(
    "back",
    ["//evil.example/", "https://evil.example/", "/\\evil", "/a\r\nset-cookie: a=b", "/../x", "x"],
)
def test_a_form_leads_back_only_into_the_dashboard(anna: Visitor, back: str) -> None:
    assert anna.post(PAUSE, back=back).headers["location"] == "/queues"


def test_a_form_leads_back_to_its_page(mill: Tidemill) -> None:
    anna = Visitor(mill, root="/jobs")
    here = "/jobs/queues?sort=name"
    assert anna.post(PAUSE, back=here).headers["location"] == here
    assert anna.post(PAUSE, back="/queues").headers["location"] == "/jobs/queues"


def test_a_message_shows_once_and_cannot_be_forged(anna: Visitor) -> None:
    anna.post(PAUSE)
    assert "is paused: running" in anna.get("/queues")
    assert "is paused: running" not in anna.get("/queues")
    anna.cookies["tidemill_flash"] = "W1sib2siLCJmb3JnZWQiXV0.x"
    assert "forged" not in anna.get("/queues")


def test_a_purge_needs_the_name_typed(anna: Visitor) -> None:
    assert anna.act("/queues/mail/purge", confirm="mial", back="/queues") == (
        "error: to confirm, type 'mail' exactly; nothing was changed"
    )
    assert anna.dashboard.mill.queues()[0].ready == 1
    assert anna.act("/queues/mail/purge", confirm="mail") == (
        "ok: 1 job was deleted from queue mail."
    )
    assert anna.dashboard.mill.queues()[0].ready == 0


@pytest.mark.parametrize(
    ("query", "body", "status", "sentence"),
    [
        ("", b"a" * (MOST_BODY + 1), 413, "1,048,576 bytes"),
        ("", b"&".join([b"a=1"] * 3000), 413, "2,000 fields"),
        ("a" * 20_000, b"", 414, "16,384 characters"),
    ],
    ids=["form", "fields", "query"],
)
def test_a_request_that_is_too_large_is_refused(
    anna: Visitor, query: str, body: bytes, status: int, sentence: str
) -> None:
    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    answer = anna.dashboard.handle(scope | {"query_string": query.encode()}, anna.user, body)
    assert answer.status_code == status
    assert sentence in read(answer)


def test_a_strange_request_gets_an_answer(anna: Visitor) -> None:
    for method, path, status in [
        ("DELETE", "/queues", 405),
        ("POST", "/queues", 403),
        ("GET", "/queues/none", 404),
        ("GET", "/queues?sort=%00", 400),
        ("GET", "/queues?name=%ff%00", 200),
        ("GET", "/?over=forever", 200),
        ("GET", "/audit?before=x", 200),
        ("GET", "/static/../dashboard.py", 404),
        ("GET", "/static/" + "a" * 5000, 404),
        ("HEAD", "/queues", 200),
    ]:
        assert anna.send(method, path).status_code == status, path
    assert bytes(anna.last.body) == b""


def test_a_browser_keeps_the_static_file_of_a_version(anna: Visitor) -> None:
    href = anna.get("/").partition('href="/static/dashboard.css?')[2].partition('"')[0]
    response = anna.send("GET", f"/static/dashboard.css?{href}")
    assert "immutable" in response.headers["cache-control"]
    assert response.headers["content-type"] == "text/css; charset=utf-8"
    assert anna.send("GET", "/static/dashboard.css").headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("option", ["see_arguments", "edit_jobs"])
def test_an_unknown_role_is_refused_with_its_option(option: str) -> None:
    with pytest.raises(InvalidOption, match=f"{option} must be one of viewer, operator, admin"):
        Dashboard(Tidemill("memory://"), **{option: "admn"})  # type: ignore[arg-type]
