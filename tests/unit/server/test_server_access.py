"""Tokens, roles, hosts and rates decide who may use the server."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from moved_clock import MovedClock

from tidemill import InvalidOption, Tidemill
from tidemill.server import tokens
from tidemill.server.http.access import Access, RateLimiter
from tidemill.server.http.problems import Problem
from tidemill.server.run import serve
from tidemill.server.settings import Settings, check
from tidemill.server.tokens import Role, Tokens


def test_the_file_holds_no_token(tmp_path: Path) -> None:  # case S9
    path = tmp_path / "tokens.json"
    secret = tokens.create(path, "ci", Role.OPERATOR)
    assert secret not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = Tokens(str(path)).find(secret)
    assert (found.name, found.rank) == ("ci", Role.OPERATOR)
    assert Tokens(str(path)).find(secret + "x") is None
    assert Tokens(str(path)).find("") is None


def test_a_revoked_token_is_refused_with_no_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # case S9
    path = tmp_path / "tokens.json"
    first = tokens.create(path, "first", Role.ADMIN)
    known = Tokens(str(path))
    second = tokens.create(path, "second", Role.VIEWER)
    tokens.revoke(path, "first")
    monkeypatch.setattr(tokens, "LOOK_EVERY", 0.0)
    assert known.find(first) is None
    assert known.find(second) is not None
    path.write_text("spoilt")
    assert known.find(second) is None


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b'"sha256": "', b'"sha256": "z', "must be 64 hexadecimal digits"),
        (b'"name": "odd"', b'"name": "\xe4"', "UTF-8"),
        (b'"orders"', b"", "queues: expected array of length >= 1"),
    ],
)
def test_a_file_with_a_mistake_lets_no_removed_token_in(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    old: bytes,
    new: bytes,
    why: str,
) -> None:
    # given three tokens
    monkeypatch.setattr(tokens, "LOOK_EVERY", 0.0)
    path = tmp_path / "tokens.json"
    kept, removed = (tokens.create(path, name, Role.ADMIN) for name in ("kept", "removed"))
    odd = tokens.create(path, "odd", Role.OPERATOR, queues=["orders"])
    known = Tokens(str(path))
    # when one is removed while another is spoilt by hand
    tokens.revoke(path, "removed")
    right = path.read_bytes()
    before, _, after = right.rpartition(old)
    path.write_bytes(before + new + after)
    # then no token gets in that does not stand there, or reaches more queues, and one line says why
    for _ in range(2):
        assert known.find(removed) is None
        assert known.find(kept) is not None
        found = known.find(odd)
        assert found is None or found.queues == ("orders",)
    assert len(caplog.records) == 1
    assert why in caplog.text
    with pytest.raises(InvalidOption, match=r"is not a file of tokens|must be 64"):
        tokens.read(path)
    # and a file that is right again counts
    path.write_bytes(right)
    assert known.find(odd) is not None


def test_a_file_that_cannot_be_read_keeps_the_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tokens, "LOOK_EVERY", 0.0)
    path = tmp_path / "tokens.json"
    secret = tokens.create(path, "a", Role.ADMIN)
    known = Tokens(str(path))
    path.rename(tmp_path / "away")
    assert known.find(secret) is not None
    assert known.find(secret) is not None
    assert len(caplog.records) == 1
    assert "cannot be read (No such file or directory)" in caplog.text


def test_a_changed_file_keeps_its_owner_and_mode(tmp_path: Path) -> None:
    path, link = tmp_path / "tokens.json", tmp_path / "link.json"
    tokens.create(path, "first", Role.ADMIN)
    path.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(path, 12345, 12346)
    link.symlink_to(path)
    owner = path.stat().st_uid, path.stat().st_gid
    tokens.create(link, "second", Role.ADMIN)
    tokens.revoke(path, "first")
    assert link.is_symlink()
    assert (path.stat().st_uid, path.stat().st_gid) == owner
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [token.name for token in tokens.read(path)] == ["second"]


def test_tokens_that_are_made_at_once_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: tokens.create(path, f"t{n}", Role.VIEWER), range(40)))
    assert {token.name for token in tokens.read(path)} == {f"t{n}" for n in range(40)}


def test_the_server_of_an_app_with_keys_needs_tokens() -> None:
    """Law 18: a signature says that somebody known to the server put the job."""
    with (
        Tidemill("memory://", secret_keys=["k" * 32]) as mill,
        pytest.raises(InvalidOption, match="the app has secret_keys, and the server would sign"),
    ):
        serve(mill, Settings(port=0))


def test_a_certificate_of_a_client_is_of_a_role() -> None:
    given: dict[str, Any] = {"tls_cert": "c", "tls_key": "k", "tls_ca": "a", "host": "0.0.0.0"}
    assert Access(check(Settings(**given))).identify("")[:2] == ("", Role.OPERATOR)
    assert Access(check(Settings(**given, tls_role="viewer"))).identify("")[1] is Role.VIEWER
    assert Access(check(Settings())).identify("")[1] is Role.ADMIN  # nobody else gets in
    with pytest.raises(InvalidOption, match="--tls-role must be viewer, operator or admin"):
        check(Settings(**given, tls_role="boss"))
    # and is refused where it would say nothing: without certificates, or beside tokens
    without: list[dict[str, Any]] = [{}, {"auth": "t.json"}, {**given, "auth": "t.json"}]
    for options in without:
        with pytest.raises(InvalidOption, match="--tls-role is the role of clients"):
            check(Settings(**options, tls_role="viewer"))


def test_a_token_expires(tmp_path: Path) -> None:  # case S9
    path = tmp_path / "tokens.json"
    over = tokens.create(path, "over", Role.ADMIN, expires=1.0)
    still = tokens.create(path, "still", Role.ADMIN, expires=4e9)
    known = Tokens(str(path))
    assert known.find(over) is None
    assert known.find(still) is not None


def test_two_tokens_cannot_have_the_same_name(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    tokens.create(path, "ci", Role.ADMIN)
    with pytest.raises(InvalidOption, match="a token 'ci' exists already"):
        tokens.create(path, "ci", Role.ADMIN)
    with pytest.raises(InvalidOption, match=r"there is no token 'cd' in .*; it has: ci"):
        tokens.revoke(path, "cd")


@pytest.mark.parametrize("text", ["", "[]", '{"tokens": [{"name": "a"}]}', '{"x": 1}'])
def test_an_invalid_file_of_tokens_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(text)
    with pytest.raises(InvalidOption, match="is not a file of tokens"):
        tokens.read(path)


def test_all_tokens_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constant time: by ``compare_digest``, with every one, whichever it is."""
    path = tmp_path / "tokens.json"
    secrets = [tokens.create(path, str(n), Role.ADMIN) for n in range(3)]
    known, seen = Tokens(str(path)), []
    compare = tokens.hmac.compare_digest
    monkeypatch.setattr(
        tokens.hmac, "compare_digest", lambda a, b: (seen.append(1), compare(a, b))[1]
    )
    known.find(secrets[0])
    assert len(seen) == 3


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.1", "example.org", ""])
def test_other_machines_need_tokens(host: str) -> None:  # case S10
    with pytest.raises(InvalidOption, match="give --auth FILE"):
        check(Settings(host=host))
    check(Settings(host=host, auth="tokens.json"))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.9.1"])
