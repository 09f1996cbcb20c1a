"""``manage.py tidemill VERB``: the command ``tidemill`` with the project's app.

``worker`` and ``server`` replace this process, so the supervisor of a worker does not load Django.
``dev`` runs ``runserver`` and a worker. The other verbs run in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.utils.autoreload import get_child_arguments

from tidemill.cli import main
from tidemill.django.develop import develop
from tidemill.django.project import project_mill
from tidemill.django.settings import worker_options

APP = "tidemill.django.worker:mill"  # the project's app, as ``tidemill`` names apps
_OF_DJANGO = {"--settings": True, "--pythonpath": True, "--traceback": False}
"""Options that Django reads anywhere in the arguments. True for an option with a value."""


class Command(BaseCommand):
    """The command, which takes the arguments of ``tidemill``."""

    help = (
        "Run a verb of the command tidemill with the project's app: worker, server, info, jobs, "
        "schedule, move and the others; dev runs runserver and a worker. "
        "See: manage.py tidemill help"
    )
    requires_system_checks: Any = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--backend", metavar="ALIAS", help="the app of this alias of TASKS")
        parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="VERB …")

    def handle(self, *args: Any, **options: Any) -> None:
        given = _without_django(options["arguments"])
        app = APP
        if options["backend"]:
            app = f"tidemill.django.worker:backends.{options['backend']}"
        verb = given[0] if given else "help"
        if verb == "dev":
            self.check(display_num_errors=False)
            self._develop(given[1:], app)
        elif verb in ("worker", "server") and not {"-h", "--help"} & set(given):
            self.check(display_num_errors=False)
            self._run_apart(arguments_of(given, app), app)
        else:
            if verb == "worker":
                self.stdout.write(
                    "With DEBUG a worker reloads by itself, unless --noreload is given.\n\n"
                )
            self._run_here(["--help"] if verb == "help" else given, app)

    def _run_apart(self, arguments: list[str], app: str) -> None:
        """Replace this process by the verb; under ``call_command``, run a child process."""
        command = [sys.executable, "-m", "tidemill", *arguments]
        if getattr(self, "_called_from_command_line", False):
            sys.stdout.flush()
            sys.stderr.flush()
            os.execve(command[0], command, _environment(app))
        code = subprocess.run(command, env=_environment(app), check=False).returncode
        self._end(f"tidemill {arguments[0]}", code)

    def _run_here(self, arguments: list[str], app: str) -> None:
        os.environ.update(_environment(app))
        code: Any = 0
        stream: Any = getattr(self.stdout, "_out", self.stdout)  # to which Django's wrapper writes
        with contextlib.redirect_stdout(stream):
            try:
                main.main(arguments, prog_name="manage.py tidemill")
            except SystemExit as end:
                code = end.code
            finally:
                # A verb that only reads has set this to True.
                project_mill().runtime.reading = False
        self._end(f"tidemill {arguments[0]}", code)

    def _end(self, what: str, code: Any) -> None:
        if code and getattr(self, "_called_from_command_line", False):
            sys.exit(code)
        if code:
            raise CommandError(f"{what} ended with code {code}", returncode=code)

    def _develop(self, arguments: list[str], app: str) -> None:
        """Run ``runserver`` with a worker beside it, until a signal ends both."""
        self.stdout.flush()
        worker = [sys.executable, "-m", "tidemill", "worker", app, "-p", "1", "--reload"]
        is_command_line = getattr(self, "_called_from_command_line", False)
        code = develop(_runserver(arguments, is_command_line), worker, _environment(app))
        self._end("runserver", code)


def _runserver(arguments: list[str], is_command_line: bool) -> list[str]:
    if not is_command_line:
        return [sys.executable, "-m", "django", "runserver", *arguments]
    given = sys.argv
    try:
        sys.argv = [given[0], "runserver", *arguments]
        return list(get_child_arguments())
    finally:
        sys.argv = given


def arguments_of(given: list[str], app: str) -> list[str]:
    """The arguments of ``tidemill worker`` or ``tidemill server`` with the project's app.

    Options that are not in ``given`` come from ``Q_CLUSTER``. With ``DEBUG`` a worker reloads when
    a file changes, unless ``--noreload`` is given.
    """
    verb, *rest = given
    reload = bool(settings.DEBUG) and "--noreload" not in rest and "--reload" not in rest
    rest = [part for part in rest if part != "--noreload"]
    if verb == "worker":
        for name, value in worker_options().items():
            if not any(part.startswith(name) for part in rest):
                rest += [name, value]
        return [verb, app, *rest, *(["--reload"] if reload and "--burst" not in rest else [])]
    at = rest.index("--workers") + 1 if "--workers" in rest else 0
    return [verb, *rest[:at], app, *rest[at:]] if at else [verb, app, *rest]


def _without_django(given: list[str]) -> list[str]:
    """The arguments without the options that Django has read already."""
    left, skip = [], False
    for part in given:
        name, equals, _ = part.partition("=")
        if skip or name in _OF_DJANGO:
            skip = not skip and not equals and _OF_DJANGO[name]
        else:
            left.append(part)
    return left


def _environment(app: str) -> dict[str, str]:
    """The environment for a worker: the settings, the import path, and the folder to watch."""
    folder = os.path.abspath(sys.path[0] or ".")
    watched = folder if os.path.exists(os.path.join(folder, "manage.py")) else os.getcwd()
    path = [folder, os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": settings.SETTINGS_MODULE,
        "TIDEMILL_RELOAD_FOLDER": watched,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(part for part in path if part)),
        "TIDEMILL_APP": app,
    }
