"""The reports that people ask for."""

from django.db import models


class Report(models.Model):
    """A report: asked for, then made by a task."""

    title = models.CharField(max_length=80)
    rows = models.PositiveIntegerField(default=50)
    job = models.CharField(max_length=64, default="")
    text = models.TextField(default="")
    asked = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.title
