"""Behaviours of the tasks framework, as its published tests and its database backend state them.

Not here, since tidemill has no such thing: a function for ids; a model of results with its indexes,
order, locks and names; a polling interval; a worker that excludes queues; a command that prunes
results (``result_ttl`` does). A job whose task cannot be imported waits for a worker that knows the
task, and does not fail. ``--max-jobs`` replaces a process and does not end the worker.
"""

import asyncio
import datetime as dt
import uuid

from django.core import checks
from django.core.exceptions import SuspiciousOperation
from django.test import SimpleTestCase, override_settings
from django.utils import timezone
from django.utils.module_loading import import_string
from shop import tasks
from shop.framework import (
    InvalidTask,
    Task,
    TaskResultDoesNotExist,
    TaskResultMismatch,
    TaskResultStatus,
    default_task_backend,
    task_backends,
    task_enqueued,
    task_finished,
    task_started,
)
from shop.models import Order
from shop.receivers import received

import tidemill.django
from tidemill import InvalidOption
from tidemill.django import mill
from tidemill.django.checks import problems
from tidemill.django.testing import TidemillTestCase, immediate, run_jobs

MINUTE = dt.timedelta(minutes=1)


# case D2
class Enqueueing(TidemillTestCase):
    def test_the_alias_has_our_backend(self):
        self.assertIsInstance(task_backends["default"], tidemill.django.TaskBackend)
        self.assertEqual(default_task_backend.alias, "default")
        self.assertEqual(default_task_backend.options, {})
        self.assertEqual(list(default_task_backend.check()), [])
        for can in ("defer", "async_task", "get_result", "priority"):
            self.assertTrue(getattr(task_backends["default"], f"supports_{can}"), can)

    def assert_new(self, task, result):
        self.assertEqual(result.status, TaskResultStatus.READY)
        self.assertFalse(result.is_finished)
        self.assertEqual(
            [result.started_at, result.last_attempted_at, result.finished_at], [None, None, None]
        )
        with self.assertRaisesMessage(ValueError, "Task has not finished yet"):
            result.return_value  # noqa: B018
        self.assertEqual(result.task, task)
        self.assertEqual(result.attempts, 0)
        self.assertLess(len(result.id), 64)
        self.assertIsNotNone(result.enqueued_at)

    def test_a_new_task_is_ready(self):
        for task in (tasks.noop, tasks.noop_async):
            with self.subTest(task), received(task_enqueued) as seen, self.assertNumQueries(0):
                result = task.enqueue(1, two=3)
                self.assert_new(task, result)
                self.assertEqual((result.args, result.kwargs), ([1], {"two": 3}))
                backend = tidemill.django.TaskBackend
                self.assertEqual(seen, [(backend, result.id, TaskResultStatus.READY)])

    async def test_a_new_task_is_ready_for_asyncio(self):
        for task in (tasks.noop, tasks.noop_async):
            with received(task_enqueued) as seen:
                result = await task.aenqueue()
            self.assert_new(task, result)
            self.assertEqual((result.args, result.kwargs), ([], {}))
            self.assertEqual([each[1] for each in seen], [result.id])

    def test_a_result_can_be_read_again(self):
        for task in (
            tasks.noop,
            tasks.noop.using(priority=7, queue_name="queue-1"),
            tasks.noop.using(run_after=timezone.now() + MINUTE),
        ):
            with self.subTest(task):
                result = default_task_backend.enqueue(task, [], {})
                self.assertEqual(default_task_backend.get_result(result.id), result)
                self.assertEqual(tasks.noop.get_result(result.id), result)

    async def test_a_result_can_be_read_again_by_asyncio(self):
        result = await default_task_backend.aenqueue(tasks.noop, [], {})
        self.assertEqual(await default_task_backend.aget_result(result.id), result)
        self.assertEqual(await tasks.noop.aget_result(result.id), result)

    def test_a_result_of_another_task_does_not_match(self):
        result = tasks.noop.enqueue()
        with self.assertRaises(TaskResultMismatch):
            tasks.add.get_result(result.id)

    def test_a_missing_result_does_not_exist(self):
        job = mill.enqueue(tasks.rich.call(timezone.now(), b""))
        for missing in (str(uuid.uuid4()), "123", "", "\0", "x" * 500, job.id):
            with self.subTest(missing), self.assertRaises(TaskResultDoesNotExist):
                default_task_backend.get_result(missing)

    async def test_a_missing_result_does_not_exist_for_asyncio(self):
        for missing in (str(uuid.uuid4()), "123"):
            with self.assertRaises(TaskResultDoesNotExist):
                await default_task_backend.aget_result(missing)

    def test_arguments_must_be_json(self):
        for bad in (timezone.now(), {1, 2}, object(), 1j):
            with self.subTest(bad), self.assertRaises(TypeError):
                tasks.noop.enqueue(bad)
        self.assertEqual(list(mill.jobs()), [])

    def test_a_queue_that_is_not_listed_is_refused(self):
        with self.assertRaisesMessage(InvalidTask, "Queue 'nowhere' is not valid for backend"):
            tasks.noop.using(queue_name="nowhere")
        with self.settings(
            TASKS={"default": {"BACKEND": "tidemill.django.TaskBackend", "QUEUES": []}}
        ):
            moved = tasks.noop.using(queue_name="nowhere")
            self.assertEqual(moved.enqueue().task.queue_name, "nowhere")
        with self.assertRaises(InvalidTask):
            moved.enqueue()

    def test_priorities_outside_the_range_are_refused(self):
        for bad in (-101, 101, 1.5):
            with self.subTest(bad), self.assertRaises(InvalidTask):
                tasks.noop.using(priority=bad)

    def test_run_after_takes_a_time_or_a_duration(self):
        for given in (timezone.now() + MINUTE, MINUTE):
            result = tasks.noop.using(run_after=given).enqueue()
            left = result.task.run_after - timezone.now()
            self.assertLess(abs(left - MINUTE), dt.timedelta(seconds=5))
        with self.assertRaises(InvalidTask):
            tasks.noop.using(run_after=dt.datetime(2030, 1, 1))
        with self.assertRaises(TypeError):
            tasks.task(run_after=MINUTE)(len)

    def test_times_follow_use_tz(self):
        for use_tz in (True, False):
            with self.subTest(use_tz), self.settings(USE_TZ=use_tz):
                result = tasks.noop.enqueue()
                found = default_task_backend.get_result(result.id)
                self.assertEqual(timezone.is_aware(found.enqueued_at), use_tz)
                self.assertIsNone(found.task.run_after)

    def test_enqueueing_is_logged(self):
        name = "django" if Task.__module__.startswith("django.") else "django_tasks"
        with self.assertLogs(name, "DEBUG") as logs:
            result = tasks.noop.enqueue()
        self.assertTrue(any(result.id in line and "enqueued" in line for line in logs.output))

    def test_a_receiver_that_raises_does_not_undo_the_job(self):
        def bad(**kwargs):
            raise RuntimeError("a receiver")

        task_enqueued.connect(bad)
        self.addCleanup(task_enqueued.disconnect, bad)
        with self.assertLogs("django.dispatch"):
            result = tasks.noop.enqueue()
        self.assertEqual(tasks.noop.get_result(result.id).status, TaskResultStatus.READY)


