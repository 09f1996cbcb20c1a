"""Who may what, over HTTP: roles, tokens for some queues, and arguments that are hidden."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from http_desk import HttpOwner

from tidemill import Limit, Tidemill, chain, group, this_job
from tidemill.brokers.contract.exchange import Want
from tidemill.brokers.contract.rpc import CALLS, MEDIA, PATH, PROTOCOL, VERSION
from tidemill.brokers.generic.audit import notes
from tidemill.server import tokens
from tidemill.server.http.api import ENDPOINTS
from tidemill.server.http.application import make_app
from tidemill.server.http.backend import Backend
from tidemill.server.http.endpoints import Endpoint, Stream
from tidemill.server.settings import Settings
from tidemill.server.tokens import Role
from tidemill.testing import run_all


class Answer(NamedTuple):
    """The answer to a request."""

    status: int
    data: bytes

    @property
    def json(self) -> Any:
        """The document."""
        return json.loads(self.data)

    @property
    def detail(self) -> str:
        """The sentence of a refusal."""
        return str(self.json["detail"])


class Server:
    """The application of a server, in this process and without a socket; it has tokens.

    ``token`` is the name of the token of all requests, one of ``TOKENS``: a role, perhaps with
    queues.
    """

    TOKENS = ("viewer", "operator", "admin", "viewer mine", "operator mine", "admin mine")

    def __init__(self, mill: Tidemill, folder: Path, **settings: Any) -> None:
        self.mill = mill
        self.token = "admin"
        auth = self._auth = folder / "tokens.json"
        self._secrets: dict[str, str] = {}
        for name in self.TOKENS:
            role, *queues = name.split()
            secret = tokens.create(auth, "-".join(name.split()), Role[role.upper()], queues=queues)
            self._secrets[name] = secret
        given = Settings(auth=str(auth), dashboard=False, **settings)
        self._runner = asyncio.Runner()
        self._backend = Backend(mill, given)
        self._runner.run(self._open())

    async def _open(self) -> None:
        await self._backend.open()
        self._app = make_app(self._backend)

    def close(self) -> None:
        self._backend.stop()
        self._runner.run(self._backend.close())
        self._runner.close()

    def revoke(self, name: str) -> None:
        """Revoke a token in a thread of a request, and wait until the server has noticed."""
        tokens.revoke(self._auth, name)

        async def sweep() -> None:
            self._app.sweep()

        asyncio.run_coroutine_threadsafe(sweep(), self._runner.get_loop()).result()

    def bearer(self, name: str) -> bytes:
        """The header Authorization of a token."""
        return f"Bearer {self._secrets[name]}".encode()

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """One request; ``body`` is bytes, or sent as JSON."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body)
        given = {"host": "localhost", "content-type": "application/json", **(headers or {})}
        lines = [(name.encode(), text.encode()) for name, text in given.items()]
        if self.token:
            lines.append((b"authorization", self.bearer(self.token)))
        return self.send(method, path, data.encode() if isinstance(data, str) else data, lines)

    def send(self, method: str, path: str, data: bytes, lines: list[tuple[bytes, bytes]]) -> Answer:
        """One request with these lines of its head."""
        return self._runner.run(self._send(method, path, data, lines))

    async def _send(
        self, method: str, path: str, data: bytes, lines: list[tuple[bytes, bytes]]
    ) -> Answer:
        said: list[Any] = []
        parts = [{"type": "http.request", "body": data, "more_body": False}]

        async def receive() -> Any:
            return parts.pop() if parts else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            said.append(message)

        plain, _, query = path.partition("?")
        scope = {
            "type": "http", "method": method, "path": plain, "raw_path": plain.encode(),
            "query_string": query.encode(), "headers": lines, "root_path": "",
        }  # fmt: skip
        await self._app(scope, receive, send)
        bodies = [it.get("body", b"") for it in said if it["type"] == "http.response.body"]
        return Answer(said[0]["status"], b"".join(bodies))

    def get(self, path: str) -> Answer:
        return self.ask("GET", path)

    def post(self, path: str, body: Any = None) -> Answer:
        return self.ask("POST", path, body)

    def rpc(self, name: str, body: bytes = b"\x80") -> Answer:
        """A call of the broker, without arguments unless some are given."""
        return self.ask("POST", PATH + name, body, {PROTOCOL: VERSION, "content-type": MEDIA})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Tidemill("memory://") as mill:
        server = Server(mill, tmp_path)
        yield server
        server.close()


# -- roles -----------------------------------------------------------------------------------------

