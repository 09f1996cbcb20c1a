"""A task in a module that no worker discovers."""

from tidemill.django import mill


@mill.task
def far() -> str:
    """Say where it is."""
    return "far"
