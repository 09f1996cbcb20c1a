"""The demo's worker: ``tidemill worker tidemill.demo.tasks:mill`` which ends with its parent."""

from __future__ import annotations

import logging
import signal
import sys
import threading

from tidemill.worker.settings import Settings
from tidemill.worker.supervisor import Supervisor, install


def main(processes: int, concurrency: int) -> int:
    """Work until stdin closes, because the parent closes it or dies."""
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(process)d %(message)s")
    supervisor = Supervisor(
        Settings(
            app="tidemill.demo.tasks:mill",
            processes=processes,
            concurrency=concurrency,
            shutdown_timeout=5.0,
            name="demo",
        )
    )
    install(supervisor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and then ends us

    def follow_parent() -> None:
        sys.stdin.buffer.read()
        supervisor.stop()

    threading.Thread(target=follow_parent, name="demo-parent", daemon=True).start()
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3])))
