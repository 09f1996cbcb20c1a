"""What the published tests of the tasks framework and of its database backend ask for, and what
behaviours/framework.py does not have.

Not here, since tidemill has no such thing: a function for ids; a model of results with its indexes,
order, locks and names; a polling interval; a worker that excludes queues; a command that prunes
results (``result_ttl`` does). A job whose task cannot be imported waits for a worker that knows the
task, and does not fail. ``--max-jobs`` replaces a process and does not end the worker.
"""

import asyncio
import dataclasses
import datetime as dt
import uuid

from django.core import checks
from django.test import SimpleTestCase, override_settings
from django.utils import timezone
from django.utils.module_loading import import_string
from shop import tasks
from shop.framework import (
    InvalidTask,
    InvalidTaskBackend,
    Task,
    TaskResultDoesNotExist,
    TaskResultMismatch,
    TaskResultStatus,
    default_task_backend,
    task_backends,
)

import tidemill.django
from tidemill import InvalidOption
from tidemill.django import mill
from tidemill.django.checks import problems
from tidemill.django.testing import TidemillTestCase, immediate
from tidemill.testing import run_all

HOUR = dt.timedelta(hours=1)


class Declared(TidemillTestCase):
    """The task objects, which are of a class of ours."""

    def test_a_task_has_its_names(self):
        for task in (tasks.noop, tasks.noop_async):
            self.assertEqual(task.module_path, f"shop.tasks.{task.name}")
            self.assertIs(import_string(task.module_path), task)
            self.assertIsInstance(task, Task)
        self.assertEqual(tasks.noop.name, "noop")

    def test_a_task_is_called_here(self):
        self.assertEqual(tasks.add.call(1, 2), 3)
        self.assertEqual(tasks.add_async.call(1, 2), 3)
        self.assertEqual(list(mill.jobs()), [])

    async def test_a_task_is_called_here_by_asyncio(self):
        self.assertEqual(await tasks.add.acall(1, 2), 3)
        self.assertEqual(await tasks.add_async.acall(1, 2), 3)

    def test_using_makes_a_new_task(self):
        self.assertEqual(tasks.noop.using(), tasks.noop)
        self.assertIsNot(tasks.noop.using(), tasks.noop)
        now = timezone.now()
        changed = tasks.noop.using(run_after=now).using(priority=10, queue_name="queue-1")
        self.assertEqual(
            (changed.run_after, changed.priority, changed.queue_name), (now, 10, "queue-1")
        )
        self.assertEqual((tasks.noop.run_after, tasks.noop.priority), (None, 0))
        for edge in (-100, 0, 100):
            self.assertEqual(tasks.noop.using(priority=edge).priority, edge)

    def test_the_backend_of_a_task(self):
        self.assertIs(tasks.noop.get_backend(), task_backends["default"])
        moved = tasks.noop.using(backend="second")
        self.assertEqual((moved.backend, moved.get_backend()), ("second", task_backends["second"]))
        with self.assertRaises(InvalidTaskBackend):
            tasks.noop.using(backend="unknown")
        with self.settings(TASKS={}), self.assertRaises(InvalidTaskBackend):
            tasks.noop.enqueue()

    def test_a_function_that_no_worker_finds_is_refused(self):
        for bad in (any, self.test_a_task_has_its_names, lambda: None):
            for decorate in (tasks.task(), tidemill.django.task()):
                with self.subTest(bad), self.assertRaises(InvalidTask):
                    decorate(bad)

    def test_a_task_that_takes_the_context_has_a_place_for_it(self):
        for decorate in (tasks.task, tidemill.django.task):
            with self.assertRaises(InvalidTask):
                decorate(takes_context=True)(tasks.add.func)


