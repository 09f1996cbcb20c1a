"""The pages of settings and of help."""

from __future__ import annotations

import platform
from typing import Any

from starlette.responses import Response

from tidemill import __version__
from tidemill.brokers.contract.features import Feature
from tidemill.dashboard.formats import ago, number, size
from tidemill.dashboard.page import Page
from tidemill.dashboard.routes import Routes

routes = Routes()

MEANING = {  # the use of each feature, in words
    Feature.DURABLE: "jobs survive kill -9 of every process",
    Feature.PROCESSES: "several processes share the store",
    Feature.IDS: "a caller may choose the id of a job",
    Feature.DELAY: "jobs can start later",
    Feature.PRIORITY: "jobs with a higher priority start first",
    Feature.KEYS: "one unfinished job for each key",
    Feature.UNIQUE: "a key stays taken for a time after success",
    Feature.RESULTS: "results are kept for a time",
    Feature.INSPECT: "search, counts by state, list of workers",
    Feature.FAILED: "failed jobs can be listed and retried",
    Feature.CANCEL: "jobs can be cancelled",
    Feature.ALTER: "another priority or queue for jobs that wait",
    Feature.PAUSE: "queues can be paused",
    Feature.MAX_SIZE: "queues can have a bound",
    Feature.MERGED: "one order across queues",
    Feature.TRANSACTIONS: "jobs can be put in your own transaction",
    Feature.BACKUP: "a copy of the store while in use",
    Feature.FLOWS: "chains, groups and flows",
    Feature.MOVE: "jobs can move to another store",
    Feature.SCHEDULES: "jobs at planned times",
    Feature.LIMITS: "rates, windows, concurrency, breakers",
    Feature.NAMED: "a job can be taken by its id",
    Feature.TOPICS: "one message goes into many queues",
    Feature.HISTORY: "rates, times, failures, audit",
    Feature.REMOTE_OWNERS: "workers on other machines over HTTP",
}

_LABELS = {  # of facts whose names alone are not clear
    "file_bytes": "size of the file",
    "used_bytes": "used in the file",
    "map_bytes": "most that the file may hold",
    "reserve_bytes": "kept free for a full disk",
    "tables_bytes": "size of the tables",
    "memory_bytes": "memory in use",
    "maxmemory_bytes": "most memory (maxmemory)",
}


@routes.get("/settings")
def settings(page: Page) -> Response:
    facts = [
        (_LABELS.get(name, name.replace("_", " ")), _shown(name, value))
        for name, value in page.look.facts.items()
        if name != "url"
    ]
    versions = [
        ("tidemill", __version__),
        ("Python", platform.python_version()),
        ("system", platform.platform()),
    ]
    features = [(f, MEANING.get(f, ""), page.has(f)) for f in Feature]
    you = [
        ("name", page.user.name or "not known"),
        ("role", page.user.role.name.lower()),
        ("sees arguments", "yes" if page.sees_arguments else "no"),
        ("edits jobs", "yes" if page.edits_jobs else "no"),
    ]
    return page.render(
        "settings.html",
        title="Settings",
        facts=facts,
        versions=versions,
        features=features,
        you=you,
    )


def _shown(name: str, value: Any) -> str:
    """A fact as people read it. Brokers leave passwords out of their facts."""
    if name == "made":
        return ago(value)
    if name.endswith("_bytes") and isinstance(value, (int, float)):
        return size(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return number(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return str(value)


KEYS = (
    ("/", "search jobs"),
    ("j, k", "move down and up in a list"),
    ("x", "select the row"),
    ("Enter", "open the row"),
    ("r", "retry: the job, or the selected jobs"),
    ("c", "cancel: the job, or the selected jobs"),
    ("e", "edit the job, and run it again"),
    ("p", "pause live news, or go on"),
    ("?", "this page"),
    ("Esc", "leave a field or a dialog"),
)


@routes.get("/help")
def help_(page: Page) -> Response:
    return page.render("help.html", title="Help", keys=KEYS, still=True)
