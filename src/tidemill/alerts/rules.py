"""The file of rules: what to measure, the largest allowed value, and where to send alerts."""

from __future__ import annotations

import os
import tomllib
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from tidemill.core.config import check_name
from tidemill.errors import InvalidOption

Kind = Literal["oldest", "depth", "failures", "no-worker", "disk"]
"""The values that a rule can measure.

``oldest`` is the age in seconds of the oldest ready job of a queue, and ``depth`` the number of its
ready jobs. ``failures`` is the share of failed jobs among the jobs that ended within some seconds.
``no-worker`` is the number of ready jobs of a queue that no worker serves. ``disk`` is the used
share of the store's disk, or of the server's memory. A share is between 0 and 1.
"""

_PARTS = ("failures", "disk")

_Some = Annotated[float, Meta(ge=0)]


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule. Without ``queue`` the rule measures each queue separately."""

    name: Annotated[str, Meta(pattern=r"\S")]
    when: Kind
    above: _Some | None = None  # the alert lasts while the value is greater
    queue: str = ""
    within: Annotated[float, Meta(ge=60)] = 300.0  # seconds before now in which ``failures`` counts
    at_least: Annotated[int, Meta(ge=0)] = 10  # ``failures`` is 0 while fewer jobs have ended
    lasting: _Some = 0.0  # seconds above ``above`` before the alert begins

    @property
    def most(self) -> float:
        """The largest value without an alert."""
        return self.above or 0.0


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The receiver of alerts: the URL of a webhook, or the words of a command."""

    webhook: Annotated[str, Meta(pattern="^$|^https?://")] = ""
    command: tuple[str, ...] = ()
    headers: dict[str, str] = {}
    timeout: Annotated[float, Meta(gt=0, le=300)] = 10.0  # seconds of one try
    tries: Annotated[int, Meta(ge=1, le=10)] = 3


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All rules of a file; ``every`` and ``remind`` are seconds, and ``remind`` 0 means never."""

    rules: Annotated[tuple[Rule, ...], Meta(min_length=1)] = msgspec.field(name="rule")
    send: Target
    every: Annotated[float, Meta(ge=1)] = 15.0
    remind: _Some = 4 * 3600.0


def read_rules(path: str) -> Rules:
    """Read a file of rules. An InvalidOption names the place that is wrong."""
    try:
        with open(path, "rb") as file:
            rules = msgspec.convert(tomllib.load(file), Rules)
    except OSError as error:
        raise InvalidOption(f"cannot read the rules in {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidOption(f"{path} is not TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise InvalidOption(
            f"{path}: {error}; rules can measure {', '.join(get_args(Kind))}"
        ) from None
    names = [rule.name for rule in rules.rules]
    for rule in rules.rules:
        where = f"{path}, rule {rule.name!r}"
        if names.count(rule.name) > 1:
            raise InvalidOption(f"{path}: two rules have the name {rule.name!r}")
        _check(where, rule)
    target = rules.send
    if bool(target.webhook) == bool(target.command):
        raise InvalidOption(f"{path}, [send] needs a webhook or a command, and not both")
    headers = {name: _expanded(path, text) for name, text in target.headers.items()}
    return msgspec.structs.replace(rules, send=msgspec.structs.replace(target, headers=headers))


def _check(where: str, rule: Rule) -> None:
    if rule.above is None and rule.when != "no-worker":
        raise InvalidOption(f"{where} needs above: the largest value without an alert")
    if rule.queue:
        check_name("queue", rule.queue)
    if rule.when == "disk" and rule.queue:
        raise InvalidOption(f"{where}: a disk belongs to the whole store; leave queue out")
    if rule.when in _PARTS and not rule.most < 1:
        raise InvalidOption(
            f"{where}: above must be at least 0 and less than 1, such as 0.02, not {rule.most:g}"
        )


def _expanded(where: str, text: str) -> str:
    """A header. A ``$NAME`` at its end becomes the value of the environment variable ``NAME``."""
    # So the file needs no secret.
    before, mark, name = text.rpartition("$")
    if not mark:
        return text
    if name not in os.environ:
        raise InvalidOption(f"{where}: the environment has no variable {name}")
    return before + os.environ[name]
