"""tidemill on RabbitMQ at its defaults."""

import os

os.environ["BENCH_URL"] = os.environ["BENCH_RABBITMQ_URL"]  # for the workers, too

from systems.tidemill import *  # noqa: F403

del unsettled  # noqa: F821  # the protocol does not tell what is taken and not yet acked