class Results(TidemillTestCase):
    def test_refreshing_a_new_result_changes_nothing(self):
        result = tasks.noop.enqueue(1, a=2)
        before = dataclasses.asdict(result)
        result.refresh()
        self.assertEqual(dataclasses.asdict(result), before)

    async def test_refreshing_a_new_result_changes_nothing_for_asyncio(self):
        result = await tasks.noop.aenqueue(1, a=2)
        before = dataclasses.asdict(result)
        await result.arefresh()
        self.assertEqual(dataclasses.asdict(result), before)

    async def test_wrong_results_for_asyncio(self):
        result = await tasks.noop_async.aenqueue()
        with self.assertRaises(TaskResultMismatch):
            await tasks.noop.aget_result(result.id)
        with self.assertRaises(TaskResultDoesNotExist):
            await tasks.noop.aget_result(str(uuid.uuid4()))

    def test_a_result_whose_task_is_gone_cannot_be_imported(self):
        for path in ("missing.func", "shop.tasks.missing"):
            envelope = mill.runtime.envelope(mill.call(path).using(queue="default"))
            envelope.headers = {"django-tasks": "default"}
            (job,) = mill.runtime.put([envelope])
            with self.subTest(path), self.assertRaises(ImportError):
                default_task_backend.get_result(job.id)

    def test_an_error_that_is_no_exception_is_told(self):
        result = tasks.failing.enqueue()
        self.run_jobs()
        result.refresh()
        object.__setattr__(result.errors[0], "exception_class_path", "subprocess.run")
        with self.assertRaisesMessage(ValueError, "does not reference a valid exception"):
            result.errors[0].exception_class  # noqa: B018
        object.__setattr__(result.errors[0], "exception_class_path", "does.not.exist")
        with self.assertRaises(ImportError):
            result.errors[0].exception_class  # noqa: B018


class Enqueueing(TidemillTestCase):
    def test_a_task_is_checked_again_when_it_is_enqueued(self):
        with self.settings(
            TASKS={
                "default": {"BACKEND": "tidemill.django.TaskBackend", "QUEUES": ["elsewhere"]},
            }
        ):
            task = tasks.noop.using(queue_name="elsewhere")
        said = "Queue 'elsewhere' is not valid for backend"
        with self.assertRaisesMessage(InvalidTask, said):
            task.enqueue()
        with self.assertRaisesMessage(InvalidTask, said):
            asyncio.run(task.aenqueue())

    async def test_arguments_must_be_json_for_asyncio(self):
        for bad in (timezone.now(), object(), {1}):
            with self.assertRaises(TypeError):
                await tasks.noop.aenqueue(bad)

    def test_a_queue_has_a_worker_of_its_own(self):
        there = tasks.noop.using(queue_name="queue-1").enqueue()
        here = tasks.noop.enqueue()
        run_all(mill, queues=["default"])
        for result in (here, there):
            result.refresh()
        self.assertEqual(here.status, TaskResultStatus.SUCCESSFUL)
        self.assertEqual(there.status, TaskResultStatus.READY)
        run_all(mill, queues=["queue-1"])
        there.refresh()
        self.assertEqual(there.status, TaskResultStatus.SUCCESSFUL)

    def test_without_jobs_a_worker_does_nothing(self):
        self.run_jobs()
        self.assertEqual(list(mill.jobs()), [])

    def test_a_task_that_another_task_enqueues(self):
        result = tasks.enqueues.enqueue()
        self.run_jobs()
        result.refresh()
        inner = tasks.add.get_result(result.return_value)
        self.assertEqual(inner.return_value, 3)

    def test_a_task_that_interrupts_has_failed(self):
        result = tasks.interrupts.enqueue()
        self.run_jobs()
        result.refresh()
        self.assertEqual(result.status, TaskResultStatus.FAILED)
        self.assertIs(result.errors[0].exception_class, KeyboardInterrupt)
        with immediate(), self.assertRaises(KeyboardInterrupt):
            tasks.interrupts.enqueue()


class Settings(SimpleTestCase):
    def test_a_backend_without_the_app_has_no_commands(self):
        with self.modify_settings(INSTALLED_APPS={"remove": "tidemill.django"}):
            (warning,) = default_task_backend.check()
        self.assertEqual((warning.id, warning.level), ("tidemill.W003", checks.WARNING))
        self.assertIn("'tidemill.django'", warning.hint)

    @override_settings(
        TASKS={
            "default": {
                "BACKEND": "tidemill.django.TaskBackend",
                "OPTIONS": {"RETRIES": -1},
            }
        }
    )
    def test_wrong_options_of_a_backend_are_told(self):
        (error,) = default_task_backend.check()
        self.assertEqual(error.id, "tidemill.E001")
        self.assertEqual(len(problems({"RETRIES": -1}, "x")), 1)

    def test_a_worker_of_an_alias_that_cannot_have_one(self):
        from tidemill.django.worker import backends

        with self.assertRaisesMessage(InvalidOption, "TASKS has no alias 'secnd'"):
            backends.secnd  # noqa: B018
        with self.assertRaisesMessage(InvalidOption, "TASKS['immediate'] is not a backend of"):
            backends.immediate  # noqa: B018
