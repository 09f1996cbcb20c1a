"""tidemill on the Redis that the peers use, else at its defaults."""

import os

os.environ["BENCH_URL"] = os.environ["BENCH_REDIS_URL"]  # for the workers, too

from systems.tidemill import *  # noqa: F403