SOME = {"{job_id}": "no-job", "{queue}": "no-queue", "{receipt}": "no-receipt"}
OTHERS = {"{name}": "no-name", "{topic}": "a.b", "{pattern}": "a.*"}


def path_of(endpoint: Endpoint) -> str:
    path = endpoint.path
    for part, name in (SOME | OTHERS).items():
        path = path.replace(part, name)
    return path


def endpoint_id(endpoint: Endpoint) -> str:
    return f"{endpoint.method} {endpoint.path}"


def refusals(server: Server, role: Role, below: bool) -> dict[str, int]:
    """The endpoints and calls of a role, each with its status for this role or the role below."""
    server.token = Role(role - below).name.lower() if role > below else ""
    answers = {
        endpoint_id(one): server.ask(one.method, path_of(one), None if one.method == "GET" else {})
        for one in ENDPOINTS
        if one.role is role and (below or one.answer is not Stream)  # a stream has no end
    }
    for name, call in CALLS.items():
        if call.role == role.name.lower():
            answers[name] = server.rpc(name)
    return {what: answer.status for what, answer in answers.items()}


@pytest.mark.parametrize("role", list(Role))
def test_each_endpoint_and_call_refuses_the_role_below(server: Server, role: Role) -> None:
    # case M12, case W1, case S5
    expected = 401 if role is Role.VIEWER else 403
    found = refusals(server, role, below=True)
    assert {what: status for what, status in found.items() if status != expected} == {}
    # and lets the role itself in
    found = refusals(server, role, below=False)
    assert {what: status for what, status in found.items() if status in (401, 403)} == {}


@pytest.mark.parametrize("name", [b"host", b"authorization", b"origin", b"content-type"])
def test_a_request_that_repeats_a_header_is_refused(server: Server, name: bytes) -> None:
    # case M12, case S11: a proxy in front may have checked the first value
    lines = [(b"host", b"localhost"), (b"authorization", b"Bearer nix"), (b"origin", b"http://a")]
    lines += [(b"content-type", b"text/plain"), (name, dict(lines).get(name, b"application/json"))]
    for path in ("/v1/queues", "/health", "/v1/broker/hello"):
        answer = server.send("GET", path, b"", lines)
        assert (answer.status, f"header {name.decode()} twice" in answer.detail) == (400, True)


def test_a_request_may_repeat_a_header_that_is_a_list(server: Server) -> None:
    token = server.bearer("admin")
    lines = [(b"host", b"localhost"), (b"authorization", token), (b"accept", b"text/html")]
    lines.append((b"accept", b"application/json"))
    assert server.send("GET", "/v1/queues", b"", lines).status == 200
    # and of two codings none is overlooked
    lines += [(b"content-encoding", b"gzip"), (b"content-encoding", b"identity")]
    lines.append((b"content-length", b"3"))
    answer = server.send("POST", "/v1/queues/q/messages", b"abc", lines)
    assert answer.status == 415


def test_the_audit_list_has_what_operators_did(server: Server) -> None:
    mail = server.mill.queue("mail")
    first, second = mail.put(1), mail.put(2)
    server.token = "operator"
    server.post("/v1/queues/mail/pause")
    server.post("/v1/jobs/cancel", {"ids": [first.id]})  # as programs do with their own jobs
    server.post("/v1/matching/cancel", {"queue": "none"})  # which changes nothing
    server.post("/v1/matching/retry", {"state": ["cancelled"], "queue": "mail"})
    server.token = "admin"
    server.post("/v1/queues/mail/purge")
    server.post("/v1/queues/mail/restore", {})
    server.ask("PATCH", "/v1/queues/mail/limit", {"rate": "5/s"})
    schedule = {"task": "clean", "queue": "mail", "cron": "0 3 * * *"}
    for _ in range(2):  # the second call changes nothing
        server.ask("PUT", "/v1/schedules/nightly", schedule)
    server.ask("DELETE", "/v1/schedules/nightly")
    server.ask("DELETE", f"/v1/jobs/{second.id}")  # as programs do with their own jobs
    server.ask("DELETE", "/v1/queues/mail?force=true")
    found = [(note.who, note.what, note.target, note.count) for note in notes(server.mill.broker)]
    assert found[::-1] == [
        ("operator, HTTP API", "paused queue", "mail", 1),
        ("operator, HTTP API", "retried jobs", first.id, 1),
        ("admin, HTTP API", "purged queue", "mail", 2),
        ("admin, HTTP API", "restored queue", "mail", 2),
        ("admin, HTTP API", "changed queue limits", "mail", 1),
        ("admin, HTTP API", "added schedule", "nightly", 1),
        ("admin, HTTP API", "removed schedule", "nightly", 1),
        ("admin, HTTP API", "deleted queue", "mail", 1),
    ]


