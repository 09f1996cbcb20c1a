"""The Django application ``tidemill.django``, labelled ``tidemill``."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig


class TidemillConfig(AppConfig):
    """The application, which has the tables of the broker ``django://``."""

    name = "tidemill.django"
    label = "tidemill"
    verbose_name = "Tidemill"
    default_auto_field: Any = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from tidemill.django import checks  # noqa: F401
