"""Helpers of several brokers, on this machine or behind a connection."""
