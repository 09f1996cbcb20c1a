"""Put an order into the tube "orders": pip install greenstalk, then python produce.py 17."""

import json
import os
import sys

import greenstalk

address = "127.0.0.1", int(os.environ.get("PORT", "11300"))

with greenstalk.Client(address, use="orders") as queue:
    number = queue.put(json.dumps({"order": int(sys.argv[1])}), ttr=60)
    print(f"put {number}")