class Running(TidemillTestCase):
    def ended(self, result):
        self.assertEqual(result.status, TaskResultStatus.READY)
        self.run_jobs()
        self.assertEqual(result.attempts, 0)
        result.refresh()
        self.assertTrue(result.is_finished)
        self.assertGreaterEqual(result.started_at, result.enqueued_at)
        self.assertGreaterEqual(result.finished_at, result.started_at)
        self.assertGreaterEqual(result.last_attempted_at, result.started_at)
        self.assertEqual(result.attempts, 1)
        return result

    def test_values_come_back(self):
        for result, value in (
            (tasks.noop.enqueue(), None),
            (tasks.add.enqueue(1, b=2), 3),
            (tasks.add_async.enqueue(1, 2), 3),
            (tasks.echo.enqueue((1, [2]), k={"a": None}), [[[1, [2]]], {"k": {"a": None}}]),
        ):
            self.assertEqual(self.ended(result).status, TaskResultStatus.SUCCESSFUL)
            self.assertEqual(result.return_value, value)
            self.assertEqual(result.errors, [])

    async def test_values_come_back_to_asyncio(self):
        result = await tasks.add_async.aenqueue(1, 2)
        from asgiref.sync import sync_to_async

        await sync_to_async(self.run_jobs)()
        await result.arefresh()
        self.assertEqual(result.return_value, 3)

    def test_all_jobs_run_and_one_fails(self):
        results = [tasks.noop.enqueue() for _ in range(3)] + [tasks.failing.enqueue()]
        self.run_jobs()
        for result in results:
            result.refresh()
        statuses = [result.status for result in results]
        successful, failed = TaskResultStatus.SUCCESSFUL, TaskResultStatus.FAILED
        self.assertEqual(statuses, [successful] * 3 + [failed])

    def test_an_error_has_its_class_and_traceback(self):
        result = self.ended(tasks.failing.enqueue())
        self.assertEqual(result.status, TaskResultStatus.FAILED)
        with self.assertRaisesMessage(ValueError, "Task failed"):
            result.return_value  # noqa: B018
        (error,) = result.errors
        self.assertIs(error.exception_class, ValueError)
        text = error.traceback.rstrip()
        self.assertTrue(text.endswith("ValueError: This task failed due to ValueError"), text)
        self.assertIn("in failing", text)
        self.assertNotIn("tidemill", text)

    def test_an_exception_without_pickle_is_kept(self):
        (error,) = self.ended(tasks.failing_complex.enqueue()).errors
        self.assertIs(error.exception_class, ValueError)
        self.assertIn('ValueError(ValueError("This task failed"))', error.traceback)

    def test_a_task_that_exits_has_failed(self):
        (error,) = self.ended(tasks.failing_interrupt.enqueue()).errors
        self.assertIs(error.exception_class, SystemExit)

    def test_a_result_that_is_not_json_fails_the_task(self):
        result = self.ended(tasks.returns_object.enqueue())
        self.assertEqual(result.status, TaskResultStatus.FAILED)
        self.assertIsNone(result._return_value)
        self.assertIs(result.errors[0].exception_class, TypeError)
        self.assertIn("normalize_json", result.errors[0].traceback)

    def test_priorities_and_times_order_the_jobs(self):
        order = []

        def note(task_result, **kwargs):
            order.append(task_result.args[0])

        task_started.connect(note)
        self.addCleanup(task_started.disconnect, note)
        later = tasks.noop.using(run_after=MINUTE).enqueue("later")
        for name, priority in (("low", -100), ("normal", 0), ("high", 100), ("higher", 50)):
            tasks.noop.using(priority=priority).enqueue(name)
        tasks.noop.using(run_after=timezone.now() - MINUTE).enqueue("past")
        self.run_jobs()
        self.assertEqual(order, ["high", "higher", "normal", "past", "low"])
        later.refresh()
        self.assertEqual(later.status, TaskResultStatus.READY)
        self.run_jobs(scheduled=True)
        later.refresh()
        self.assertEqual(later.status, TaskResultStatus.SUCCESSFUL)

    def test_the_context_has_the_result_and_the_attempt(self):
        result = self.ended(tasks.with_context.enqueue())
        self.assertEqual(result.return_value, [1, result.id, "RUNNING", 1, 1])

    def test_the_signals_say_started_for_each_attempt_and_finished_once(self):
        result = tasks.fails_once.enqueue()
        with received(task_started, task_finished) as seen:
            self.run_jobs(scheduled=True)
        running, done = TaskResultStatus.RUNNING, TaskResultStatus.SUCCESSFUL
        self.assertEqual([each[2] for each in seen], [running, running, done])
        self.assertEqual({each[:2] for each in seen}, {(tidemill.django.TaskBackend, result.id)})
        result.refresh()
        self.assertEqual(result.return_value, [2, 1])
        self.assertEqual((result.attempts, len(result.worker_ids), len(result.errors)), (2, 2, 1))
        self.assertGreater(result.last_attempted_at, result.started_at)

    def test_the_last_failure_is_finished(self):
        with received(task_finished) as seen:
            tasks.failing.enqueue()
            tasks.gives_up.enqueue()
            self.run_jobs()
        self.assertEqual([each[2] for each in seen], [TaskResultStatus.FAILED] * 2)

    def test_a_receiver_that_raises_does_not_fail_the_job(self):
        def bad(**kwargs):
            raise RuntimeError("a receiver")

        for signal in (task_started, task_finished):
            signal.connect(bad)
            self.addCleanup(signal.disconnect, bad)
        for task in (tasks.add, tasks.add_async):
            with self.assertLogs("django.dispatch"):
                result = self.ended(task.enqueue(1, 2))
            self.assertEqual(result.return_value, 3)

    def test_our_eight_states_are_told_apart(self):
        cancelled = tasks.noop.enqueue()
        mill.job(cancelled.id).cancel()
        expired = tidemill.django.task(expires=0.001)(tasks.noop.func).enqueue()
        gave_up = tasks.gives_up.enqueue()
        import time

        time.sleep(0.01)  # until it has expired
        self.run_jobs()
        for result, kind in (
            (cancelled, tidemill.JobCancelled),
            (expired, tidemill.errors.JobExpired),
            (gave_up, tidemill.Fail),
        ):
            result.refresh()
            self.assertEqual(result.status, TaskResultStatus.FAILED)
            self.assertIs(result.errors[-1].exception_class, kind)

    def test_a_job_sees_the_transaction_of_the_test(self):
        Order.objects.create(note="mine")
        for task in (tasks.count_orders, tasks.count_orders_async):
            self.assertEqual(self.ended(task.enqueue()).return_value, 1)

    def test_results_are_kept_for_two_days(self):
        result = self.ended(tasks.add.enqueue(1, 2))
        self.assertEqual(mill.job(result.id).refresh().envelope.result_ttl, 2 * 86400)

    def test_a_path_that_leads_elsewhere_is_suspicious(self):
        result = tasks.noop.enqueue()
        module = tasks.noop
        tasks.noop = len
        self.addCleanup(setattr, tasks, "noop", module)
        with self.assertRaises(SuspiciousOperation):
            default_task_backend.get_result(result.id)


