"""Helpers of brokers that reach their store over a connection."""
