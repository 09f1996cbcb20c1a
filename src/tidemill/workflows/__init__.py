"""Chains, groups and flows: composing calls, planning their jobs, and handles on all of them."""