class Options(TidemillTestCase):
    def record(self, result):
        return mill.job(result.id).refresh()

    def test_the_decorator_takes_options_of_tidemill(self):
        envelope = self.record(tasks.with_options.enqueue(False)).envelope
        self.assertEqual(envelope.retries.max_attempts, 3)
        self.assertEqual((envelope.timeout, envelope.tags), (30.0, ("mail",)))
        self.assertEqual(envelope.queue, "queue-1")

    def test_using_takes_them_too_and_keeps_the_others(self):
        task = tasks.with_options.using(retries=5, key="one").using(priority=3)
        envelope = self.record(task.enqueue(False)).envelope
        self.assertEqual(envelope.retries.max_attempts, 6)
        self.assertEqual((envelope.key, envelope.tags), ("one", ("mail",)))
        again = task.enqueue(False)
        self.assertEqual(again.id, self.record(again).envelope.id)
        self.assertEqual(len(list(mill.jobs())), 1)

    def test_options_that_do_not_exist_are_named(self):
        with self.assertRaisesMessage(TypeError, "did you mean 'retries'"):
            tasks.noop.using(retrys=3)
        with self.assertRaisesMessage(TypeError, "did you mean 'retries'"):
            tidemill.django.task(retrys=3)
        with self.assertRaisesMessage(InvalidTask, "timeout"):
            tasks.noop.using(timeout=-1)

    def test_the_decorator_of_the_framework_takes_them_where_it_can(self):
        import django

        if django.VERSION >= (6, 1) or Task.__module__.startswith("django_tasks"):
            task = tasks.task(retries=4)(tasks.noop.func)
            self.assertEqual(self.record(task.enqueue()).envelope.retries.max_attempts, 5)
        else:
            with self.assertRaises(TypeError):
                tasks.task(retries=4)

    def test_errors_of_each_attempt_are_kept(self):
        result = tasks.with_options.enqueue(True)
        self.run_jobs(scheduled=True)
        result.refresh()
        self.assertEqual(result.status, TaskResultStatus.FAILED)
        self.assertEqual(result.attempts, 3)
        texts = [error.traceback.splitlines()[-1] for error in result.errors]
        self.assertEqual(texts, [f"RuntimeError: attempt {n}" for n in (1, 2, 3)])

    def test_a_waiting_retry_is_ready(self):
        result = tasks.with_options.enqueue(True)
        self.run_jobs()
        result.refresh()
        self.assertEqual((result.status, result.attempts), (TaskResultStatus.READY, 1))

    def test_the_framework_knows_no_retries_by_default(self):
        self.assertEqual(self.record(tasks.noop.enqueue()).envelope.retries.max_attempts, 1)


