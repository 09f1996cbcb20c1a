"""Jobs, queues, schedules and workers in Django's admin, on every broker.

The index of the admin lists the models of ``django://``. Their permissions decide who may view,
change or delete jobs, queues and schedules, and who may add schedules. The pages read the stores of
the apps through the broker contract. So they show the same on LMDB, Redis or PostgreSQL.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any, ClassVar

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.models import ADDITION, CHANGE, DELETION, LogEntry
from django.contrib.admin.options import get_content_type_for_model
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils import timezone
from django.utils.http import urlencode
from django.utils.text import capfirst

from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.generic.purges import WHY_LEFT, list_purges
from tidemill.brokers.generic.purges import purge as purge_jobs
from tidemill.brokers.generic.purges import restore as restore_jobs
from tidemill.client.compositions import cancel_jobs, delete_jobs, retry_jobs
from tidemill.client.explain import trail_of
from tidemill.client.search import states_of, users_queues
from tidemill.core.job import Record, State
from tidemill.core.words import counted
from tidemill.django.framework import mills
from tidemill.django.models import Job, Owner, Queue, Schedule
from tidemill.django.project import DjangoMill, load_tasks, project_mill
from tidemill.errors import (
    InvalidOption,
    JobNotFound,
    ScheduleExists,
    ScheduleNotFound,
    TidemillError,
)
from tidemill.schedules.declare import Schedule as Declared
from tidemill.schedules.parse import When

PAGE = 100
_PIECE = 1000  # jobs in one act
ASKED = ("delete", "purge", "remove")  # actions that a second page asks about first
FILTERS = ("state", "queue", "task", "key", "tag", "text", "id")

Action = Callable[[DjangoMill, list[str], Any], tuple[str, list[str]]]
"""Acts on things by name; returns a sentence about the outcome, and the things that changed."""


def stores() -> dict[str, DjangoMill]:
    """The apps of the project by name: its own app, and the apps of aliases with another store."""
    own = project_mill()
    return {"": own} | {alias: mill for alias, mill in mills().items() if mill is not own}


class StoreAdmin(admin.ModelAdmin):
    """The pages of one kind of things, such as jobs or queues.

    Attributes:
        verbs: each action with the permission that it needs and the function that does it.
        add: the view that adds a thing, or None.
    """

    template = ""
    title = ""
    add: Any = None
    verbs: ClassVar[dict[str, tuple[str, Action]]] = {}

    def get_urls(self) -> list[Any]:
        view, name = self.admin_site.admin_view, f"tidemill_{self.opts.model_name}"
        adding = [path("add/", view(self.add), name=f"{name}_add")] if self.add else []
        return [
            path("", view(self.list_view), name=f"{name}_changelist"),
            *adding,
            path("<path:object_id>/change/", view(self.one_view), name=f"{name}_change"),
        ]

    def has_add_permission(self, request: Any) -> bool:
        return bool(self.add) and super().has_add_permission(request)

    # -- views ------------------------------------------------------------------------------------

    def list_view(self, request: Any) -> HttpResponse:
        return self._answer(request, self.template, self.rows, {"title": self.title})

    def one_view(self, request: Any, object_id: str) -> HttpResponse:
        def one(mill: DjangoMill, request: Any) -> dict[str, Any]:
            try:
                return self.one(mill, object_id)
            except (JobNotFound, ScheduleNotFound):
                return self.one(mill, unquote(object_id))  # from a link of the admin's history

        more = {"title": object_id, "object_id": object_id}
        return self._answer(request, self.template.replace(".", "_one."), one, more)

    def _answer(self, request: Any, template: str, look: Any, more: dict[str, Any]) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        mill = self._mill(request)
        if request.method == "POST":
            return self._act(mill, request)
        try:
            shown = look(mill, request)
        except (JobNotFound, ScheduleNotFound) as error:
            raise Http404(str(error)) from error
        except TidemillError as error:
            messages.error(request, str(error))
            shown = {}
        return self._page(request, template, {**more, **shown})

    def _mill(self, request: Any) -> DjangoMill:
        name = request.GET.get("store", "")
        mill = stores().get(name)
        if mill is None:
            raise Http404(f"no store {name!r}")
        return mill

    def _page(self, request: Any, template: str, shown: dict[str, Any]) -> HttpResponse:
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "store": request.GET.get("store", ""),
            "stores": list(stores()),
            "may_add": self.has_add_permission(request),
            "may_change": self.has_change_permission(request),
            "may_delete": self.has_delete_permission(request),
            "list_url": self._list_url(request),
            "query": request.GET.urlencode(),
            **shown,
        }
        return TemplateResponse(request, f"admin/tidemill/{template}", context)

    def _act(self, mill: DjangoMill, request: Any) -> HttpResponse:
        action = self.verbs.get(request.POST.get("action", ""))
        if action is None:
            raise Http404("no such action")
        permission, do = action
        allowed = getattr(self, f"has_{permission}_permission")
        if not allowed(request):
            raise PermissionDenied
        verb, everything = request.POST["action"], bool(request.POST.get("everything"))
        try:
            names = self.matching(mill, request) if everything else request.POST.getlist("selected")
        except TidemillError as error:
            messages.error(request, str(error))
            return HttpResponseRedirect(request.get_full_path())
        if (everything or verb in ASKED) and names and not request.POST.get("sure"):
            title = f"{capfirst(verb)} {counted(len(names), self.opts.model_name)}?"
            some = names[:PAGE] if everything else names
            shown = {"title": title, "verb": verb, "names": some, "more": len(names) - len(some)}
            more = {"everything": everything, "back": request.get_full_path()}
            return self._page(request, "sure.html", shown | more)
        try:
            said, changed = do(mill, names, request)
            gone = verb in ASKED and verb != "purge"
            flag = DELETION if gone else CHANGE
            self._log(request, changed, said, flag, whole=everything and bool(changed))
            messages.success(request, said)
        except TidemillError as error:
            messages.error(request, str(error))
        back = request.get_full_path() if request.POST.get("stay") else self._list_url(request)
        return HttpResponseRedirect(back)

    def _log(
        self, request: Any, names: list[str], said: str, flag: int, *, whole: bool = False
    ) -> None:
        """Write to the history of the admin: each name, or the whole search by one entry."""
        entries: list[tuple[str | None, str]] = [(name, name[:200]) for name in names]
        if whole:
            entries = [(None, f"all that match: {request.GET.urlencode()}"[:200])]
        content_type = get_content_type_for_model(self.model).pk
        own = {"content_type_id": content_type, "action_flag": flag, "change_message": said}
        LogEntry.objects.bulk_create(
            LogEntry(user_id=request.user.pk, object_id=name, object_repr=text, **own)
            for name, text in entries
        )

    def _list_url(self, request: Any) -> str:
        """The URL of the list, with the search from which the user came."""
        if "/change/" in request.path or request.path.endswith("/add/"):
            view = f"admin:tidemill_{self.opts.model_name}_changelist"
            base = str(reverse(view, current_app=self.admin_site.name))
            store = {"store": request.GET["store"]} if request.GET.get("store") else {}
            query = request.GET.get("_changelist_filters") or urlencode(store)
            return f"{base}?{query}" if query else base
        return str(request.get_full_path())

    # -- what a subclass shows --------------------------------------------------------------------

    def rows(self, mill: DjangoMill, request: Any) -> dict[str, Any]:
        """The context of the list."""
        raise NotImplementedError

    def matching(self, mill: DjangoMill, request: Any) -> list[str]:
        """The names of all things that match the search of the list."""
        raise Http404("no such action")

    def one(self, mill: DjangoMill, name: str) -> dict[str, Any]:
        """The context of the page of one thing."""
        raise Http404


def _moment(seconds: float) -> dt.datetime | None:
    return dt.datetime.fromtimestamp(seconds, dt.UTC) if seconds else None


# -- jobs -----------------------------------------------------------------------------------------


def _acting(act: Callable[..., list[bool]], sentence: str) -> Action:
    def do(mill: DjangoMill, ids: list[str], _: Any) -> tuple[str, list[str]]:
        answers: list[bool] = []
        for at in range(0, len(ids), _PIECE):  # so that no piece holds the store for long
            answers += act(mill.runtime, ids[at : at + _PIECE])
        done = [ids[at] for at, yes in enumerate(answers) if yes]
        return sentence.format(f"{len(done)} of {counted(len(ids), 'job')}"), done

    return do


def _search(request: Any) -> dict[str, str]:
    return {name: request.GET.get(name, "").strip() for name in FILTERS}


def _filter(given: dict[str, str]) -> Filter:
    same: Any = {name: given[name] for name in ("queue", "task", "key", "tag", "text")}
    return Filter(states=states_of(given["state"] or ()), id_prefix=given["id"], **same)


@admin.register(Job)
class JobAdmin(StoreAdmin):
    """Jobs, newest first, by state, queue, task, key, tag, text or the beginning of the id."""

    template = "jobs.html"
    title = "Jobs"
    verbs: ClassVar = {
        "retry": ("change", _acting(retry_jobs, "Retried {}.")),
        "cancel": ("change", _acting(cancel_jobs, "Asked {} to stop.")),
        "delete": ("delete", _acting(delete_jobs, "Deleted {}.")),
    }

    def rows(self, mill: DjangoMill, request: Any) -> dict[str, Any]:
        given = _search(request)
        context: dict[str, Any] = {"filters": given, "states": list(State), "jobs": []}
        found = mill.jobs(_filter(given))
        page = found.page(limit=PAGE, cursor=request.GET.get("after", ""))
        context["jobs"] = [self._row(record) for record in page.records]
        if page.cursor:
            kept = {**given, "store": request.GET.get("store", ""), "after": page.cursor}
            context["older"] = urlencode({name: value for name, value in kept.items() if value})
        context["more"] = bool(page.cursor or request.GET.get("after"))
        return context

    def matching(self, mill: DjangoMill, request: Any) -> list[str]:
        return [job.id for job in mill.jobs(_filter(_search(request)))]

    def _row(self, record: Record) -> dict[str, Any]:
        envelope = record.envelope
        return {
            "id": envelope.id,
            "task": envelope.task or "message",
            "state": str(record.state),
            "queue": envelope.queue,
            "arguments": envelope.text,
            "created": _moment(envelope.created),
            "attempt": record.current_attempt,
            "progress": record.progress,
            "progress_text": record.progress_text,
            "error": record.latest_error,
        }

    def one(self, mill: DjangoMill, name: str) -> dict[str, Any]:
        record = mill.job(name).refresh()
        return {
            "job": self._row(record),
            "public": record.public(),
            "trail": [(_moment(event.time), event) for event in trail_of(record)],
            "attempts": [
                {"attempt": each, "started": _moment(each.started), "ended": _moment(each.ended)}
                for each in record.attempts
            ],
            "log": [(_moment(when), line) for when, line in record.log],
            "result": repr(record.result)[:2000] if record.state is State.SUCCEEDED else "",
            "finished": record.state.finished,
        }


# -- queues ---------------------------------------------------------------------------------------


def _set_paused(paused: bool) -> Action:
    def do(mill: DjangoMill, names: list[str], _: Any) -> tuple[str, list[str]]:
        for name in names:
            mill.broker.set_queue(name, paused=paused)
        return f"{', '.join(names)}: {'paused' if paused else 'resumed'}.", names

    return do


def _purge(mill: DjangoMill, names: list[str], _: Any) -> tuple[str, list[str]]:
    jobs = sum(purge_jobs(mill.broker, name).jobs for name in names)
    return f"Purged {counted(jobs, 'job')}.", names


def _restore(mill: DjangoMill, names: list[str], _: Any) -> tuple[str, list[str]]:
    b = mill.broker
    done = [restore_jobs(b, name) for name in names if list_purges(b, name)]
    text = f"Restored {counted(sum(one.jobs for one in done), 'job')}."
    if left := sum(one.left for one in done):
        text += f" Still purged: {counted(left, 'job')}; {WHY_LEFT}."
    return text, names


@admin.register(Queue)
class QueueAdmin(StoreAdmin):
    """Queues in numbers."""

    template = "queues.html"
    title = "Queues"
    verbs: ClassVar = {
        "pause": ("change", _set_paused(True)),
        "resume": ("change", _set_paused(False)),
        "purge": ("delete", _purge),
        "restore": ("delete", _restore),
    }

    def rows(self, mill: DjangoMill, request: Any) -> dict[str, Any]:
        return {"queues": users_queues(mill.broker.stats())}


# -- schedules ------------------------------------------------------------------------------------


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
        given = self.cleaned_data["arguments"]
        if given is not None and not isinstance(given, list):
            raise forms.ValidationError("This must be a list in JSON.")
        return given or []

    def clean_keywords(self) -> dict[str, Any]:
        given = self.cleaned_data["keywords"]
        if given is not None and not isinstance(given, dict):
            raise forms.ValidationError("This must be an object in JSON.")
        return given or {}

    def save(self, mill: DjangoMill) -> Declared:
        """Add the schedule. A TypeError says that the task does not take these arguments."""
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


def _each(verb: str, outcome: str) -> Action:
    def do(mill: DjangoMill, names: list[str], _: Any) -> tuple[str, list[str]]:
        done: list[str] = []
        problem = ""
        try:
            for name in names:
                getattr(mill.schedules, verb)(name)
                done.append(name)
        except TidemillError as error:
            if not done:
                raise
            problem = f" Then: {error}"
        return f"{', '.join(done)}: {outcome}.{problem}", done

    return do


def _edit(mill: DjangoMill, names: list[str], request: Any) -> tuple[str, list[str]]:
    if len(names) != 1:
        raise InvalidOption("name must be one schedule: choose one and edit again")
    (name,) = names
    given = {key: request.POST.get(key, "").strip() for key in ("cron", "every", "zone")}
    times: Any = {key: value for key, value in given.items() if value}
    if mill.schedules.get(name).code:
        raise InvalidOption(
            f"code declares the schedule {name!r}, and the next worker would restore its times; "
            "change the code"
        )
    mill.schedules.retime(name, When(**times))
    return f"{name} has new times.", names


@admin.register(Schedule)
class ScheduleAdmin(StoreAdmin):
    """Schedules, and the forms for a new schedule and for new times."""

    template = "schedules.html"
    title = "Schedules"
    verbs: ClassVar = {
        "run": ("change", _each("run", "a job is enqueued")),
        "pause": ("change", _each("pause", "paused")),
        "resume": ("change", _each("resume", "resumed")),
        "edit": ("change", _edit),
        "remove": ("delete", _each("remove", "removed")),
    }

    def rows(self, mill: DjangoMill, request: Any) -> dict[str, Any]:
        return {"schedules": list(mill.schedules)}

    def one(self, mill: DjangoMill, name: str) -> dict[str, Any]:
        return {"schedule": mill.schedules.get(name), "times": mill.schedules.next_times(name)}

    def add(self, request: Any) -> HttpResponse:
        if not self.has_add_permission(request):
            raise PermissionDenied
        mill, form = self._mill(request), ScheduleForm(request.POST or None)
        if form.is_valid():
            try:
                name = form.save(mill).name
                self._log(request, [name], "Added.", ADDITION)
            except ScheduleExists as error:
                form.add_error("name", capfirst(str(error)))
            except (TidemillError, TypeError) as error:
                form.add_error(None, capfirst(str(error)))
            else:
                messages.success(request, f"The schedule {name} is added.")
                return HttpResponseRedirect(self._list_url(request))
        shown = {"title": "Add schedule", "form": form, "tasks": known_tasks(mill)}
        return self._page(request, "schedules_add.html", shown)


# -- workers --------------------------------------------------------------------------------------


@admin.register(Owner)
class WorkerAdmin(StoreAdmin):
    """Workers and consumers that are alive."""

    template = "workers.html"
    title = "Workers"

    def rows(self, mill: DjangoMill, request: Any) -> dict[str, Any]:
        owners = sorted(mill.broker.owners(), key=lambda owner: owner.started)
        return {"workers": [{"owner": each, "started": _moment(each.started)} for each in owners]}
