"""The options of a task, a call or a message: checked once, applied in layers, immutable.

The URL of some brokers tells their features. Then an option whose feature is missing is refused at
its declaration, before any connection is opened. With other brokers, such an option is refused at
its first use.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import msgspec

from tidemill.brokers.contract.features import Feature, lacks, need
from tidemill.brokers.registry import features_of
from tidemill.core.config import (
    Seconds,
    check_conflict,
    check_known,
    check_moment,
    check_name,
    check_priority,
    check_retries,
    check_seconds,
)
from tidemill.core.envelope import Envelope, Unique, rank_of
from tidemill.core.job import Conflict
from tidemill.core.retry import (
    ErrorType,
    ErrorTypes,
    Retries,
    RetryPolicy,
    RetryRule,
    check_error_types,
    check_retry_rule,
)
from tidemill.errors import InvalidOption
from tidemill.limits.declare import FunctionOfArguments, Limit, check_limit

if TYPE_CHECKING:
    from tidemill.runtime import Runtime


@dataclasses.dataclass(frozen=True)
class Key:
    """A unique key with its rules: ``@mill.task(key=Key("k", on_conflict="replace"))``.

    At most one unfinished job has the key. A plain ``key="k"`` has the defaults of the rules.

    Attributes:
        name: the key: text, or a function of the task's arguments (of the body of a message).
        on_conflict: what a put does when an unfinished job has the key. ``"keep"`` returns that
            job, ``"reject"`` raises ``DuplicateJob``, ``"replace"`` puts the new job in its place,
            and ``"merge"`` keeps that job with the higher priority and the earlier time.
        hold: seconds from acceptance for which a job that has succeeded still holds the key.
        max_wait: with ``"replace"``: the most seconds for which later jobs can postpone the job.

    Raises:
        InvalidOption: a value cannot be used, or two values contradict each other.
    """

    name: str | FunctionOfArguments[str]
    on_conflict: Literal["keep", "reject", "replace", "merge"] = "keep"
    hold: Seconds = 0.0
    max_wait: Seconds = 0.0

    def __post_init__(self) -> None:
        if not callable(self.name):
            check_name("key", self.name)
        conflict = check_conflict(self.on_conflict)
        hold, max_wait = check_seconds("hold", self.hold), check_seconds("max_wait", self.max_wait)
        if hold and conflict == Conflict.REPLACE:
            raise InvalidOption(
                "hold refuses later jobs, and on_conflict='replace' accepts them; leave one of the "
                "two out"
            )
        if max_wait and conflict != Conflict.REPLACE:
            raise InvalidOption(
                "max_wait is the longest time that on_conflict='replace' may delay a job; give both"
            )
        for name, value in (("on_conflict", conflict), ("hold", hold), ("max_wait", max_wait)):
            object.__setattr__(self, name, value)

    def of(self, *args: Any, **kwargs: Any) -> str:
        """The key of a job with these arguments."""
        name = self.name
        return name if isinstance(name, str) else check_name("key", name(*args, **kwargs))


class _CommonOptions(TypedDict, total=False):
    """The options of both calls and messages. None leaves an option as it is."""

    priority: float | None
    retries: int | Retries | None
    expires: Seconds | None
    key: str | FunctionOfArguments[str] | Key | None
    limit: Limit | str | None
    tags: list[str] | tuple[str, ...] | set[str] | frozenset[str] | None


class _PerJobOptions(TypedDict, total=False):
    """The options of a single call or put, which have no defaults in a task or an app."""

    delay: Seconds | None
    at: dt.datetime | float | None
    id: str | None
    headers: Mapping[str, str] | None
    txn: Any


class _RunOptions(_CommonOptions, total=False):
    """The options of both tasks and their calls. ``timeout=None`` removes the timeout."""

    queue: str | None
    timeout: Seconds | None
    result_ttl: Seconds | None


class TaskOptions(_RunOptions, total=False):
    """The options of ``Tidemill(…)`` and ``@mill.task(…)``: see ``docs/reference/options.md``."""

    expects: ErrorTypes | None


class CallOptions(_RunOptions, _PerJobOptions, total=False):
    """The options of ``task.using(…)`` and ``call.using(…)``: see ``docs/reference/options.md``."""


class PutOptions(_CommonOptions, _PerJobOptions, total=False):
    """The options of a put to a queue of messages: see ``docs/reference/options.md``."""

    ttr: Seconds | None


class PublishOptions(TypedDict, total=False):
    """The options of a publish to a topic: see ``docs/reference/options.md``."""

    priority: float | None
    retries: int | Retries | None
    expires: Seconds | None
    tags: list[str] | tuple[str, ...] | set[str] | frozenset[str] | None
    delay: Seconds | None
    at: dt.datetime | float | None
    ttr: Seconds | None
    headers: Mapping[str, str] | None
    txn: Any


TASK_OPTIONS = tuple(TaskOptions.__annotations__)
CALL_OPTIONS = tuple(CallOptions.__annotations__)
PUBLISH_OPTIONS = tuple(PublishOptions.__annotations__)
PUT_OPTIONS = tuple(PutOptions.__annotations__)


class Options(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Checked options; units and meanings as in :class:`tidemill.core.job.Envelope`.

    ``retry_rule`` and ``expects`` are read where the job runs. No job stores them.

    ``given`` is None, except for a call by name. Then ``given`` has the options of the call. The
    declared options are read when the call is enqueued (:mod:`tidemill.client.declarations`).
    """

    queue: str = "default"
    rank: int = rank_of(0)
    retries: RetryPolicy = RetryPolicy()
    retry_rule: RetryRule | None = None
    expects: tuple[ErrorType, ...] = ()
    timeout: float = 0.0
    expires: float = 0.0
    key: Key | None = None
    result_ttl: float = -1.0
    limit: Limit | None = None
    tags: tuple[str, ...] = ()
    delay: float = 0.0
    at: float = 0.0
    ttr: float = -1.0
    id: str = ""
    headers: Mapping[str, str] = {}
    txn: Any = None
    given: Mapping[str, Any] | None = None

    def changed(self, what: str, given: Mapping[str, Any], known: tuple[str, ...]) -> Options:
        """Check the user's options, and return a copy with them."""
        rule = check_retry_rule(given.get("retries"))
        if "expects" not in known:
            _refuse_in_calls(rule, given)
        check_known(what, given, known)
        changes: dict[str, Any] = {} if rule is None else {"retry_rule": rule}
        for name, value in given.items():
            if value is not None or name == "timeout":
                field, check = _CHECKS[name]
                changes[field] = check(value)
        if "retries" in changes:
            changes["retries"] = check_retries(changes["retries"], self.retries)
        if changes.get("delay") is not None and changes.get("at") is not None:
            raise InvalidOption("give either delay or at, not both")
        if "delay" in changes:  # a delay given now replaces an earlier ``at``, and the reverse
            changes["at"] = 0.0
        elif "at" in changes:
            changes["delay"] = 0.0
        if self.given is not None:
            return msgspec.structs.replace(self, **changes, given=_later(self.given, given))
        return msgspec.structs.replace(self, **changes)

    def envelope(self) -> Envelope:
        """A new envelope with these options, without the parts that differ between jobs."""
        return msgspec.structs.replace(self._template)

    @property
    def unique(self) -> Unique | None:
        """The times of the key, ``hold`` and ``max_wait``; None if neither is given."""
        key = self.key
        if key is None or not (key.hold or key.max_wait):
            return None
        return Unique(check_seconds("hold", key.hold), check_seconds("max_wait", key.max_wait))

    @functools.cached_property
    def needs(self) -> dict[Feature, str]:
        """The features that these options need, each with the option that needs it."""
        given = (
            (self.key, Feature.KEYS, "key="),
            (self.unique is not None, Feature.UNIQUE, "hold= or max_wait= of a key"),
            (self.limit is not None, Feature.LIMITS, "limit="),
            (self.result_ttl >= 0, Feature.RESULTS, "result_ttl="),
            (self.id, Feature.IDS, "id="),
            (self.delay, Feature.DELAY, "delay="),
            (self.at, Feature.DELAY, "at="),
            (self.rank != rank_of(0), Feature.PRIORITY, "priority="),
        )
        return {feature: option for is_given, feature, option in given if is_given}

    @functools.cached_property
    def _template(self) -> Envelope:
        return Envelope(
            id=self.id,
            queue=self.queue,
            rank=self.rank,
            delay=self.delay,
            at=self.at,
            expires=self.expires,
            timeout=self.timeout,
            ttr=self.ttr,
            retries=self.retries,
            on_conflict=self.key.on_conflict if self.key is not None else "keep",
            unique=self.unique,
            result_ttl=self.result_ttl,
            tags=self.tags,
            headers=dict(self.headers),
        )