def test_an_act_whose_token_is_revoked_meanwhile_is_listed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "LOOK_EVERY", 0.0)
    set_queue = server.mill.broker.set_queue

    def pause_while_the_token_is_revoked(*args: Any, **options: Any) -> None:
        server.revoke("operator")
        set_queue(*args, **options)

    monkeypatch.setattr(server.mill.broker, "set_queue", pause_while_the_token_is_revoked)
    server.token = "operator"
    assert server.post("/v1/queues/mail/pause").status == 200
    found = [(note.who, note.what, note.target) for note in notes(server.mill.broker)]
    assert found == [("operator, HTTP API", "paused queue", "mail")]
    assert server.post("/v1/queues/mail/resume").status == 401


# -- tokens for some queues ------------------------------------------------------------------------


def test_a_token_for_a_queue_opens_no_call_beyond_the_queue(server: Server) -> None:  # case M12
    # case S6
    server.mill.queue("theirs").put(1, id="their-job")
    server.token = "admin mine"
    narrow = {"{job_id}": "their-job", "{queue}": "theirs"}
    answers = {}
    for one in ENDPOINTS:
        named = [part for part in narrow if part in one.path]
        if one.checks_queues or (not named and "{receipt}" in one.path):
            continue  # a body names the queues, or a receipt that is sealed for one token
        path = one.path
        for part, name in (narrow | OTHERS).items():
            path = path.replace(part, name)
        answers[endpoint_id(one)] = server.ask(one.method, path, None if one.body is None else {})
    answers |= {name: server.rpc(name) for name in CALLS}
    assert {what: it.status for what, it in answers.items() if it.status != 403} == {}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/jobs", {"queue": "mine", "task": "shop.pay", "limit": "0/s"}),
        ("POST", "/v1/jobs", {"queue": "mine", "body": 1, "limit": "0/s"}),
        ("POST", "/v1/jobs/batch", {"jobs": [{"queue": "mine", "body": 1, "limit": "0/s"}]}),
        ("PUT", "/v1/jobs/j", {"queue": "mine", "task": "shop.pay", "limit": "0/s"}),
        ("POST", "/v1/queues/mine/messages?limit=0/s", 1),
    ],
)
def test_a_token_for_a_queue_changes_no_limit(
    server: Server, method: str, path: str, body: Any
) -> None:  # case M12, case S6
    # given a task with a limit, which all queues share
    @server.mill.task(name="shop.pay", limit="5/s", queue="theirs")
    def pay() -> None: ...

    pay.enqueue()
    # when a token for another queue puts a job with another limit
    server.token = "admin mine"
    answer = server.ask(method, path, body)
    # then the job is refused, and the limit stays
    assert (answer.status, "a limit holds in all queues" in answer.detail) == (403, True)
    assert [one.terms.rate for one in server.mill.limits.list()] == [(5.0, 1.0)]
    # and a call with the limit that the code declares is accepted
    assert server.post("/v1/jobs", {"queue": "mine", "task": "shop.pay"}).status == 201
    assert [one.terms.rate for one in server.mill.limits.list()] == [(5.0, 1.0)]


class Groups(NamedTuple):
    """Three groups, by their ids: in the token's queue, in another queue, and in both."""

    mine: str
    theirs: str
    both: str


@pytest.fixture
def groups(server: Server) -> Groups:
    """Groups whose members have all failed."""

    @server.mill.task(name="shop.add", retries=0)
    def add(a: int) -> int:
        if a < 0:
            raise ValueError("negative")
        return a

    def in_queues(*queues: str) -> str:
        calls = [[add.call(a).using(queue=name) for a in (-1, 2)] for name in queues]
        made = group([add.call(-3).using(queue=queues[0]), *map(group, calls)])
        return server.mill.enqueue(made).id

    made = Groups(in_queues("mine"), in_queues("theirs"), in_queues("mine", "theirs"))
    run_all(server.mill)
    return made


def test_a_token_for_a_queue_acts_on_the_groups_whose_members_lie_there(
    server: Server, groups: Groups
) -> None:  # case M12, case S6
    server.token = "operator mine"
    job = f"/v1/jobs/{groups.mine}"
    assert server.get(job).json["state"] == "failed"
    assert server.get(f"{job}/result").json["state"] == "failed"
    # a retry runs the failed members again, nested ones, too, and a cancel stops them
    for act, state in (("retry", "ready"), ("cancel", "cancelled")):
        assert server.post(f"{job}/{act}", {} if act == "cancel" else None).status == 204
        members = server.get(f"/v1/jobs?queue=mine&group={groups.mine}").json["jobs"]
        assert sorted(it["state"] for it in members) == sorted([state, state, "succeeded"])


