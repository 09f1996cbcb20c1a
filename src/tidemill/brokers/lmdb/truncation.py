"""Find data files that lack pages: reading beyond the end would kill the process (SIGBUS).

A sound file may have a few pages less than the last page number of LMDB says. LMDB never writes a
page that a transaction takes and frees again, but lists it as a free page. So a file is truncated
if a page beyond its end is not on the list of free pages.

The list is an ordinary tree of LMDB's, which py-lmdb does not show. This module reads the list from
the file, which happens only when a file looks too short. The layout is that of LMDB 0.9, data
format 1.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

from tidemill.core.errors import BrokerUnavailable

_HEADER = struct.Struct("=QHHHH")  # page number, padding, flags, lower, upper
_META = struct.Struct("=IIQQ")  # magic, version, address, size of the map
_TREE = struct.Struct("=IHHQQQQQ")  # page size, flags, depth, counts, root
_LAST = struct.Struct("=QQ")  # last page, transaction
_NODE = struct.Struct("=HHHH")  # low and high half of a size, flags, size of the key
_MAGIC = 0xBEEFC0DE
_BRANCH = 0x01  # the flag of a page that is not a leaf
_BIG = 0x01  # the flag of a node whose value has its own pages
_NONE = 2**64 - 1
_TRIES = 20
_FREE_MOST = 1 << 20  # pages at the end that one transaction may have taken and freed again


class _Truncated(Exception):
    """A needed page lies beyond the end of the file."""


def check_length(path: str) -> None:
    """Refuse a data file that lacks pages. An empty file is accepted: LMDB will fill the file.

    Raises:
        BrokerUnavailable: the file is truncated.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        lacking = _File(fd).lacking() if os.fstat(fd).st_size else ""
    finally:
        os.close(fd)
    if lacking:
        raise BrokerUnavailable(f"{path} is truncated: {lacking}; restore it from a backup")


class _File:
    """A data file, read without a map."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._page = 4096

    def lacking(self) -> str:
        """Name the needed pages beyond the end of the file; empty when none is missing.

        Other processes may write at the same time, and reuse the pages that this method reads. Then
        it reads the pages again.
        """
        for _ in range(_TRIES):
            try:
                before = self._newest()
            except _Truncated as error:
                return str(error)
            if before is None:
                return ""  # not a file of LMDB: LMDB itself will report this
            try:
                lacking = self._lacking(*before)
            except (_Truncated, struct.error) as error:
                lacking = str(error)
            if not lacking:
                return ""
            if self._newest() == before:
                return lacking
        return ""

    def _newest(self) -> tuple[int, int, int] | None:
        """(last page, root of the list of free pages, transaction) of the newest commit."""
        head = self._read(0, _HEADER.size + _META.size + _TREE.size)
        if _META.unpack_from(head, _HEADER.size)[0] != _MAGIC:
            return None
        self._page = _TREE.unpack_from(head, _HEADER.size + _META.size)[0]
        return max(self._meta(0), self._meta(self._page), key=lambda meta: meta[2])

    def _lacking(self, last: int, root: int, _: int) -> str:
        # Read the size after the numbers of the commit, since files only grow.
        size = os.fstat(self._fd).st_size
        pages = size // self._page
        missing = set(range(pages, min(last + 1, pages + _FREE_MOST)))
        if missing and last + 1 < pages + _FREE_MOST:
            for free in self._free_lists(root):
                missing.difference_update(free)
        if not missing:
            return ""
        return f"it has {size:,} bytes of {(last + 1) * self._page:,}"

    def _meta(self, at: int) -> tuple[int, int, int]:
        """Last page, root of the list of free pages, and transaction of one of the two heads."""
        data = self._read(at + _HEADER.size, _META.size + 2 * _TREE.size + _LAST.size)
        root = _TREE.unpack_from(data, _META.size)[7]
        last, transaction = _LAST.unpack_from(data, _META.size + 2 * _TREE.size)
        return last, root, transaction

    def _free_lists(self, root: int) -> Iterator[tuple[int, ...]]:
        """The lists of free pages, of one transaction each."""
        waiting = [root] if root != _NONE else []
        while waiting:
            page = self._read(waiting.pop() * self._page, self._page)
            _, _, flags, lower, _ = _HEADER.unpack_from(page)
            count = (lower - _HEADER.size) // 2
            for offset in struct.unpack_from(f"={count}H", page, _HEADER.size):
                low, high, kind, key = _NODE.unpack_from(page, offset)
                if flags & _BRANCH:
                    waiting.append(low | high << 16 | kind << 32)
                    continue
                at = offset + _NODE.size + key
                data = page[at : at + (low | high << 16)]
                if kind & _BIG:
                    (number,) = struct.unpack_from("=Q", page, at)
                    data = self._read(number * self._page + _HEADER.size, low | high << 16)
                (length,) = struct.unpack_from("=Q", data)
                yield struct.unpack_from(f"={length}Q", data, 8)

    def _read(self, at: int, size: int) -> bytes:
        data = os.pread(self._fd, size, at)
        if len(data) < size:
            raise _Truncated(f"it lacks page {at // self._page}")
        return data