class Aliases(TidemillTestCase):
    def setUp(self):
        super().setUp()
        self.second = task_backends["second"].mill
        for job in self.second.jobs():
            job.delete()

    def test_another_alias_is_another_store(self):
        result = tasks.on_second.enqueue()
        self.assertEqual((result.backend, result.task.backend), ("second", "second"))
        with self.assertRaises(TaskResultDoesNotExist):
            default_task_backend.get_result(result.id)
        self.run_jobs()
        result.refresh()
        self.assertEqual(result.status, TaskResultStatus.READY)
        run_jobs(self.second)
        result.refresh()
        self.assertEqual(result.return_value, "second")

    def test_an_alias_has_options_of_its_own(self):
        result = tasks.on_second.enqueue()
        envelope = self.second.job(result.id).refresh().envelope
        self.assertEqual(envelope.retries.max_attempts, 3)

    def test_a_task_of_another_backend_can_be_moved_here(self):
        self.assertFalse(hasattr(tasks.on_immediate, "retries"))
        moved = tasks.on_immediate.using(backend="second", run_after=MINUTE)
        result = moved.enqueue()
        run_jobs(self.second, scheduled=True)
        result.refresh()
        self.assertEqual(result.return_value, "immediate")

    def test_a_worker_of_an_alias_finds_a_task_that_was_moved_there(self):
        found = self.second.runtime.find_task("shop.tasks.on_immediate")
        self.assertEqual(found.name, "shop.tasks.on_immediate")
        for other in ("shop.tasks.time", "shop.tasks.nothing", "os.system", "nowhere.at.all"):
            self.assertIsNone(self.second.runtime.find_task(other), other)

    def test_the_immediate_backend_takes_our_tasks(self):
        result = tasks.with_options.using(backend="immediate", retries=1).enqueue
        self.assertEqual(result(True).status, TaskResultStatus.FAILED)


