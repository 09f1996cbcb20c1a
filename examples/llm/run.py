"""Start a worker and send the prompts; without $LLM_URL, to a fake API that needs no key."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from fake_api import FakeApi

signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that "finally" runs after TERM, too
here = Path(__file__).parent
api = None if "LLM_URL" in os.environ else FakeApi()
env = {**os.environ, "LLM_URL": api.url} if api else dict(os.environ)
command = [sys.executable, "-m", "tidemill", "worker", "prompts:mill", "-p", "1"]
worker = subprocess.Popen(command, cwd=here, env=env, process_group=0)
try:
    done = subprocess.run([sys.executable, "prompts.py"], cwd=here, env=env)
finally:
    worker.terminate()
    worker.wait()
if api:
    print(f"{api.requests} requests, {api.refused} refused, at most {api.most_open} at once")
sys.exit(done.returncode)
