"""The users of the dashboard, and their roles."""

from __future__ import annotations

import enum
from typing import NamedTuple

from tidemill.core.suggest import did_you_mean
from tidemill.errors import InvalidOption


class Role(enum.IntEnum):
    """The role of a user; each role includes the roles before it."""

    VIEWER = 1  # look
    OPERATOR = 2  # pause, resume; retry, cancel, alter, delete jobs
    ADMIN = 3  # purge queues, change limits and schedules, stop workers


class User(NamedTuple):
    """A person who uses the dashboard; the audit list shows the name."""

    name: str
    role: Role = Role.ADMIN


def role_named(option: str, name: str | Role) -> Role:
    """The role of this name. An InvalidOption names ``option``."""
    if isinstance(name, Role):
        return name
    if str(name).upper() not in Role.__members__:
        names = [role.name.lower() for role in Role]
        near = did_you_mean(str(name), names)
        raise InvalidOption(
            f"{option} must be one of {', '.join(names)}, not {name!r}{near and f'; {near}'}"
        )
    return Role[str(name).upper()]
