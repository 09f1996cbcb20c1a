"""The task. Each machine runs a worker: TIDEMILL_URL=redis://host tidemill worker fleet:mill."""

import time

from tidemill import Tidemill

mill = Tidemill()  # on every machine, $TIDEMILL_URL names the same Redis


@mill.task
def measure(sample: int) -> int:
    time.sleep(0.1)  # here you would work
    return sample * sample
