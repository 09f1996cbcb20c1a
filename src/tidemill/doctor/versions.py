"""Checks of versions: of drivers, of workers, of the store."""

from __future__ import annotations

import contextlib
import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from tidemill import __version__
from tidemill.doctor.findings import Finding, Seen

_SHOWN_MOST = 3  # the most workers of a version whose names are shown


def installed() -> Finding:
    found = f"tidemill {version('tidemill')}"
    for name in ("lmdb", "msgspec", "redis", "psycopg", "pika"):
        with contextlib.suppress(PackageNotFoundError):  # a driver that is not installed
            found = f"{found}, {name} {version(name)}"
    system = f"Python {platform.python_version()} on {platform.system()}"
    if int(version("lmdb").split(".")[0]) < 3:
        return Finding("versions", "fail", f"{system}, {found}", "pip install 'lmdb>=3,<4'")
    return Finding("versions", "ok", f"{system}, {found}")


def remedy(problem: str) -> str:
    """The advice for a store that does not open, by the text of its error."""
    if "tidemill migrate" in problem:
        return "run it once with this release, as the user that owns the tables"
    if "upgrade tidemill" in problem:
        return "pip install --upgrade tidemill, here and on the machines of the workers"
    if "there is no store in" in problem:
        return "start a worker, which makes the store, or name another store"
    return "check the url and its server"


def same_versions(seen: Seen) -> Iterator[Finding]:
    """Find workers whose release differs from other workers or from this command."""
    workers: dict[str, list[str]] = {}
    for owner in seen.owners:
        if owner.version:  # only workers have a version
            workers.setdefault(owner.version, []).append(owner.name)
    if not workers or [*workers] == [__version__]:
        return
    newest = max([*workers, __version__], key=_order)
    if len(workers) > 1:
        told = "; ".join(_told(one, workers[one]) for one in sorted(workers, key=_order))
        text = f"workers run different releases: {told}"
        advice = f"restart the others with tidemill {newest}, unless a deploy is under way"
    else:
        ((one, names),) = workers.items()
        text = f"all workers run another release than this command, {__version__}: "
        text += _told(one, names)
        advice = f"restart them with tidemill {newest}"
        if one == newest:
            advice = f"use it here, too: pip install tidemill=={newest}"
    yield Finding("versions", "warn", text, advice)


def _told(release: str, workers: list[str]) -> str:
    shown = ", ".join(sorted(workers)[:_SHOWN_MOST])
    more = " …" if len(workers) > _SHOWN_MOST else ""
    return f"{release} ({len(workers)}: {shown}{more})"


def _order(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release)]