@pytest.mark.parametrize("which", ["theirs", "both"])
def test_a_token_for_a_queue_reads_no_group_with_members_elsewhere(
    server: Server, groups: Groups, which: str
) -> None:  # case M12, case S6
    server.token = "admin mine"
    job = f"/v1/jobs/{getattr(groups, which)}"
    answers = [server.get(job), server.get(f"{job}/result"), server.get(f"{job}/events")]
    answers += [server.post(f"{job}/{act}", {}) for act in ("retry", "cancel", "alter")]
    answers.append(server.ask("DELETE", job))
    assert {answer.status for answer in answers} == {403}
    assert "has jobs in other queues" in answers[0].detail
    # and a retry by queue leaves the members of the other queue alone
    server.post("/v1/queues/mine/retry", {})
    server.token = "admin"
    members = server.get("/v1/jobs?queue=theirs").json["jobs"]
    assert {it["state"] for it in members} == {"succeeded", "failed"}


@pytest.mark.parametrize("act", ["alter", "delete"])
@pytest.mark.parametrize("shape", [chain, lambda *calls: group(calls)], ids=["chain", "group"])
def test_a_token_for_a_queue_leaves_hooks_in_other_queues_alone(
    server: Server, act: str, shape: Any
) -> None:  # case M12, case S6
    # given a chain or group in the token's queue, with a hook in another queue
    @server.mill.task(name="shop.step")
    def step(before: Any = None) -> None: ...

    mine = [step.call().using(queue="mine") for _ in range(2)]
    made = shape(*mine).on_complete(step.call().using(queue="theirs"))
    job = f"/v1/jobs/{server.mill.enqueue(made).id}"
    # when the token alters or deletes all of it
    server.token = "operator mine"
    if act == "alter":
        server.post(f"{job}/alter", {"to_queue": "mine"})
    else:
        server.ask("DELETE", job)
    # then the hook stays
    assert [hook.record.envelope.queue for hook in server.mill.jobs(queue="theirs")] == ["theirs"]


def test_jobs_before_and_after_a_job_are_beyond_the_protection(server: Server) -> None:
    # case S6: what a token for a queue does not cover
    @server.mill.task(name="shop.step")
    def step(before: Any = None) -> None: ...

    first, last = (step.call().using(queue=name) for name in ("theirs", "mine"))
    handle = server.mill.enqueue(chain(first, last))
    server.token = "operator mine"
    # a token sees what its job waits for
    job = server.get(f"/v1/jobs/{handle.id}").json
    assert handle.steps[0].id in job["explanation"]
    # and that an id is taken
    server.mill.queue("theirs").put(1, id="taken")
    assert server.post("/v1/jobs", {"queue": "mine", "body": 1, "id": "taken"}).status == 409


# -- arguments and results -------------------------------------------------------------------------


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Server]:
    """A server whose viewers see no arguments, with a job in each place where one may show."""
    with Tidemill("memory://") as mill:

        @mill.task(name="shop.pay", retries=0)
        def pay(text: str) -> str:
            this_job().log(text)
            this_job().progress(1, 2, text=text)
            return text

        secret: dict[str, Any] = {"key": "secret-key", "headers": {"h": "secret-head"}}
        mill.enqueue(pay.call("secret-1").using(id="ended", **secret))
        run_all(mill)
        limit = Limit("1/h", name="mail", key="secret-limit")
        for job_id in ("takes", "waits"):
            mill.enqueue(pay.call("secret-2").using(id=job_id, limit=limit))
        HttpOwner(mill.broker).exchange(want=Want(1))
        mill.enqueue(pay.call("secret-3").using(id="ready", **secret))
        mill.queue("mail").put("secret-4", id="message")
        mill.schedules.add("nightly", pay.call("secret-5"), "0 3 * * *")
        server = Server(mill, tmp_path, see_arguments="operator")
        yield server
        server.close()


READS = (
    *("/v1/jobs", "/v1/jobs?bodies=true", "/v1/jobs?state=ready", "/v1/limits", "/v1/schedules"),
    *(f"/v1/jobs/{name}" for name in ("ended", "takes", "waits", "ready", "message")),
    *("/v1/jobs/ended/result", "/v1/jobs/ended/events", "/v1/schedules/nightly"),
)


