"""Start a worker and the page on http://127.0.0.1:8000 (or $PORT). Ctrl-C stops both."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import uvicorn

signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that "finally" runs after TERM, too
command = [sys.executable, "-m", "tidemill", "worker", "photos:mill"]
worker = subprocess.Popen(command, cwd=Path(__file__).parent, process_group=0)
try:
    uvicorn.run("web:app", port=int(os.environ.get("PORT", "8000")), access_log=False)
finally:
    worker.terminate()
    worker.wait()
