"""tidemill on PostgreSQL at its defaults."""

import os

os.environ["BENCH_URL"] = os.environ["BENCH_POSTGRES_URL"] + "?migrate=1"  # for the workers, too

from systems.tidemill import *  # noqa: F403
