"""A task beside the settings, in no installed app."""

from tidemill.django import mill


@mill.task(name="beside.settings")
def beside_settings() -> str:
    """Say where it is."""
    return "beside"
