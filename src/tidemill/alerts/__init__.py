"""Alerts: measure rules about a store, and tell a webhook or a command when one is broken."""
