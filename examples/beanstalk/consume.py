"""Take orders from the tube "orders", for ever: pip install greenstalk, then python consume.py."""

import json
import os

import greenstalk

address = "127.0.0.1", int(os.environ.get("PORT", "11300"))

with greenstalk.Client(address, watch="orders") as queue:
    while True:
        job = queue.reserve()  # ours for its time to run
        print("order", json.loads(job.body)["order"])
        queue.delete(job)  # done; release would give it back, bury keep it for a human
