"""A private RabbitMQ for the systems that need one."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from processes import stop

QUIET = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


class RabbitMQ:
    """A private rabbitmq-server: random port, 127.0.0.1 only, as durable as it is by default."""

    def __init__(self, pid: int, port: int, environment: dict[str, str]) -> None:
        self.pid = pid
        self.port = port
        self.url = f"amqp://guest:guest@127.0.0.1:{port}/%2F"
        self._environment = environment

    def flush(self) -> None:
        """Empty it: its virtual host is made anew."""
        self.ctl("delete_vhost", "/")
        self.ctl("add_vhost", "/")
        self.ctl("set_permissions", "guest", ".*", ".*", ".*")

    def ctl(self, *command: str) -> None:
        """Tell it something by its own tool."""
        subprocess.run(
            [_program("rabbitmqctl"), "--quiet", *command],
            env=self._environment, check=True, capture_output=True, timeout=60,
        )  # fmt: skip


@contextlib.contextmanager
def private_rabbitmq(folder: Path) -> Iterator[RabbitMQ | None]:
    """Run one as long as the context lasts; None where RabbitMQ is not installed."""
    program, mapper = _program("rabbitmq-server"), shutil.which("epmd")
    if program is None or mapper is None:
        yield None
        return
    port, environment = _prepare(folder / "rabbitmq")
    # By the port mapper its tool finds it; the server would start one that outlives it.
    processes = [subprocess.Popen([mapper], env=environment, **QUIET)]
    try:
        _await_listener(int(environment["ERL_EPMD_PORT"]))
        processes.append(subprocess.Popen([program], env=environment, **QUIET))
        _await_listener(port)
        yield RabbitMQ(processes[-1].pid, port, environment)
    finally:
        stop(reversed(processes))


def _prepare(home: Path) -> tuple[int, dict[str, str]]:
    """Its configuration: the port, and the environment of it and of its tool."""
    home.mkdir()
    ports = []
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    port, mapper, distribution = ports
    config, plugins, cookie = (home / n for n in ("rabbitmq.conf", "plugins", ".erlang.cookie"))
    config.write_text(f"listeners.tcp.1 = 127.0.0.1:{port}\n")
    plugins.write_text("[].\n")
    cookie.write_text(home.parent.name)
    cookie.chmod(0o400)
    return port, os.environ | {
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_EPMD_PORT": str(mapper),
        "HOME": str(home),
        "LC_ALL": "C.UTF-8",
        "RABBITMQ_CONFIG_FILE": str(config),
        "RABBITMQ_CONF_ENV_FILE": str(home / "none"),
        "RABBITMQ_DIST_PORT": str(distribution),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(plugins),
        "RABBITMQ_LOG_BASE": str(home / "log"),
        "RABBITMQ_MNESIA_BASE": str(home / "mnesia"),
        "RABBITMQ_NODENAME": f"bench{port}@localhost",
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        "RUNNING_UNDER_SYSTEMD": "true",  # its script becomes the server itself
    }


def _await_listener(port: int, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        if time.monotonic() > end:
            raise RuntimeError(f"RabbitMQ did not listen within {seconds:g} s")
        time.sleep(0.05)


def _program(name: str) -> str | None:
    """Of Debian's programs on the path, those that change to a user of their own are of no use."""
    inner = Path("/usr/lib/rabbitmq/bin") / name
    return str(inner) if inner.exists() else shutil.which(name)