def test_this_machine_needs_no_tokens(host: str) -> None:
    check(Settings(host=host))


def test_tls_needs_a_certificate_and_a_key() -> None:
    with pytest.raises(InvalidOption, match="go together"):
        check(Settings(tls_cert="c.pem"))
    with pytest.raises(InvalidOption, match="give --tls-cert with it"):
        check(Settings(tls_ca="c.pem"))


@pytest.mark.parametrize(
    ("host", "good"),
    [
        ("localhost", True),
        ("LOCALHOST:8333", True),
        ("127.0.0.1:1", True),
        ("[::1]:8333", True),
        ("[::1]", True),
        ("jobs.internal", True),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example:80", False),
        ("[::1", False),
        ("", False),
    ],
)
def test_only_hosts_of_this_machine_are_accepted(host: str, good: bool) -> None:  # case S10
    door = Access(Settings(allow_hosts=("Jobs.Internal",)))
    if good:
        door.check_origin("GET", host, "", "")
        return
    with pytest.raises(Problem, match="accepts only localhost as Host"):
        door.check_origin("GET", host, "", "")


@pytest.mark.parametrize(
    ("origin", "site", "good"),
    [
        ("", "", True),
        ("http://localhost:8333", "same-origin", True),
        ("http://localhost:9999", "", False),
        ("null", "", False),
        ("http://evil.example", "", False),
        ("", "cross-site", False),
        ("", "same-site", False),
        ("", "none", True),
    ],
)
def test_only_pages_of_this_server_may_change_anything(origin: str, site: str, good: bool) -> None:
    # case S10
    door = Access(Settings())
    door.check_origin("GET", "localhost:8333", origin, site)  # nothing is changed
    if good:
        door.check_origin("POST", "localhost:8333", origin, site)
        return
    with pytest.raises(Problem, match="another site"):
        door.check_origin("POST", "localhost:8333", origin, site)


def test_a_client_may_send_so_many_requests_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    # case S14
    clock = MovedClock(monkeypatch, speed=0.0)
    rate = RateLimiter(10, burst=2)
    assert [rate.take("a"), rate.take("a")] == [0, 0]
    assert rate.take("a") == pytest.approx(0.1)
    assert rate.take("b") == 0  # each for itself
    clock.advance(0.1)
    assert rate.take("a") == 0
    assert rate.take("a") > 0


def test_a_rate_limiter_forgets_idle_clients() -> None:
    rate = RateLimiter(1)
    for n in range(RateLimiter.MOST + 10):
        rate.take(str(n))
    assert len(rate._buckets) == RateLimiter.MOST


def test_a_certificate_is_sent_for_pages_of_other_sites_too() -> None:
    known = Access(Settings(host="0.0.0.0", tls_cert="c", tls_key="k", tls_ca="ca"))
    known.check_origin("POST", "jobs.example", "https://jobs.example", "same-origin")
    known.check_origin("GET", "jobs.example", "https://other.example", "cross-site")
    with pytest.raises(Problem):
        known.check_origin("POST", "jobs.example", "https://other.example", "cross-site")
