"""Looks at a store that change nothing, and waits for what a look would find."""
