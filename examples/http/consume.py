"""Take orders from the queue "orders", for ever: python consume.py. Python alone is enough."""

import json
import os
import urllib.request

server = os.environ.get("SERVER", "http://127.0.0.1:8333")


def ask(path, body):
    request = urllib.request.Request(
        f"{server}/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


while True:
    found = ask("reserve", {"queues": ["orders"], "count": 10, "timeout": 30})["jobs"]
    for job in found:  # ours for their time to run
        print("order", job["body"]["order"])
    ask("ack", {"receipts": [job["receipt"] for job in found]})  # done: forget them
