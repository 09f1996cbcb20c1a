"""The published tests of one client pass against our port; ``make clients`` runs more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from port_here import port_of

from tidemill import Tidemill

ROOT = Path(__file__).parents[2]


def test_the_suite_of_a_python_client_passes(tmp_path: Path) -> None:
    # case W4
    with Tidemill(f"lmdb://{tmp_path}/jobs?durability=relaxed") as mill, port_of(mill) as port:
        command = [sys.executable, "scripts/clients", "--port", str(port.number), "pystalkd"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ran 9 tests" in done.stderr
    assert "pystalkd: passed" in done.stdout