@pytest.mark.parametrize("path", READS)
def test_a_role_that_sees_no_arguments_finds_none_over_http(shop: Server, path: str) -> None:
    # case M12, case S8: one rule for the dashboard and for the API
    shop.token = "viewer"
    answer = shop.get(path)
    assert (answer.status, b"secret" in answer.data) == (200, False)
    shop.token = "operator"
    assert b"secret" in shop.get(path).data or path == "/v1/limits"


def test_hidden_values_are_named_hidden(shop: Server) -> None:
    shop.token = "viewer"
    job = shop.get("/v1/jobs/ended").json
    shown = {name: job[name] for name in ("body", "encoding", "key", "headers", "log", "summary")}
    assert shown == {
        "body": None,
        "encoding": "hidden",
        "key": "hidden",
        "headers": {},
        "log": [],
        "summary": "",
    }
    result = shop.get("/v1/jobs/ended/result").json
    assert (result["state"], result["result"], result["encoding"]) == ("succeeded", None, "hidden")
    assert "for key 'hidden'" in shop.get("/v1/jobs/waits").json["explanation"]


def test_errors_and_the_jobs_that_an_operator_takes_are_not_hidden(tmp_path: Path) -> None:
    # case S8: what the protection does not cover
    with Tidemill("memory://") as mill:

        @mill.task(retries=0)
        def fail(text: str) -> None:
            raise ValueError(f"no {text}")

        job = mill.enqueue(fail.call("secret"))
        run_all(mill)
        mill.queue("mail").put("secret")
        server = Server(mill, tmp_path, see_arguments="admin")
        server.token = "viewer"
        assert "no secret" in server.get(f"/v1/jobs/{job.id}").json["error"]
        server.token = "operator"
        assert b"secret" not in server.get("/v1/jobs?queue=mail&bodies=true").data
        assert b"secret" in server.post("/v1/reserve", {"queues": ["mail"]}).data
        server.close()


def test_a_role_that_sees_no_arguments_searches_for_none(shop: Server) -> None:  # case M12, case S8
    shop.token = "viewer"
    for search in ("search=secret", "key=secret-key"):
        answer = shop.get(f"/v1/jobs?{search}")
        assert (answer.status, "does not see arguments" in answer.detail) == (403, True)
        assert shop.get(f"/v1/jobs?{search}&state=failed").status == 403


def test_a_role_that_sees_no_arguments_makes_no_call_that_shows_some(shop: Server) -> None:
    # case M12, case S8
    calls = {
        "get": {"job_id": "ended"}, "find": {"what": {}}, "wait_for": {"ids": [], "timeout": 0},
        "held": {"job_id": "waits"}, "schedules": {"names": ["nightly"]},
        "list_schedules": {"after": "", "limit": 9},
        "history": {"kind": "audit", "span": 3600, "since": 0, "until": 1 << 40},
    }  # fmt: skip
    bodies = {name: msgspec.msgpack.encode(given) for name, given in calls.items()}
    shop.token = "viewer"
    for name, call in CALLS.items():
        if call.role == "viewer":
            expected = 403 if name in calls else 200
            answer = shop.rpc(name, bodies.get(name, b"\x80"))
            assert answer.status in (expected, 400), name
            assert b"secret" not in answer.data, name
    # and workers, who are operators, make them
    shop.token = "operator"
    answers = {name: shop.rpc(name, body) for name, body in bodies.items()}
    assert {name: it.status for name, it in answers.items() if it.status != 200} == {}


# -- signatures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["complete", "ack"])
def test_the_result_of_a_worker_over_http_is_signed_for_the_next_step(
    tmp_path: Path, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # case M12
    with Tidemill("memory://", secret_keys=["key"]) as mill:
        got: list[Any] = []

        @mill.task(name="shop.resize", queue="images")
        def resize() -> None: ...

        @mill.task(name="shop.keep")
        def keep(value: Any) -> None:
            got.append(value)

        mill.enqueue(chain(resize, keep))
        server = Server(mill, tmp_path)
        asked = {"tasks": ["shop.resize"], "queues": ["images"]}
        (job,) = server.post("/v1/tasks/reserve", asked).json["jobs"]
        body = {"result": "a.png"} if act == "complete" else None
        with monkeypatch.context() as patch:
            patch.setattr(mill.broker, "get", pytest.fail)  # the record of the job is not read
            assert server.post(f"/v1/reservations/{job['receipt']}/{act}", body).status == 204
        server.close()
        run_all(mill)
        assert got == ["a.png" if act == "complete" else None]
