"""A task in a module that no worker discovers."""

from shop.framework import task


@task()
def elsewhere():
    """Tell where this is."""
    return "elsewhere"
