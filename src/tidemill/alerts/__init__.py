"""Alerts: measure a store, and tell a webhook or a command when a value breaks a rule."""
