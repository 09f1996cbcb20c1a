"""The stores a queue can live in. Each is one module behind the protocol in :mod:`.base`."""