def _refuse_in_calls(rule: RetryRule | None, given: Mapping[str, Any]) -> None:
    """Refuse options of a call or a message that only the declaration of a task can have."""
    if rule is not None:
        raise InvalidOption(
            "on, never and when of retries cannot be stored in a job or a message; "
            "give them to the declaration of a task, @mill.task(retries=Retries(…))"
        )
    if "expects" in given:
        raise InvalidOption(
            "expects cannot be stored in a job or a message; "
            "give it to the declaration of a task, @mill.task(expects=…)"
        )


def _later(before: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options given to a call by name in two layers; the later layer wins."""
    times = ("delay", "at") if given.keys() & {"delay", "at"} else ()
    return {name: value for name, value in before.items() if name not in times} | dict(given)


def _check_tags(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, (list, tuple, set, frozenset)):
        raise InvalidOption(f"tags must be a list of names, not {value!r}")
    return tuple(check_name("tag", tag) for tag in value)


def check_headers(value: object) -> Mapping[str, str]:
    if not isinstance(value, Mapping) or not all(
        isinstance(k, str) and isinstance(v, str) for k, v in value.items()
    ):
        raise InvalidOption(f"headers must map strings to strings, not {value!r}")
    return dict(value)


_CHECKS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "queue": ("queue", lambda v: check_name("queue", v)),
    "priority": ("rank", check_priority),
    "retries": ("retries", lambda v: v),  # ``Options.changed`` checks the value with the old policy
    "expects": ("expects", lambda v: check_error_types("expects", v)),
    "timeout": ("timeout", lambda v: 0.0 if v is None else check_seconds("timeout", v)),
    "expires": ("expires", lambda v: check_seconds("expires", v)),
    "key": ("key", lambda v: v if isinstance(v, Key) else Key(v)),
    "result_ttl": ("result_ttl", lambda v: check_seconds("result_ttl", v)),
    "limit": ("limit", check_limit),
    "tags": ("tags", _check_tags),
    "delay": ("delay", lambda v: check_seconds("delay", v)),
    "at": ("at", lambda v: check_moment("at", v)),
    "ttr": ("ttr", lambda v: check_seconds("ttr", v)),
    "id": ("id", lambda v: check_name("id", v)),
    "headers": ("headers", check_headers),
    "txn": ("txn", lambda v: v),
}


class Features:
    """The features of one app's broker. ``url`` is None while the app does not know its URL."""

    def __init__(self, runtime: Runtime, url: str | None) -> None:
        self._runtime = runtime
        self._url = url or ""
        self._known = None if url is None else features_of(url)

    def need(self, feature: Feature, option: str) -> None:
        """Check a feature before its use; open the broker if its URL does not tell the features.

        Raises:
            FeatureMissing: the broker lacks the feature; the text names the feature and the option.
        """
        if self._runtime.sync:
            return  # the jobs run in the caller, and no broker is used
        if self._known is None:
            need(self._runtime.broker, feature, option)
        else:
            self.need_if_known(feature, option)

    def need_if_known(self, feature: Feature, option: str) -> None:
        """Check a feature at a declaration, if the URL tells the features; open nothing."""
        if self._known is not None and feature not in self._known:
            raise lacks(self._url, feature, option)

    def declare(self, options: Options) -> Options:
        """Check the options of a declaration, if the URL tells the features, and return them."""
        for feature, option in options.needs.items():
            self.need_if_known(feature, option)
        return options

    def use(self, options: Options) -> None:
        """Check the options of a job before its put."""
        for feature, option in options.needs.items():
            self.need(feature, option)
