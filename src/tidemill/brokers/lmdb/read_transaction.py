"""Read transactions that raise tidemill's errors, as commits do."""

from __future__ import annotations

from collections.abc import Callable

import lmdb

from tidemill.brokers.lmdb.write_transaction import begin_resized, ended


class Reading:
    """A read transaction, as a context manager; ``translated`` turns LMDB's errors into tidemill's.

    No caller holds a read transaction for long, since its pages cannot be reused meanwhile.
    """

    __slots__ = ("_env", "_translated", "_txn")

    def __init__(self, env: lmdb.Environment, translated: Callable[[Exception], Exception]) -> None:
        self._env = env
        self._translated = translated

    def __enter__(self) -> lmdb.Transaction[bytes]:
        try:
            self._txn = begin_resized(self._env, write=False)
        except lmdb.Error as error:
            raise self._translated(error) from error
        return self._txn

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        self._txn.abort()
        ended()
        if isinstance(error, lmdb.Error):
            raise self._translated(error) from error
