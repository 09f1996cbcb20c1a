#!/usr/bin/env python3
"""Take the pictures of the README: docs/assets/dashboard.png and docs/assets/job.svg.

    .venv/bin/python scripts/screenshots/take.py

The app ``shop.py`` first plays an hour in two minutes, with moved clocks, so that the charts have a
past. Then ``tidemill server --workers shop:mill`` runs the app, and chromium photographs the page.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pty
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console
from rich.text import Text

from tidemill import chain
from tidemill.core.clock import clock

HERE = Path(__file__).parent
ASSETS = HERE.parent.parent / "docs" / "assets"
PORT = 8399
COLUMNS = 124
HOUR = 3600.0
SPEED = 30
"""How many times as fast as time the past hour passes."""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tidemill-pictures-") as folder:
        os.chdir(folder)
        os.environ |= {"TIDEMILL_URL": f"lmdb://{folder}/jobs", "PYTHONPATH": str(HERE)}
        sys.path.insert(0, str(HERE))
        play_the_past()
        with server():
            import shop

            shipped = shop.ship.enqueue(4711, "DHL")
            enqueue_for(shop, seconds=15)
            enqueue_burst(shop)
            photograph(f"http://127.0.0.1:{PORT}/", ASSETS / "dashboard.png")
            shipped.result(timeout=120)
            picture_of(["tidemill", "job", shipped.id[-8:]], ASSETS / "job.svg")


def play_the_past() -> None:
    """Run the shop for an hour that ends now, in threads of this process."""
    import shop

    real, now, boot = time.monotonic(), clock.wall(), clock.machine()
    wall, machine = clock.wall, clock.machine
    clock.wall = lambda: now - HOUR + HOUR / SPEED + (time.monotonic() - real) * SPEED
    clock.machine = lambda: boot + (time.monotonic() - real) * SPEED
    shop.time = SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / SPEED))
    with shop.mill.worker(concurrency=16):
        while clock.wall() < wall():
            enqueue_some(shop)
            time.sleep(1 / SPEED)
    clock.wall, clock.machine, shop.time = wall, machine, time


def enqueue_some(shop: SimpleNamespace) -> None:
    """What a second brings: more orders at some times than at others."""
    busy = 1 + 0.6 * math.sin(clock.wall() / 500) + 0.3 * math.sin(clock.wall() / 130)
    with shop.mill.batch():
        for _ in range(round(random.uniform(0, 3) * busy)):
            order = random.randrange(10_000, 99_999)
            shop.charge.enqueue(order, euros=random.randrange(500, 20_000) / 100)
            shop.send_mail.enqueue(f"customer{order}@example.com", "thanks")
            for n in range(2):
                shop.thumbnail.enqueue(f"{order}-{n}.jpg", width=320)


def enqueue_for(shop: SimpleNamespace, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        enqueue_some(shop)
        time.sleep(1)


def enqueue_burst(shop: SimpleNamespace) -> None:
    """More than the worker does at once: jobs that are ready, scheduled, and waiting for others."""
    with shop.mill.batch():
        for n in range(400):
            shop.thumbnail.enqueue(f"catalogue-{n}.jpg", width=1280)
        for n in range(24):
            shop.send_mail.using(delay=3600).enqueue(f"customer{n}@example.com", "reminder")
        for month in ("September", "October"):
            shop.mill.enqueue(chain(shop.monthly_report.call(month), shop.archive))


@contextlib.contextmanager
def server() -> Iterator[None]:
    """A server with its dashboard and a worker, until the block ends."""
    words = f"tidemill server --port {PORT} --workers shop:mill -p 2 -c 4".split()
    process = subprocess.Popen(run(words))
    try:
        time.sleep(5)
        yield
    finally:
        process.terminate()
        process.wait(60)


def run(words: list[str]) -> list[str]:
    """The command with this Python, which needs no PATH."""
    return [sys.executable, "-m", *words]


def photograph(url: str, file: Path) -> None:
    size = ["--window-size=1240,690", "--force-device-scale-factor=1", "--hide-scrollbars"]
    command = ["chromium", "--headless", "--no-sandbox", *size, f"--screenshot={file}", url]
    subprocess.run(command, check=True, timeout=120)


def picture_of(words: list[str], file: Path) -> None:
    """Run a command in a terminal and draw what it prints."""
    os.environ |= {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    printed = bytearray()

    def read(terminal: int) -> bytes:
        data = os.read(terminal, 65536)
        printed.extend(data)
        return data

    pty.spawn(run(words), read)
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    text = printed.decode().replace("\r\n", "\n").replace(str(HERE), "/srv/shop").rstrip()
    console.print(Text.from_ansi(f"$ {' '.join(words)}\n{text}"))
    drawing = console.export_svg(title="tidemill")
    drawing = re.sub(r"@font-face \{.*?\}\s*", "", drawing, flags=re.DOTALL)  # fonts of other sites
    file.write_text(drawing)


if __name__ == "__main__":
    main()
