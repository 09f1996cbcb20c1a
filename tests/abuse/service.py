"""The app that the rig's workers load; the environment names its store and its counters."""

from __future__ import annotations

import os
from pathlib import Path

from abuse.app import declare
from abuse.counters import Counters

mill = declare(os.environ["ABUSE_URL"], Counters(Path(os.environ["ABUSE_COUNTERS"])))