class Parity(TidemillTestCase):
    """The same task gives the same result here and on the immediate backend."""

    def test_results_are_the_same(self):
        for task, args in (
            (tasks.noop, (1,)),
            (tasks.add, (1, 2)),
            (tasks.add_async, (1, 2)),
            (tasks.add, ("a",)),
            (tasks.echo, ((1, 2), {"a": [1.5, None, True]})),
            (tasks.failing, ()),
            (tasks.failing_complex, ()),
            (tasks.returns_object, ()),
        ):
            with self.subTest(task):
                there = task.using(backend="immediate").enqueue(*args)
                here = task.enqueue(*args)
                self.run_jobs()
                here.refresh()
                with immediate():
                    inline = task.enqueue(*args)
                for ours in (here, inline):
                    for name in ("status", "args", "kwargs", "_return_value", "attempts"):
                        self.assertEqual(getattr(ours, name), getattr(there, name), name)
                    kinds = [error.exception_class for error in there.errors]
                    self.assertEqual([error.exception_class for error in ours.errors], kinds)


class Declared(TidemillTestCase):
    """The task objects, which are of a class of ours."""

    def test_a_task_has_its_names(self):
        for task in (tasks.noop, tasks.noop_async):
            self.assertEqual(task.module_path, f"shop.tasks.{task.name}")
            self.assertIs(import_string(task.module_path), task)
            self.assertIsInstance(task, Task)
        self.assertEqual(tasks.noop.name, "noop")

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
    def test_a_result_whose_task_is_gone_cannot_be_imported(self):
        for path in ("missing.func", "shop.tasks.missing"):
            envelope = mill.runtime.envelope(mill.call(path).using(queue="default"))
            envelope.headers = {"django-tasks": "default"}
            (job,) = mill.runtime.put([envelope])
            with self.subTest(path), self.assertRaises(ImportError):
                default_task_backend.get_result(job.id)


class EnqueueingWrongly(TidemillTestCase):
    def test_a_task_is_checked_again_when_it_is_enqueued(self):
        with self.settings(
            TASKS={"default": {"BACKEND": "tidemill.django.TaskBackend", "QUEUES": ["elsewhere"]}}
        ):
            task = tasks.noop.using(queue_name="elsewhere")
        said = "Queue 'elsewhere' is not valid for backend"
        with self.assertRaisesMessage(InvalidTask, said):
            task.enqueue()
        with self.assertRaisesMessage(InvalidTask, said):
            asyncio.run(task.aenqueue())

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

    def test_a_site_that_only_puts_jobs_into_a_store_elsewhere_needs_no_app(self):
        away = tidemill.django.TaskBackend("away", {"OPTIONS": {"URL": "redis://jobs.example"}})
        inside = tidemill.django.TaskBackend("inside", {"OPTIONS": {"URL": "django://other"}})
        with self.modify_settings(INSTALLED_APPS={"remove": "tidemill.django"}):
            self.assertEqual([each.id for each in away.check()], [])
            self.assertIn("tidemill.W003", [each.id for each in inside.check()])

    @override_settings(
        TASKS={"default": {"BACKEND": "tidemill.django.TaskBackend", "OPTIONS": {"RETRIES": -1}}}
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
