"""The modules of pages. Each has its ``routes``; the first route that matches a path answers."""

from __future__ import annotations

from tidemill.dashboard import (
    audit_page,
    bulk,
    failures,
    flows,
    help_page,
    job,
    jobs,
    limits,
    live,
    overview,
    queues,
    schedules,
    settings_page,
    static_files,
    tasks,
    workers,
)

MODULES = (
    static_files,
    live,
    overview,
    queues,
    jobs,
    job,
    failures,
    tasks,
    schedules,
    flows,
    limits,
    workers,
    bulk,
    audit_page,
    settings_page,
    help_page,
)

NAVIGATION = (
    ("/", "Overview", "gauge", "o"),
    ("/queues", "Queues", "queues", "q"),
    ("/jobs", "Jobs", "list", "j"),
    ("/failed", "Failed", "cross", "f"),
    ("/tasks", "Tasks", "code", "t"),
    ("/schedules", "Schedules", "clock", "s"),
    ("/flows", "Flows", "flow", "l"),
    ("/limits", "Limits", "limit", "i"),
    ("/workers", "Workers", "workers", "w"),
    ("/bulk", "Bulk", "stack", "b"),
    ("/audit", "Audit", "audit", "a"),
    ("/settings", "Settings", "settings", "e"),
)
"""Path, name, icon and key (after ``g``) of each link."""
