"""The options of a task, a call or a message: checked once, applied in layers, immutable.

The URL of some brokers tells their features. Then an option whose feature is missing is refused at
its declaration, before any connection is opened. With other brokers, such an option is refused at
its first use.
"""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import msgspec

from tidemill.brokers.contract.features import Feature, lacks, need
from tidemill.brokers.registry import features_of
from tidemill.core.backoff import RetryPolicy
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
from tidemill.core.envelope import Envelope, Unique
from tidemill.core.job import Conflict
from tidemill.core.priority import rank_of
from tidemill.core.retry import (
    ErrorType,
    ErrorTypes,
    Retries,
    RetryRule,
    check_error_types,
    check_retry_rule,
)
from tidemill.errors import InvalidOption
from tidemill.limits.declare import FunctionOfArguments, Limit, check_limit

if TYPE_CHECKING:
    from tidemill.runtime import Runtime


Key = str | FunctionOfArguments[str]
OnConflict = Literal["keep", "reject", "replace", "merge"]


class _CommonOptions(TypedDict, total=False):
    """The options of both calls and messages. None leaves an option as it is."""

    priority: float | None
    retries: int | Retries | None
    expires: Seconds | None
    key: Key | None
    on_conflict: OnConflict | None
    unique_for: Seconds | None
    max_wait: Seconds | None
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
    key: Key = ""
    on_conflict: str = "keep"
    unique_for: float = 0.0
    max_wait: float = 0.0
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
        """Check the user's options and return a copy with them.

        Raises:
            InvalidOption: an option is unknown or has an unusable value.
        """
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
        changed = msgspec.structs.replace(self, **changes)
        _check_together(changed, changes)
        return changed

    def envelope(self) -> Envelope:
        """A new envelope with these options, without the parts that differ between jobs."""
        return msgspec.structs.replace(self._template)

    @property
    def unique(self) -> Unique | None:
        """The times of the key, ``unique_for`` and ``max_wait``; None if neither is given."""
        given = self.unique_for or self.max_wait
        return Unique(self.unique_for, self.max_wait) if given else None

    @functools.cached_property
    def needs(self) -> dict[Feature, str]:
        """The features that these options need, each with the option that needs it."""
        given = (
            (self.key, Feature.KEYS, "key="),
            (self.unique is not None, Feature.UNIQUE, "unique_for= or max_wait="),
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
            key=self.key if isinstance(self.key, str) else "",
            on_conflict=self.on_conflict,
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


def _check_together(options: Options, changes: Mapping[str, Any]) -> None:
    """Refuse an option about keys that lacks a needed option, or contradicts another option."""
    if "on_conflict" in changes and not options.key:
        raise InvalidOption("on_conflict is for a second job with the same key; give key= with it")
    if options.unique_for and not options.key:
        raise InvalidOption("unique_for is the time that a key is held; give key= with it")
    if options.unique_for and options.on_conflict not in (Conflict.KEEP, Conflict.REJECT):
        raise InvalidOption(
            f"unique_for refuses later jobs, and on_conflict={str(options.on_conflict)!r} accepts "
            "them; leave one of the two out"
        )
    if options.max_wait and options.on_conflict != Conflict.REPLACE:
        raise InvalidOption(
            "max_wait is the longest time that on_conflict='replace' may delay a job; give both"
        )


def _check_key(value: Any) -> Any:
    return value if callable(value) else check_name("key", value)


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
    "key": ("key", _check_key),
    "on_conflict": ("on_conflict", check_conflict),
    "unique_for": ("unique_for", lambda v: check_seconds("unique_for", v)),
    "max_wait": ("max_wait", lambda v: check_seconds("max_wait", v)),
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


# -- features --------------------------------------------------------------------------------------


class Features:
    """The features of one app's broker. ``url`` is None while the app does not know its URL."""

    def __init__(self, mill: Runtime, url: str | None) -> None:
        self._mill = mill
        self._url = url or ""
        self._known = None if url is None else features_of(url)

    def need(self, feature: Feature, option: str) -> None:
        """Check a feature before its use; open the broker if its URL does not tell the features.

        Raises:
            FeatureMissing: the broker lacks the feature; the text names the feature and the option.
        """
        if self._mill.sync:
            return  # the jobs run in the caller, and no broker is used
        if self._known is None:
            need(self._mill.broker, feature, option)
        else:
            self.need_if_known(feature, option)

    def need_if_known(self, feature: Feature, option: str) -> None:
        """Check a feature at a declaration, if the URL tells the features; open nothing.

        Raises:
            FeatureMissing: as ``need``.
        """
        if self._known is not None and feature not in self._known:
            raise lacks(self._url, feature, option)

    def declare(self, options: Options) -> Options:
        """Check the options of a declaration, if the URL tells the features, and return them.

        Raises:
            FeatureMissing: as ``need``.
        """
        for feature, option in options.needs.items():
            self.need_if_known(feature, option)
        return options

    def use(self, options: Options) -> None:
        """Check the options of a job before its put.

        Raises:
            FeatureMissing: as ``need``.
        """
        for feature, option in options.needs.items():
            self.need(feature, option)
