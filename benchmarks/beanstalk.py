"""Our beanstalk port beside beanstalkd with its log flushed on every write, in turns, in one run.

    python benchmarks/beanstalk.py [--clients 8] [--jobs 4000] [--rounds 5] [--size 100]

``put`` is as many clients putting one job after the other; ``take`` each reserving one and deleting
it. Both are durable: an answer comes after the disk has it. What counts is how the two stand to
each other in the same round; both move with what else the disk does.
"""

from __future__ import annotations

import argparse
import contextlib
import selectors
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def served(command: list[str], port: int) -> Iterator[int]:
    """A server, once it listens."""
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if time.monotonic() > until or process.poll() is not None:
                    raise
                time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(30)


def measure(port: int, what: str, clients: int, jobs: int, size: int) -> float:
    """Jobs a second."""
    body = b"x" * size
    first = b"put 1024 0 60 %d\r\n%b\r\n" % (size, body)
    if what == "take":
        first = b"reserve-with-timeout 5\r\n"
    with selectors.DefaultSelector() as ready, contextlib.ExitStack() as open_lines:
        lines = []
        for _ in range(clients):
            line = open_lines.enter_context(socket.create_connection(("127.0.0.1", port)))
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ready.register(line, selectors.EVENT_READ, bytearray())
            lines.append(line)
        begun = time.perf_counter()
        left, out = jobs - clients, clients
        for line in lines:
            line.sendall(first)
        while out:
            for key, _ in ready.select():
                line = key.fileobj
                assert isinstance(line, socket.socket)
                key.data.extend(line.recv(65536))
                said = bytes(key.data)
                if said.startswith(b"RESERVED"):
                    head = said.partition(b"\r\n")[0]
                    if len(said) < len(head) + size + 4:
                        continue
                    key.data.clear()
                    line.sendall(b"delete %b\r\n" % head.split()[1])
                    continue
                if not said.endswith(b"\r\n"):
                    continue
                assert said.startswith((b"INSERTED", b"DELETED")), said
                key.data.clear()
                if left > 0:
                    left -= 1
                    line.sendall(first)
                else:
                    out -= 1
        return jobs / (time.perf_counter() - begun)


def main() -> None:
    """Measure, and print a table."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("clients", 8), ("jobs", 4000), ("rounds", 5), ("size", 100)):
        asked.add_argument(f"--{name}", type=int, default=value)
    options = asked.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tidemill-bench-"))
    theirs, ours, http = free_port(), free_port(), free_port()
    (folder / "log").mkdir()
    beanstalkd = ["beanstalkd", "-l", "127.0.0.1", "-p", str(theirs)]
    beanstalkd += ["-b", str(folder / "log"), "-f", "0"]
    server = [sys.executable, "-m", "tidemill", "server", f"lmdb://{folder}/store", "--quiet"]
    server += ["--port", str(http), "--beanstalk", f"127.0.0.1:{ours}"]
    figures: dict[tuple[str, str], list[float]] = {}
    try:
        with served(beanstalkd, theirs), served(server, ours):
            for _ in range(options.rounds):
                for what in ("put", "take"):
                    for name, port in (("beanstalkd", theirs), ("tidemill", ours)):
                        rate = measure(port, what, options.clients, options.jobs, options.size)
                        figures.setdefault((what, name), []).append(rate)
    finally:
        shutil.rmtree(folder)
    sys.stdout.write(f"{options.clients} clients, bodies of {options.size} bytes, jobs a second\n")
    for what in ("put", "take"):
        pairs = list(zip(figures[what, "beanstalkd"], figures[what, "tidemill"], strict=True))
        for name in ("beanstalkd", "tidemill"):
            rates = figures[what, name]
            shown = " ".join(f"{rate:,.0f}" for rate in rates)
            sys.stdout.write(f"{what:5} {name:11} {statistics.median(rates):8,.0f}   ({shown})\n")
        ratio = statistics.median(mine / their for their, mine in pairs)
        sys.stdout.write(f"{what:5} ours to theirs {ratio:.2f}\n")


if __name__ == "__main__":
    main()
