"""Topics over the JSON API: bind queues, publish, and who may do so."""

from __future__ import annotations

import pytest
from servers.http import JobServer


def test_a_published_message_reaches_each_bound_queue(server: JobServer) -> None:
    assert server.put("/v1/queues/mail/bindings/orders.*").status == 204
    assert server.put("/v1/queues/mail/bindings/orders.*").status == 204
    assert server.put("/v1/queues/audit/bindings/orders.%23").status == 204

    answer = server.post("/v1/topics/orders.new/messages?priority=5&tags=t", {"order": 17})

    assert answer.status == 201
    assert [job["placed"] for job in answer.json["jobs"]] == ["created", "created"]
    found = [*server.reserve("mail", count=100), *server.reserve("audit", count=100)]
    assert {job["id"] for job in found} == {job["id"] for job in answer.json["jobs"]}
    for job in found:
        assert (job["body"], job["priority"], job["tags"]) == ({"order": 17}, 5, ["t"])
        assert job["headers"] == {"topic": "orders.new"}


def test_bindings_are_listed_and_deleted(server: JobServer) -> None:
    for pattern in ("b", "a.*"):
        server.put(f"/v1/queues/listed/bindings/{pattern}")
    assert server.get("/v1/queues/listed/bindings").json == {"bindings": ["a.*", "b"]}
    assert server.delete("/v1/queues/listed/bindings/b").status == 204
    gone = server.delete("/v1/queues/listed/bindings/b")
    assert (gone.status, gone.json["detail"]) == (404, "the queue 'listed' is not bound to 'b'")
    assert server.get("/v1/queues/listed/bindings").json == {"bindings": ["a.*"]}
    assert server.get("/v1/queues/never/bindings").json == {"bindings": []}


def test_a_message_for_nobody_is_an_empty_list_or_404(server: JobServer) -> None:
    answer = server.post("/v1/topics/nobody/messages", 1)
    assert (answer.status, answer.json) == (201, {"jobs": []})
    answer = server.post("/v1/topics/nobody/messages?mandatory=true", 1)
    assert answer.status == 404
    assert "no queue is bound to the topic 'nobody'" in answer.json["detail"]


@pytest.mark.parametrize(
    ("method", "path", "why"),
    [
        ("POST", "/v1/topics/a..b/messages", "topic 'a..b' has an empty word"),
        ("POST", "/v1/topics/a.*/messages", "topic 'a.*' has a wildcard"),
        ("POST", "/v1/topics/a/messages?key=k", "key"),
        ("PUT", "/v1/queues/q/bindings/a*", "pattern 'a*'"),
        ("DELETE", "/v1/queues/q/bindings/a..b", "pattern 'a..b' has an empty word"),
    ],
)
def test_a_bad_request_is_named(server: JobServer, method: str, path: str, why: str) -> None:
    answer = server.request(method, path, 1 if method == "POST" else None)
    assert answer.status == 400
    assert why in answer.json["detail"]


def test_a_full_queue_refuses_all_copies(server: JobServer) -> None:
    for queue in ("free", "full"):
        server.put(f"/v1/queues/{queue}/bindings/both")
    server.request("PATCH", "/v1/queues/full", {"max_size": 1})
    assert server.post("/v1/topics/both/messages", 1).status == 201
    assert server.post("/v1/topics/both/messages", 2).status == 429
    assert [job["body"] for job in server.reserve("free", count=100)] == [1]
