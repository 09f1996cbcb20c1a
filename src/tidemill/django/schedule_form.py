"""The admin's form for a new schedule."""

from __future__ import annotations

from typing import Any

from django import forms
from django.utils import timezone

from tidemill.django.project import DjangoMill, load_tasks
from tidemill.schedules.declare import Schedule


class ScheduleForm(forms.Form):
    """Name, call and times of a schedule. :meth:`save` makes the checks that need the store."""

    name = forms.CharField(max_length=200)
    task = forms.CharField(
        max_length=500,
        help_text="The name of a task, such as shop.tasks.send_receipt.",
        widget=forms.TextInput(attrs={"list": "tasks", "size": 60}),
    )
    arguments = forms.JSONField(
        required=False,
        help_text='A list in JSON, such as ["night", 3].',
        widget=forms.TextInput(attrs={"size": 60}),
    )
    keywords = forms.JSONField(
        required=False,
        help_text='An object in JSON, such as {"note": "night"}.',
        widget=forms.TextInput(attrs={"size": 60}),
    )
    queue = forms.CharField(
        required=False, max_length=200, help_text="Leave it empty for the queue of the task."
    )
    cron = forms.CharField(
        required=False,
        max_length=200,
        help_text="Minute, hour, day of month, month, day of week: 0 3 * * * is 3:00 every day.",
    )
    every = forms.CharField(
        required=False, max_length=100, help_text="Such as 15 minutes, or 1 day. Instead of cron."
    )
    at = forms.DateTimeField(
        required=False, help_text="A single time: 2030-12-31 23:59. Instead of cron."
    )
    zone = forms.CharField(
        required=False,
        max_length=100,
        label="Time zone",
        initial=timezone.get_default_timezone_name,
    )
    repeats = forms.IntegerField(
        required=False, min_value=1, help_text="The number of jobs. Empty: the schedule never ends."
    )

    def clean_arguments(self) -> list[Any]:
        """The arguments, which must be a list."""
        given = self.cleaned_data["arguments"]
        if given is not None and not isinstance(given, list):
            raise forms.ValidationError("This must be a list in JSON.")
        return given or []

    def clean_keywords(self) -> dict[str, Any]:
        """The keywords, which must be an object."""
        given = self.cleaned_data["keywords"]
        if given is not None and not isinstance(given, dict):
            raise forms.ValidationError("This must be an object in JSON.")
        return given or {}

    def save(self, mill: DjangoMill) -> Schedule:
        """Add the schedule.

        Raises:
            TidemillError: a value is wrong, the name is taken, or nobody has declared the task.
            TypeError: the task does not take these arguments.
        """
        given = self.cleaned_data
        load_tasks()
        call = mill.call(given["task"], *given["arguments"], **given["keywords"])
        if given["queue"]:
            call = call.using(queue=given["queue"])
        names = ("cron", "every", "at", "zone", "repeats")
        times: Any = {name: given[name] for name in names if given[name]}
        return mill.schedules.add(given["name"], call, **times)


def known_tasks(mill: DjangoMill) -> list[str]:
    """The names of the tasks in the modules ``tasks`` of the project."""
    load_tasks()
    return sorted(name for name in list(mill.tasks) if not name.startswith("tidemill."))
