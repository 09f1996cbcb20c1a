"""The settings of the broker, read once from the URL ``django://alias``."""

from __future__ import annotations

import os
import re

import msgspec

from tidemill.brokers.contract.retention import KEEP_OPTIONS, Retention, number_option
from tidemill.core.config import Url, check_known
from tidemill.errors import InvalidOption

_OURS = (*KEEP_OPTIONS, "owner_lease", "patience", "poll", "settings")
_ALIAS = re.compile(r"\w[\w-]*")


class Address(msgspec.Struct, frozen=True):
    """A ``django://`` URL taken apart."""

    text: str
    alias: str  # the name of the database in ``DATABASES``
    settings: str  # the settings module of the Django project; empty for the module that is in use
    retention: Retention
    poll: float  # seconds between two looks of an idle owner
    owner_lease: float  # seconds that a silent owner is kept
    patience: float  # seconds that puts, queries and acts on jobs wait for a database that is away


def check_url(url: Url) -> Address:
    """Read a ``django://`` URL."""
    options = url.options
    check_known("a django:// url", options, _OURS)
    alias = url.path.strip("/") or "default"
    if not _ALIAS.fullmatch(alias):
        raise InvalidOption(
            f"url {url.text!r} must name a database of DATABASES, as django://default"
        )
    poll = number_option(options, "poll", 1.0)
    if not 0.01 <= poll <= 3600:
        raise InvalidOption(f"poll in the url must be from 0.01 to 3600 seconds, not {poll:g}")
    owner_lease = number_option(options, "owner_lease", 30.0)
    if owner_lease < 1:
        raise InvalidOption(f"owner_lease in the url must be at least 1 second, not {owner_lease}")
    return Address(
        text=url.text,
        alias=alias,
        settings=options.get("settings", ""),
        retention=Retention.from_options(options),
        poll=poll,
        owner_lease=owner_lease,
        patience=number_option(options, "patience", 10.0),
    )


def set_up(address: Address) -> None:
    """Configure Django, if nobody has: a worker's supervisor opens the broker by its URL alone."""
    import django
    from django.apps import apps
    from django.conf import settings
    from django.db import connections

    if not settings.configured and address.settings:
        os.environ.setdefault("DJANGO_SETTINGS_MODULE", address.settings)
    if not settings.configured and not os.environ.get("DJANGO_SETTINGS_MODULE"):
        raise InvalidOption(
            f"{address.text} needs the settings of a Django project; set DJANGO_SETTINGS_MODULE, "
            "or add ?settings=mysite.settings to the url"
        )
    if not apps.ready and not apps.loading:
        django.setup()
    if address.alias not in connections:
        known = ", ".join(connections)
        raise InvalidOption(f"DATABASES has no {address.alias!r}, only {known}")
