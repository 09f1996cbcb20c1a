"""Workers that a busy machine does not mislead about their jobs.

A worker takes a job for stuck that does not end within half a second of its timeout. A busy machine
may give the worker process no processor for so long. Then the worker replaces the process.
"""

from __future__ import annotations

import os

from harness import Place

__all__ = ["patience"]

CODE = """
from tidemill.worker import timeouts, worker_process
timeouts.PATIENCE = worker_process.WITNESS_PATIENCE = 30.0
"""


def patience(place: Place) -> dict[str, str]:
    """The environment of a worker that waits 30 seconds before it takes a job for stuck."""
    folder = place.path / "patience"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(CODE)
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{before}" if before else str(folder)}
