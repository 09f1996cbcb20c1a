"""The files for containers: they parse, and their commands are commands of tidemill."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from tidemill.cli import main

pytestmark = pytest.mark.everyday

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "how-to").glob("*.md"))
GRACE = 10.0
"""Seconds that a worker may take after its shutdown timeout, when its store does not answer."""


def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    return document


def services() -> dict[str, dict[str, Any]]:
    """The services of ``compose.yaml``, by name."""
    found: dict[str, dict[str, Any]] = compose()["services"]
    return found


def manifests() -> list[dict[str, Any]]:
    """All Kubernetes manifests, in the order of their files."""
    files = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
    return [part for file in files for part in yaml.safe_load_all(file.read_text())]


def deployments() -> list[dict[str, Any]]:
    return [part for part in manifests() if part["kind"] == "Deployment"]


def pod_of(deployment: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod of a deployment, and its only container."""
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    return pod, container


def commands() -> Iterator[list[str]]:
    """The words of each tidemill command in compose file, manifests, Dockerfile and pages."""
    for service in services().values():
        if "entrypoint" not in service:
            yield service["command"]
        else:
            text = "\n".join([*service["entrypoint"], *service.get("command", ())])
            for line in re.findall(r"^tidemill (.*)", text, re.MULTILINE):
                yield shlex.split(line.partition(" > ")[0])
    for deployment in deployments():
        yield pod_of(deployment)[1]["args"]
    for words in re.findall(r"^CMD (\[.*\])", (ROOT / "Dockerfile").read_text(), re.MULTILINE):
        yield ast.literal_eval(words)
    for page in PAGES:
        text = page.read_text()
        for words in re.findall(r"^CMD (\[.*\])", text, re.MULTILINE):
            yield ast.literal_eval(words)
        for line in re.findall(r"^ExecStart=\S*/tidemill ((?:.*\\\n)*.*)", text, re.MULTILINE):
            yield shlex.split(line.replace("\\\n", " "))


def parsed(words: list[str]) -> dict[str, Any]:
    """The options and arguments that the command line reads from the words; it runs nothing."""
    command: click.Command = main
    context = click.Context(main)
    while isinstance(command, click.Group):
        if words == ["--help"]:
            return {}
        found = command.get_command(context, words[0])
        assert found is not None, f"there is no command {words[0]!r}"
        command, words = found, words[1:]
    return command.make_context(command.name, list(words)).params


def test_commands_are_commands_of_tidemill() -> None:
    found = list(commands())
    assert {words[0] for words in found} >= {"worker", "server", "token"}
    for words in found:
        parsed(words)


def test_services_in_the_compose_file_depend_on_each_other_and_share_volumes() -> None:
    for name, service in services().items():
        for other in service.get("depends_on", {}):
            assert other in services(), f"{name} waits for {other}"
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            is_folder = source.startswith(".") and (ROOT / source).is_dir()
            assert is_folder or source in compose()["volumes"], f"{name} mounts {source}"


def test_one_service_builds_the_image_and_the_others_wait_for_it() -> None:
    # several builds of one image at once fail where the image is new: "already exists"
    assert [name for name, service in services().items() if "build" in service] == ["token"]
    for name, service in services().items():
        assert service["image"] == "tidemill"
        assert service["pull_policy"] == "never", f"{name} would pull a stranger's image"


def test_the_image_builds_with_files_of_the_repository_alone() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert "# syntax=" not in text  # it would need a second image, from a registry
    known = (ROOT / ".dockerignore").read_text().split()
    for words in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        for name in words.split():
            assert (ROOT / name).exists(), f"the Dockerfile copies {name}"
            assert f"!{name}" in known, f"{name} is not in the build's context"


def test_the_store_is_opened_by_one_container_alone() -> None:
    # each container has a PID namespace of its own, and LMDB knows processes by their ids
    opening = [name for name, service in services().items() if "lmdb:" in str(service)]
    assert opening == ["server"]
    opening = [d["metadata"]["name"] for d in deployments() if "lmdb:" in str(d)]
    assert opening == ["tidemill-server"]


@pytest.mark.parametrize("deployment", deployments(), ids=lambda d: d["metadata"]["name"])
def test_pods_have_time_to_finish_their_jobs(deployment: dict[str, Any]) -> None:
    pod, container = pod_of(deployment)
    given = parsed(container["args"])["shutdown_timeout"]
    assert pod["terminationGracePeriodSeconds"] > given + GRACE


def test_services_have_time_to_finish_their_jobs() -> None:
    for service in services().values():
        if "entrypoint" not in service:
            given = parsed(service["command"])["shutdown_timeout"]
            assert float(service["stop_grace_period"].removesuffix("s")) > given + GRACE


def test_the_server_is_one_pod_and_its_mounts_are_volumes() -> None:
    server = next(d for d in deployments() if d["metadata"]["name"] == "tidemill-server")
    assert server["spec"]["replicas"] == 1
    assert server["spec"]["strategy"] == {"type": "Recreate"}
    for deployment in deployments():
        pod, container = pod_of(deployment)
        volumes = {volume["name"] for volume in pod.get("volumes", ())}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    claims = {p["metadata"]["name"] for p in manifests() if p["kind"] == "PersistentVolumeClaim"}
    assert "tidemill-data" in claims


def test_probes_ask_paths_that_the_server_has() -> None:
    pytest.importorskip("starlette")
    from tidemill.server.http.request_pipeline import PUBLIC

    for deployment in deployments():
        container = pod_of(deployment)[1]
        for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
            if probe in container:
                assert container[probe]["httpGet"]["path"] in PUBLIC
    check = services()["server"]["healthcheck"]["test"]
    assert check[:3] == ["CMD", "python", "-c"]
    ast.parse(check[3])
    assert "/ready" in PUBLIC
    assert "/ready" in check[3]


def test_yaml_and_included_files_of_the_pages_exist() -> None:
    for page in PAGES:
        text = page.read_text()
        for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL):
            if "--8<--" not in block:
                list(yaml.safe_load_all(block))
        for name in re.findall(r'--8<-- "([^"]+)"', text):
            assert (ROOT / name).is_file(), f"{page.name} includes {name}"
