"""Put an order into the queue "orders": python produce.py 17. Python alone is enough."""

import json
import os
import sys
import urllib.request

server = os.environ.get("SERVER", "http://127.0.0.1:8333")

request = urllib.request.Request(
    f"{server}/v1/queues/orders/messages",
    json.dumps({"order": int(sys.argv[1])}).encode(),
    {"Content-Type": "application/json"},
)
with urllib.request.urlopen(request) as reply:
    print("put", json.load(reply)["id"])
