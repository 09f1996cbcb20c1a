"""The stores a queue can live in, behind one contract (:mod:`tidemill.brokers.contract.broker`)."""
