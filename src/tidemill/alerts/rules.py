"""The file of rules: what to measure, the largest allowed value, and where to send alerts."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

import msgspec

from tidemill.core.config import check_name
from tidemill.core.errors import InvalidOption
from tidemill.core.suggest import did_you_mean

KINDS = {
    "oldest": "the age in seconds of the oldest ready job of a queue",
    "depth": "the number of ready jobs of a queue",
    "failures": "the share of failed jobs among the jobs that ended within some seconds, 0 to 1",
    "no-worker": "the number of ready jobs of a queue that no worker serves",
    "disk": "the used share of the store's disk, or of the server's memory, 0 to 1",
}
"""The values that a rule can measure, with their meaning."""

_PARTS = ("failures", "disk")  # rules whose value is between 0 and 1

T = TypeVar("T")


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule. Without ``queue`` the rule measures each queue separately.

    Attributes:
        name: the name of the alert.
        when: the measured value, one of :data:`KINDS`.
        above: the alert lasts while the value is greater than this number.
        queue: only this queue.
        within: ``failures`` counts jobs that ended in this many seconds before now.
        at_least: ``failures`` is 0 while fewer jobs than this have ended.
        lasting: seconds for which the value must stay above ``above`` before the alert begins.
    """

    name: str
    when: str
    above: float = 0.0
    queue: str = ""
    within: float = 300.0
    at_least: int = 10
    lasting: float = 0.0


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The receiver of alerts: the URL of a webhook, or the words of a command.

    ``timeout`` is the seconds that one try may take.
    """

    webhook: str = ""
    command: tuple[str, ...] = ()
    headers: dict[str, str] = {}
    timeout: float = 10.0
    tries: int = 3


class Rules(msgspec.Struct, frozen=True):
    """All rules of a file; ``every`` and ``remind`` are seconds, and ``remind`` 0 means never."""

    rules: tuple[Rule, ...]
    send: Target
    every: float = 15.0
    remind: float = 4 * 3600.0


def read_rules(path: str) -> Rules:
    """Read a file of rules.

    Raises:
        InvalidOption: the file cannot be read, or a rule is wrong; the error names the place.
    """
    try:
        with open(path, "rb") as file:
            data = tomllib.load(file)
    except OSError as error:
        raise InvalidOption(f"cannot read the rules in {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidOption(f"{path} is not TOML: {error}") from error
    _known(path, data, ("every", "remind", "send", "rule"))
    rows = data.get("rule")
    if not isinstance(rows, list) or not rows:
        raise InvalidOption(f"{path} has no rule; write one as [[rule]] with name, when and above")
    rules = tuple(_rule(f"{path}, rule {n}", row) for n, row in enumerate(rows, 1))
    names = [rule.name for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise InvalidOption(f"{path}: two rules have the name {name!r}; give each its own")
    every = _seconds(path, data, "every", 15.0, least=1.0)
    remind = _seconds(path, data, "remind", 4 * 3600.0)
    return Rules(rules, _target(path, data.get("send")), every, remind)


def _rule(where: str, row: object) -> Rule:
    if not isinstance(row, dict):
        raise InvalidOption(f"{where} must be a table: [[rule]]")
    _known(where, row, Rule.__struct_fields__)
    if not isinstance(row.get("name"), str) or not row["name"].strip():
        raise InvalidOption(f"{where} needs a name, such as name = 'orders are late'")
    where = f"{where} ({row['name']!r})"
    kind = row.get("when")
    if kind not in KINDS:
        near = did_you_mean(str(kind), KINDS) if kind else ""
        raise InvalidOption(f"{where}: when must be one of {', '.join(KINDS)}{_hint(near)}")
    if "above" not in row and kind != "no-worker":
        raise InvalidOption(f"{where} needs above: {KINDS[kind]}")
    rule = _convert(where, row, Rule)
    if rule.queue:
        check_name("queue", rule.queue)
    if kind == "disk" and rule.queue:
        raise InvalidOption(f"{where}: a disk belongs to the whole store; leave queue out")
    if kind in _PARTS and not 0 <= rule.above < 1:
        raise InvalidOption(
            f"{where}: above must be at least 0 and less than 1, such as 0.02, not {rule.above:g}"
        )
    if min(rule.above, rule.lasting, rule.at_least) < 0 or rule.within < 60:
        raise InvalidOption(f"{where}: numbers must not be negative, and within is at least 60")
    return rule


def _target(where: str, row: object) -> Target:
    where = f"{where}, [send]"
    if not isinstance(row, dict):
        raise InvalidOption(f"{where} is missing; give it a webhook or a command")
    _known(where, row, Target.__struct_fields__)
    target = _convert(where, row, Target)
    if bool(target.webhook) == bool(target.command):
        raise InvalidOption(f"{where} needs a webhook or a command, and not both")
    if target.webhook and not target.webhook.startswith(("http://", "https://")):
        raise InvalidOption(f"{where}: webhook must begin with http:// or https://")
    if not (0 < target.timeout <= 300 and 1 <= target.tries <= 10):
        raise InvalidOption(f"{where}: timeout is up to 300 seconds, and tries is 1 to 10")
    headers = {name: _expanded(where, text) for name, text in target.headers.items()}
    return msgspec.structs.replace(target, headers=headers)


def _expanded(where: str, text: str) -> str:
    """A header. A ``$NAME`` at its end becomes the value of the environment variable ``NAME``.

    So the file needs no secret.
    """
    before, mark, name = text.rpartition("$")
    if not mark:
        return text
    if name not in os.environ:
        raise InvalidOption(f"{where}: the environment has no variable {name}")
    return before + os.environ[name]


def _convert(where: str, row: Mapping[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(dict(row), kind)
    except msgspec.ValidationError as error:
        text = str(error).replace("$.", "")
        raise InvalidOption(f"{where}: {text[0].lower()}{text[1:]}") from None


def _seconds(
    where: str, data: Mapping[str, Any], name: str, default: float, least: float = 0.0
) -> float:
    value = data.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= least:
        raise InvalidOption(f"{where}: {name} must be a number of seconds, at least {least:g}")
    return float(value)


def _known(where: str, row: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in row:
        if name not in names:
            _unknown(where, name, names)


def _unknown(where: str, name: str, names: tuple[str, ...]) -> NoReturn:
    near = did_you_mean(name, names)
    raise InvalidOption(
        f"{where}: there is no setting {name!r}; {near or 'use: ' + ', '.join(names)}"
    )


def _hint(near: str) -> str:
    return f"; {near}" if near else ""
