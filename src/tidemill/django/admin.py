"""Jobs, queues, schedules and workers in Django's admin, on every broker.

The index of the admin lists the models of ``django://``. Their permissions decide who may view,
change or delete jobs, queues and schedules, and who may add schedules. The pages read the stores of
the apps through the broker contract (:mod:`.admin_pages`). So they show the same on LMDB, Redis or
PostgreSQL.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.urls import path

from tidemill.django.admin_pages import JobPages, Pages, QueuePages, SchedulePages, WorkerPages
from tidemill.django.models import Job, Owner, Queue, Schedule


class StoreAdmin(admin.ModelAdmin):
    """A model admin with the pages of a class in :mod:`.admin_pages`."""

    pages: type[Pages]

    def get_urls(self) -> list[Any]:
        """The URLs of the list and of the page of one thing. Both pages also receive actions."""
        pages = self.pages(self)
        view, name = self.admin_site.admin_view, f"tidemill_{self.opts.model_name}"
        adding = [path("add/", view(pages.add), name=f"{name}_add")] if pages.add else []
        return [
            path("", view(pages.list), name=f"{name}_changelist"),
            *adding,
            path("<path:object_id>/change/", view(pages.show), name=f"{name}_change"),
        ]

    def has_add_permission(self, request: Any) -> bool:
        """False for things that only code and workers make, such as jobs."""
        return bool(self.pages.add) and super().has_add_permission(request)


@admin.register(Job)
class JobAdmin(StoreAdmin):
    """Jobs: list, search, trail, retry, cancel, delete."""

    pages = JobPages


@admin.register(Queue)
class QueueAdmin(StoreAdmin):
    """Queues: numbers, pause, resume, purge."""

    pages = QueuePages


@admin.register(Schedule)
class ScheduleAdmin(StoreAdmin):
    """Schedules: times, add, run now, pause, resume, edit, remove."""

    pages = SchedulePages


@admin.register(Owner)
class WorkerAdmin(StoreAdmin):
    """Workers and consumers that are alive."""

    pages = WorkerPages
