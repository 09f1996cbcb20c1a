"""What the broker of an app can do, and refusing what it cannot, by name.

Some brokers say so by their URL alone. What they lack is refused where it is declared, and nothing
is opened for that; else it is refused where it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.brokers.base import Feature, features_of, lacks, need

if TYPE_CHECKING:
    from tidemill.app import Tidemill
    from tidemill.options import Options

__all__ = ["Features"]


class Features:
    """The features of one app's broker. ``url`` is where it lives, if that was said."""

    def __init__(self, mill: Tidemill, url: str | None) -> None:
        self._mill = mill
        self._url = url or ""
        self._known = None if url is None else features_of(url)

    def need(self, feature: Feature, option: str) -> None:
        """Refuse what is about to be used; the broker is opened if its URL does not say.

        Raises:
            FeatureMissing: the broker lacks it; the sentence names the option and the feature.
        """
        if self._mill.sync:
            return  # nothing is stored
        if self._known is None:
            need(self._mill.broker, feature, option)
        else:
            self.foresee(feature, option)

    def foresee(self, feature: Feature, option: str) -> None:
        """Refuse what is declared, as far as the URL says; nothing is opened.

        Raises:
            FeatureMissing: as ``need``.
        """
        if self._known is not None and feature not in self._known:
            raise lacks(self._url, feature, option)

    def declare(self, options: Options) -> Options:
        """Refuse options that are declared, as far as the URL says; the same options.

        Raises:
            FeatureMissing: as ``need``.
        """
        for feature, option in options.needs.items():
            self.foresee(feature, option)
        return options

    def use(self, options: Options) -> None:
        """Refuse options of a job that is about to be put.

        Raises:
            FeatureMissing: as ``need``.
        """
        for feature, option in options.needs.items():
            self.need(feature, option)
