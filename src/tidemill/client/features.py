"""Check that the broker of an app has the features that options need.

The URL of some brokers tells their features. Then an option whose feature is missing is refused at
its declaration, before any connection is opened. With other brokers, such an option is refused at
its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.brokers.contract.features import Feature, lacks, need
from tidemill.brokers.registry import features_of

if TYPE_CHECKING:
    from tidemill.client.options import Options
    from tidemill.runtime import Runtime


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
