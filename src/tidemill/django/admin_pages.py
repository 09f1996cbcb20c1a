"""The pages of the admin: their contents, and the actions of their buttons."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any, ClassVar

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.text import capfirst

from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.generic.purges import WHY_LEFT, list_purges
from tidemill.brokers.generic.purges import purge as purge_jobs
from tidemill.brokers.generic.purges import restore as restore_jobs
from tidemill.client.compositions import cancel_jobs, delete_jobs, retry_jobs
from tidemill.client.search import states_of, users_queues
from tidemill.client.trail import trail_of
from tidemill.core.job import Record, State
from tidemill.django.framework.parts import default
from tidemill.django.project import DjangoMill, project_mill
from tidemill.django.schedule_form import ScheduleForm, known_tasks
from tidemill.errors import (
    InvalidOption,
    JobNotFound,
    ScheduleExists,
    ScheduleNotFound,
    TidemillError,
)
from tidemill.schedules.parse import When

PAGE = 100
FILTERS = ("state", "queue", "task", "key", "tag", "text", "id")

Action = Callable[[DjangoMill, list[str], Any], str]


def stores() -> dict[str, DjangoMill]:
    """The apps of the project by name: its own app, and the apps of aliases with another store."""
    found = {"": project_mill()}
    try:
        handler = default().backends
    except Exception:  # no tasks framework is installed
        return found
    for alias in handler.settings:
        mill = getattr(handler[alias], "mill", None)
        if mill is not None and mill is not found[""]:
            found[alias] = mill
    return found


class Pages:
    """The pages of one kind of things, such as jobs or queues.

    Attributes:
        actions: each action with the permission that it needs and the function that does it.
        add: the view that adds a thing, or None.
    """

    template = ""
    title = ""
    add: Any = None
    actions: ClassVar[dict[str, tuple[str, Action]]] = {}

    def __init__(self, admin: Any) -> None:
        self.admin = admin

    # -- views ------------------------------------------------------------------------------------

    def list(self, request: Any) -> HttpResponse:
        """The list, or an action on the selected things."""
        return self._answer(request, self.template, self.rows, {"title": self.title})

    def show(self, request: Any, object_id: str) -> HttpResponse:
        """The page of one thing, or an action on it."""

        def one(mill: DjangoMill, request: Any) -> dict[str, Any]:
            return self.one(mill, object_id)

        more = {"title": object_id, "object_id": object_id}
        return self._answer(request, self.template.replace(".", "_one."), one, more)

    def _answer(self, request: Any, template: str, look: Any, more: dict[str, Any]) -> HttpResponse:
        if not self.admin.has_view_permission(request):
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
        """The app whose store the URL of the request names."""
        name = request.GET.get("store", "")
        mill = stores().get(name)
        if mill is None:
            raise Http404(f"no store {name!r}")
        return mill

    def _page(self, request: Any, template: str, shown: dict[str, Any]) -> HttpResponse:
        context = {
            **self.admin.admin_site.each_context(request),
            "opts": self.admin.opts,
            "store": request.GET.get("store", ""),
            "stores": list(stores()),
            "may_add": self.admin.has_add_permission(request),
            "may_change": self.admin.has_change_permission(request),
            "may_delete": self.admin.has_delete_permission(request),
            **shown,
        }
        return TemplateResponse(request, f"admin/tidemill/{template}", context)

    def _act(self, mill: DjangoMill, request: Any) -> HttpResponse:
        action = self.actions.get(request.POST.get("action", ""))
        if action is None:
            raise Http404("no such action")
        permission, do = action
        allowed = getattr(self.admin, f"has_{permission}_permission")
        if not allowed(request):
            raise PermissionDenied
        names = request.POST.getlist("selected")
        try:
            messages.success(request, do(mill, names, request))
        except TidemillError as error:
            messages.error(request, str(error))
        back = request.get_full_path() if request.POST.get("stay") else self._list_url(request)
        return HttpResponseRedirect(back)

    def _list_url(self, request: Any) -> str:
        if "/change/" in request.path or request.path.endswith("/add/"):
            view = f"admin:tidemill_{self.admin.opts.model_name}_changelist"
            base = str(reverse(view, current_app=self.admin.admin_site.name))
            store = request.GET.get("store")
            return f"{base}?{urlencode({'store': store})}" if store else base
        return str(request.get_full_path())

    # -- what a subclass shows --------------------------------------------------------------------

    def rows(self, mill: DjangoMill, request: Any) -> dict[str, Any]:
        """The context of the list."""
        raise NotImplementedError

    def one(self, mill: DjangoMill, name: str) -> dict[str, Any]:
        """The context of the page of one thing."""
        raise Http404


def _moment(seconds: float) -> dt.datetime | None:
    return dt.datetime.fromtimestamp(seconds, dt.UTC) if seconds else None


# -- jobs -----------------------------------------------------------------------------------------


def _retry(mill: DjangoMill, ids: list[str], _: Any) -> str:
    done = retry_jobs(mill.runtime, ids)
    return f"{sum(done)} of {len(ids)} jobs start again."


def _cancel(mill: DjangoMill, ids: list[str], _: Any) -> str:
    done = cancel_jobs(mill.runtime, ids)
    return f"{sum(done)} of {len(ids)} jobs are asked to stop."


def _delete(mill: DjangoMill, ids: list[str], _: Any) -> str:
    return f"{sum(delete_jobs(mill.runtime, ids))} of {len(ids)} jobs are deleted."


class JobPages(Pages):
    """Jobs, newest first, by state, queue, task, key, tag, text or the beginning of the id."""

    template = "jobs.html"
    title = "Jobs"
    actions: ClassVar = {
        "retry": ("change", _retry),
        "cancel": ("change", _cancel),
        "delete": ("delete", _delete),
    }

    def rows(self, mill: DjangoMill, request: Any) -> dict[str, Any]:
        """A page of jobs."""
        given = {name: request.GET.get(name, "").strip() for name in FILTERS}
        context: dict[str, Any] = {"filters": given, "states": list(State), "jobs": []}
        what = Filter(
            states=states_of(given["state"] or ()),
            queue=given["queue"],
            task=given["task"],
            key=given["key"],
            tag=given["tag"],
            text=given["text"],
            id_prefix=given["id"],
        )
        page = mill.jobs(what).page(limit=PAGE, cursor=request.GET.get("after", ""))
        context["jobs"] = [self._row(record) for record in page.records]
        if page.cursor:
            kept = {**given, "store": request.GET.get("store", ""), "after": page.cursor}
            context["older"] = urlencode({name: value for name, value in kept.items() if value})
        return context

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
        """A job with its trail, its attempts and its log."""
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
    def do(mill: DjangoMill, names: list[str], _: Any) -> str:
        for name in names:
            mill.broker.set_queue(name, paused=paused)
        return f"{', '.join(names)}: {'paused' if paused else 'resumed'}."

    return do


def _purge(mill: DjangoMill, names: list[str], _: Any) -> str:
    return f"{sum(purge_jobs(mill.broker, name).jobs for name in names)} jobs are deleted."


def _restore(mill: DjangoMill, names: list[str], _: Any) -> str:
    b = mill.broker
    done = [restore_jobs(b, name) for name in names if list_purges(b, name)]
    text = f"{sum(one.jobs for one in done)} jobs are restored."
    if left := sum(one.left for one in done):
        text += f" {left} stay purged: {WHY_LEFT}."
    return text


class QueuePages(Pages):
    """Queues in numbers."""

    template = "queues.html"
    title = "Queues"
    actions: ClassVar = {
        "pause": ("change", _set_paused(True)),
        "resume": ("change", _set_paused(False)),
        "purge": ("delete", _purge),
        "restore": ("delete", _restore),
    }

    def rows(self, mill: DjangoMill, request: Any) -> dict[str, Any]:
        """All queues."""
        return {"queues": users_queues(mill.broker.stats())}


# -- schedules ------------------------------------------------------------------------------------


def _each(verb: str, outcome: str) -> Action:
    def do(mill: DjangoMill, names: list[str], _: Any) -> str:
        for name in names:
            getattr(mill.schedules, verb)(name)
        return f"{', '.join(names)}: {outcome}."

    return do


def _edit(mill: DjangoMill, names: list[str], request: Any) -> str:
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
    return f"{name} has new times."


class SchedulePages(Pages):
    """Schedules, and the forms for a new schedule and for new times."""

    template = "schedules.html"
    title = "Schedules"
    actions: ClassVar = {
        "run": ("change", _each("run", "a job is enqueued")),
        "pause": ("change", _each("pause", "paused")),
        "resume": ("change", _each("resume", "resumed")),
        "edit": ("change", _edit),
        "remove": ("delete", _each("remove", "removed")),
    }

    def rows(self, mill: DjangoMill, request: Any) -> dict[str, Any]:
        """All schedules."""
        return {"schedules": list(mill.schedules)}

    def one(self, mill: DjangoMill, name: str) -> dict[str, Any]:
        """A schedule with its next times."""
        return {"schedule": mill.schedules.get(name), "times": mill.schedules.next_times(name)}

    def add(self, request: Any) -> HttpResponse:
        """The form for a new schedule."""
        if not self.admin.has_add_permission(request):
            raise PermissionDenied
        mill, form = self._mill(request), ScheduleForm(request.POST or None)
        if form.is_valid():
            try:
                name = form.save(mill).name
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


class WorkerPages(Pages):
    """Workers and consumers that are alive."""

    template = "workers.html"
    title = "Workers"

    def rows(self, mill: DjangoMill, request: Any) -> dict[str, Any]:
        """All owners."""
        owners = sorted(mill.broker.owners(), key=lambda owner: owner.started)
        return {"workers": [{"owner": each, "started": _moment(each.started)} for each in owners]}
