"""The description of the API, and the declarations it is made of."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from offences import expect_none

from tidemill.brokers.contract.inspection import Filter
from tidemill.core.envelope import Envelope
from tidemill.core.job import Outcome, Record, State
from tidemill.server.http.api import ENDPOINTS
from tidemill.server.http.endpoints import Endpoint, Endpoints
from tidemill.server.http.openapi import describe, docs_page
from tidemill.server.http.problems import KINDS, PREFIX, Problem, problem_of
from tidemill.server.http.schemas import jobs as shapes
from tidemill.server.http.validation_errors import validation_message
from tidemill.server.tokens import Role

DESCRIPTION = describe(ENDPOINTS)


def test_the_description_has_exactly_the_endpoints() -> None:
    described = {
        (method.upper(), path)
        for path, operations in DESCRIPTION["paths"].items()
        for method in operations
    }
    assert described == {(endpoint.method, endpoint.path) for endpoint in ENDPOINTS}
    assert len(ENDPOINTS) == len(described)


def test_each_described_endpoint_is_served() -> None:
    endpoints = Endpoints(None, ENDPOINTS)  # type: ignore[arg-type]
    for endpoint in ENDPOINTS:
        path = endpoint.path.replace("{", "").replace("}", "")
        scope = {"method": endpoint.method, "path": path}
        assert endpoints.route(scope) == (endpoint, endpoint.names)


def test_all_references_in_the_description_resolve() -> None:
    schemas = DESCRIPTION["components"]["schemas"]

    def look(part: Any) -> None:
        if isinstance(part, dict):
            if "$ref" in part:
                assert part["$ref"].rpartition("/")[2] in schemas
            for value in part.values():
                look(value)
        elif isinstance(part, list):
            for value in part:
                look(value)

    look(DESCRIPTION)
    msgspec.json.encode(DESCRIPTION)


def test_every_endpoint_has_a_summary_and_answers() -> None:
    expect_none(
        f"{endpoint.method} {endpoint.path} {wrong}."
        for endpoint in ENDPOINTS
        for wrong in wrongs(endpoint)
    )


def wrongs(endpoint: Endpoint) -> Iterator[str]:
    """What the declaration of an endpoint must not say."""
    if not endpoint.handler.__doc__:
        yield "has no docstring that says what it does"
    if endpoint.method not in ("GET", "POST", "PUT", "PATCH", "DELETE"):
        yield "has an unknown method"
    if (endpoint.role is Role.VIEWER) != (endpoint.method == "GET"):
        yield "lets viewers change something, or asks for more than a viewer to read"
    if endpoint.method in ("GET", "DELETE") and endpoint.body is not None:
        yield "has a body"
    statuses = {kind.status for kind in KINDS.values()} | {200, 201, 202, 204}
    if unknown := {endpoint.status, *endpoint.also} - statuses:
        yield f"answers with the unknown status {unknown}"


def test_the_page_lists_all_endpoints() -> None:
    page = docs_page(DESCRIPTION).decode()
    for endpoint in ENDPOINTS:
        assert f"<b>{endpoint.method}</b> {endpoint.path}</code>" in page
    assert "<script" not in page
    assert "<code>delay</code><td>number, at least 0, at most 3,153,600,000<" in page
    assert "<code>order</code><td>fair, merged, strict<" in page
    for word in ("typing", "msgspec", "Annotated", "None", "str", "float"):  # Python's own
        assert not re.search(rf"<td>[^<]*\b{word}\b", page), word


def test_a_job_is_shown_as_it_is_described() -> None:
    record = Record(envelope=Envelope(id="1"), state=State.READY, seq=1, rank=0)
    assert set(record.public()) == set(shapes.JobOut.__struct_fields__)
    msgspec.json.decode(msgspec.json.encode(shapes.JobOut(**record.public())), type=shapes.JobOut)
    assert set(record.for_list().public()) == set(shapes.JobFacts.__struct_fields__)
    assert set(typing.get_args(shapes.JobFacts.__annotations__["state"])) <= set(State)
    assert set(shapes.JobQuery.__struct_fields__) - {"state", "group", "search", "limit", "cursor"}
    assert set(Filter.__struct_fields__) >= {"queue", "task", "key", "tag"}


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b'{"delay": "x"}', "delay: expected number or null, got text"),
        (b'{"tags": [1]}', "tags[0]: expected text, got whole number"),
        (b'{"headers": {"a": 1}}', "headers: expected text, got whole number"),
        (b'{"dela": 1}', "unknown field dela; did you mean 'delay'?"),
        (b'{"body": [', "JSON ends too early"),
        (b'{"body" 1}', "JSON is malformed: expected ':' (byte 8)"),
        (b"[1]", "expected object, got array"),
        (b'{"priority": 101}', "priority: expected number <= 100"),
        (b'{"on_conflict": "x"}', "on_conflict: expected keep, merge, reject or replace, got 'x'"),
        (b'{"encoding": 1}', "encoding: expected base64 or json, got whole number"),
    ],
)
def test_an_invalid_body_is_explained_in_one_sentence(data: bytes, sentence: str) -> None:
    with pytest.raises(msgspec.MsgspecError) as caught:
        msgspec.json.decode(data, type=shapes.JobIn)
    assert validation_message(caught.value, shapes.JobIn) == sentence


def test_problems_have_the_form_of_rfc_9457() -> None:
    problem = Problem("conflict", "it is there", job_id="7")
    document = msgspec.json.decode(problem.body("r1"))
    assert document == {
        "type": "urn:tidemill:problem:conflict",
        "title": KINDS["conflict"].title,
        "status": 409,
        "detail": "it is there",
        "request_id": "r1",
        "job_id": "7",
    }
    assert problem_of(ValueError("a secret")) is None


def test_the_description_suits_client_generators() -> None:
    def look(part: Any) -> None:
        if isinstance(part, dict):
            if "enum" in part:
                assert part["type"] == "string"
            if "description" in part and isinstance(part["description"], str):
                assert "``" not in part["description"]
                assert "\n " not in part["description"]
        if isinstance(part, (dict, list)):
            for value in part.values() if isinstance(part, dict) else part:
                look(value)

    look(DESCRIPTION)
    schemas, paths = DESCRIPTION["components"]["schemas"], DESCRIPTION["paths"]
    moments = schemas["JobIn"]["properties"]["at"]["anyOf"]
    assert ("string", "date-time") in [(kind["type"], kind.get("format")) for kind in moments]
    assert PREFIX + "too-large" in schemas["ProblemBody"]["properties"]["type"]["examples"]
    put = paths["/v1/jobs"]["post"]
    assert put["requestBody"]["required"]
    assert not paths["/v1/queues/{queue}/retry"]["post"]["requestBody"]["required"]
    assert paths["/v1/jobs/{job_id}/alter"]["post"]["requestBody"]["required"]
    assert put["responses"]["200"]["description"] != put["responses"]["201"]["description"]
    for operations in paths.values():
        for operation in operations.values():
            assert {"400", "401", "403", "429", "500", "501", "503"} <= set(operation["responses"])
            for parameter in operation["parameters"]:
                assert {"type": "null"} not in parameter["schema"].get("anyOf", ())


def test_options_are_explained() -> None:
    schemas = DESCRIPTION["components"]["schemas"]
    plain = {"body", "encoding", "task", "args", "kwargs"}  # which the shape's own text explains
    assert {
        name for name, field in schemas["JobIn"]["properties"].items() if "description" not in field
    } == plain
    parameters = DESCRIPTION["paths"]["/v1/queues/{queue}/messages"]["post"]["parameters"]
    assert all("description" in each for each in parameters if each["in"] == "query")


def test_an_outcome_is_one_of_those_described() -> None:
    described = set(typing.get_args(typing.get_type_hints(shapes.AttemptOut)["outcome"]))
    assert described == {outcome.name.lower() for outcome in Outcome}


# -- the page of the calls -------------------------------------------------------------------------


PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "http-api.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| `")]


def has(row: str, method: str, path: str) -> bool:
    """True when the row has the method, and all words of the path: a row shortens its paths."""
    words = {part for part in path.split("/") if part not in ("", "v1") and "{" not in part}
    code = " ".join(re.findall(r"`([^`]+)`", row))
    return {method, *words} <= {*re.findall(r"\w+", code)}


def test_the_page_has_each_call_of_the_server() -> None:
    assert len(ENDPOINTS) > 50
    expect_none(
        f"docs/reference/http-api.md has no row for {each.method} {each.path}."
        for each in ENDPOINTS
        if not any(has(row, each.method, each.path) for row in ROWS)
    )


# -- paths of endpoints ----------------------------------------------------------------------------


def routed(method: str, path: str) -> tuple[str, list[str]]:
    """The path of the endpoint of a request, and the values in the request's path."""
    scope = {"method": method, "path": path, "raw_path": path.encode()}
    endpoint, values = Endpoints(cast(Any, None), ENDPOINTS).route(scope)
    return (endpoint.path if endpoint is not None else "", values)


@pytest.mark.parametrize("verb", ["batch", "cancel", "retry", "alter", "delete"])
def test_a_job_whose_id_is_a_verb_is_reached(verb: str) -> None:
    for method in ("PUT", "GET", "DELETE"):
        assert routed(method, f"/v1/jobs/{verb}") == ("/v1/jobs/{job_id}", [verb])
    assert routed("GET", f"/v1/jobs/{verb}/result") == ("/v1/jobs/{job_id}/result", [verb])
    assert routed("POST", f"/v1/jobs/{verb}/cancel") == ("/v1/jobs/{job_id}/cancel", [verb])
    assert routed("POST", f"/v1/jobs/{verb}") == (f"/v1/jobs/{verb}", [])


def test_a_path_without_an_endpoint_or_a_method_is_refused() -> None:
    for path in ("/", "/v1//jobs", "/v1/jobs/a/b/c", "/v2/jobs"):
        assert routed("GET", path) == ("", [])
    with pytest.raises(Problem) as caught:
        routed("PATCH", "/v1/jobs/cancel")
    assert dict(caught.value.headers)["allow"].split(", ") == [
        *("DELETE", "GET", "HEAD", "POST", "PUT")
    ]
