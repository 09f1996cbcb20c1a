"""Which call of the HTTP API a path names."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tidemill.server.http.api import ENDPOINTS
from tidemill.server.http.endpoints import Endpoints
from tidemill.server.http.problems import Problem


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
