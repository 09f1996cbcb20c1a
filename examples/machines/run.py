"""Start three workers, as on three machines, and the producer; end when all jobs are done.

They meet at $REDIS_URL. Without it, a private redis-server is started for the time of the run.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def running(*command: str, **env: str) -> Iterator[None]:
    """A process for the time of the block."""
    folder = Path(__file__).parent
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, **env}, process_group=0)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that "finally" runs after TERM, too
with ExitStack() as stack:
    url = os.environ.get("REDIS_URL", "")
    if not url:
        port, folder = free_port(), stack.enter_context(tempfile.TemporaryDirectory())
        options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--logfile", "log"]
        stack.enter_context(running("redis-server", *options, "--appendonly", "yes"))
        url = f"redis://127.0.0.1:{port}"
    for number in (1, 2, 3):
        options = ["-p", "1", "-c", "2", "--name", f"machine-{number}", "--quiet"]
        worker = [sys.executable, "-m", "tidemill", "worker", "fleet:mill", *options]
        stack.enter_context(running(*worker, TIDEMILL_URL=url))
    producer = [sys.executable, "produce.py"]
    env = {**os.environ, "TIDEMILL_URL": url}
    sys.exit(subprocess.run(producer, cwd=Path(__file__).parent, env=env).returncode)
