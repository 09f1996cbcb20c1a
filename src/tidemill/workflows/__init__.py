"""Chains, groups and flows: composing calls, planning their jobs, and the handles on them."""
