"""Put an order into the queue "orders": python produce.py 17. No server: it is on disk, here."""

import sys

from tidemill import Tidemill

with Tidemill() as mill:
    job = mill.queue("orders").put({"order": int(sys.argv[1])}, ttr=60)
    print("put", job.id)
