"""Take orders from the queue "orders", for ever: python consume.py. Between them it sleeps."""

from tidemill import Tidemill

with Tidemill() as mill:
    for message in mill.queue("orders"):
        with message:  # done at its end; given back when something is raised
            print("order", message.body["order"])
