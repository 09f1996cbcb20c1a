"""Puts inside ``atomic``: all ways of putting wait for the commit, and leave nothing after a
rollback. A put that the store refuses after the commit is raised."""

import contextlib
from typing import ClassVar
from unittest import mock

import msgspec
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connection, transaction
from django.test import TransactionTestCase, override_settings
from django.utils import timezone
from shop import tasks
from shop.framework import TaskResultDoesNotExist, TaskResultStatus, task_enqueued
from shop.models import Order
from shop.receivers import received

from tidemill import InvalidOption, JobNotFound, Limit, QueueFull, chain, group
from tidemill.django import mill
from tidemill.django.q import async_task
from tidemill.django.testing import TidemillTestCase, TidemillTestMixin
from tidemill.errors import BrokerUnavailable, FeatureMissing, Unroutable


class Case(TidemillTestMixin, TransactionTestCase):
    databases: ClassVar = {"default", "other"}

    def setUp(self):
        super().setUp()
        mill.queue("bound").bind("orders.#")

    def stored(self):
        return [job.id for job in mill.jobs()]

    def set_robust(self):
        before = mill.runtime.settings
        mill.runtime.settings = msgspec.structs.replace(before, robust=True)
        self.addCleanup(setattr, mill.runtime, "settings", before)


def in_batch():
    with mill.batch():
        mill.enqueue(tasks.write_order.call("x"))


def publish_in_batch():
    with mill.batch():
        mill.enqueue(tasks.write_order.call("x"))
        mill.publish("orders.new", 1)


def run_schedule():
    mill.schedules.run("nightly")


async def in_async_batch():
    async with mill.batch():
        await mill.aenqueue(tasks.write_order.call("x"))
        await mill.queue("m").aput(1)


async def publish_in_async_batch():
    async with mill.batch():
        await mill.apublish("orders.new", 1)


WAYS = {
    "one": lambda: tasks.write_order.enqueue("x"),
    "options": lambda: tasks.write_order.using(delay=60).enqueue("x"),
    "name": lambda: mill.enqueue("shop.tasks.write_order", "x"),
    "many": lambda: mill.enqueue_many([tasks.write_order.call("x")] * 2),
    "chain": lambda: mill.enqueue(chain(tasks.write_order.call("x"), tasks.sleep_for)),
    "group": lambda: mill.enqueue(group([tasks.write_order.call("x")] * 2)),
    "hook": lambda: mill.enqueue(tasks.write_order.call("x").on_success(tasks.sleep_for)),
    "message": lambda: mill.queue("m").put({"a": 1}),
    "messages": lambda: mill.queue("m").put_many([1, 2]),
    "publish": lambda: mill.publish("orders.new", 1),
    "batch": in_batch,
    "batch with a publication": publish_in_batch,
    "schedule": run_schedule,
    "framework": lambda: tasks.noop.enqueue(),
    "django-q": lambda: async_task("shop.hooks.multiply", 1),
}

ASYNC_WAYS = {
    "one": lambda: tasks.write_order.aenqueue("x"),
    "call": lambda: mill.aenqueue(tasks.write_order.call("x")),
    "many": lambda: mill.aenqueue_many([tasks.write_order.call("x")] * 2),
    "chain": lambda: mill.aenqueue(chain(tasks.write_order.call("x"), tasks.sleep_for)),
    "group": lambda: mill.aenqueue(group([tasks.write_order.call("x")] * 2)),
    "hook": lambda: mill.aenqueue(tasks.write_order.call("x").on_success(tasks.sleep_for)),
    "message": lambda: mill.queue("m").aput({"a": 1}),
    "messages": lambda: mill.queue("m").aput_many([1, 2]),
    "publish": lambda: mill.apublish("orders.new", 1),
    "batch": in_async_batch,
    "batch with a publication": publish_in_async_batch,
    "framework": lambda: tasks.noop.aenqueue(),
}


# case D1
class EachWay(Case):
    def setUp(self):
        super().setUp()
        mill.schedules.add("nightly", tasks.write_order.call("x"), every=86400)
        self.addCleanup(mill.schedules.remove, "nightly")

    def ways(self):
        for name, way in WAYS.items():
            yield name, way
        for name, way in ASYNC_WAYS.items():
            yield f"async: {name}", async_to_sync(way)

    def test_it_waits_for_the_commit(self):
        for name, way in self.ways():
            with self.subTest(name):
                before = self.stored()
                with transaction.atomic():
                    way()
                    self.assertEqual(self.stored(), before)
                self.assertGreater(len(self.stored()), len(before))

    def test_it_leaves_nothing_after_a_rollback(self):
        for name, way in self.ways():
            with self.subTest(name):
                with contextlib.suppress(RuntimeError), transaction.atomic():
                    way()
                    raise RuntimeError
                self.assertEqual(self.stored(), [])

    def test_a_handle_says_that_its_job_is_not_stored(self):  # case M7
        with contextlib.suppress(RuntimeError), transaction.atomic():
            job = tasks.write_order.enqueue("x")
            with self.assertRaisesRegex(JobNotFound, "not been committed"):
                job.refresh()
            raise RuntimeError
        with self.assertRaisesRegex(JobNotFound, "rolled back") as caught:
            job.refresh()
        self.assertIs(type(caught.exception), JobNotFound)

    def test_it_leaves_nothing_after_a_savepoint_has_rolled_back(self):
        for name, way in self.ways():
            with self.subTest(name):
                with transaction.atomic():
                    Order.objects.create()
                    with contextlib.suppress(RuntimeError), transaction.atomic():
                        way()
                        raise RuntimeError
                self.assertEqual(self.stored(), [])

    def test_it_stores_at_once_outside_of_a_transaction(self):
        for name, way in self.ways():
            with self.subTest(name):
                before = len(self.stored())
                way()
                self.assertGreater(len(self.stored()), before)

    def test_it_does_not_wait_for_other_databases(self):
        for name, way in self.ways():
            with self.subTest(name), transaction.atomic(using="other"):
                before = len(self.stored())
                way()
                self.assertGreater(len(self.stored()), before)


class Commits(Case):
    def test_a_job_waits_for_the_commit(self):
        with received(task_enqueued) as seen:
            with transaction.atomic():
                result = tasks.noop.enqueue()
                self.assertEqual(result.status, TaskResultStatus.READY)
                self.assertIsNotNone(result.enqueued_at)
                self.assertEqual((self.stored(), seen), ([], []))
                with self.assertRaises(TaskResultDoesNotExist):
                    result.refresh()
            self.assertEqual([each[1] for each in seen], [result.id])
        self.assertEqual(self.stored(), [result.id])
        result.refresh()

    def test_a_handle_is_complete_after_the_commit(self):
        first = tasks.write_order.using(key="one").enqueue("x")
        known = tasks.noop.using(key="two").enqueue()
        with transaction.atomic():
            again = tasks.write_order.using(key="one").enqueue("y")
            result = tasks.noop.using(key="two").enqueue()
            self.assertNotEqual(again.id, first.id)
            with self.assertRaises(JobNotFound):
                again.state  # noqa: B018
            copies = mill.publish("orders.new", 1)
            self.assertEqual(copies, [])
        self.assertEqual((again.id, again.placed), (first.id, "kept"))
        self.assertEqual(result.id, known.id)
        self.assertEqual([copy.placed for copy in copies], ["created"])

    def test_a_place_of_a_limit_is_taken_inside_a_transaction(self):
        limit = Limit(name="report", concurrency=1)
        with transaction.atomic(), mill.limits.hold(limit, timeout=60):
            pass

    def test_other_jobs_can_be_waited_for_inside_a_transaction(self):
        job = tasks.write_order.enqueue("x")
        self.run_jobs()
        with transaction.atomic():
            tasks.noop.enqueue()
            self.assertEqual(job.result(timeout=60), Order.objects.get().pk)

    def test_a_put_that_waits_for_the_commit_cannot_wait_for_room(self):
        said = self.assertRaisesMessage(InvalidOption, "not possible before the commit")
        with said, transaction.atomic():
            mill.queue("m").put(1, timeout=5)
        said = self.assertRaisesMessage(InvalidOption, "not possible before the commit")
        with said, transaction.atomic():
            async_to_sync(mill.queue("m").aput)(1, timeout=5)
        mill.queue("m").put(1, timeout=5)
        async_to_sync(mill.queue("m").aput)(1, timeout=5)

    def test_a_transaction_of_another_library_goes_its_own_way(self):
        with self.assertRaisesMessage(FeatureMissing, "txn="), transaction.atomic():
            tasks.write_order.using(txn=object()).enqueue("x")

    async def test_aenqueue_waits_in_the_thread_of_the_transaction(self):
        def work():
            with transaction.atomic():
                result = async_to_sync(tasks.noop.aenqueue)()
                async_to_sync(tasks.rich.aenqueue)(timezone.now(), b"")
                self.assertEqual(self.stored(), [])
            return result

        result = await sync_to_async(work)()
        stored = await sync_to_async(self.stored)()
        self.assertEqual(len(stored), 2)
        self.assertIn(result.id, stored)

    @override_settings(
        TASKS={
            "default": {
                "BACKEND": "tidemill.django.TaskBackend",
                "OPTIONS": {"ENQUEUE_ON_COMMIT": False},
            }
        }
    )
    def test_the_wait_can_be_switched_off(self):
        with transaction.atomic():
            result = tasks.noop.enqueue()
            tasks.write_order.enqueue("waits")
            self.assertEqual(tasks.noop.get_result(result.id).id, result.id)
            self.assertEqual(self.stored(), [result.id])
        self.assertEqual(len(self.stored()), 2)


class Refusals(Case):
    """The store refuses a put after the commit, when the data of the transaction is safe."""

    def setUp(self):
        super().setUp()
        mill.queue("small", max_size=1).put(1)
        mill.queue("queue-1", max_size=1).put(1)

    def test_the_error_is_raised_and_keeps_no_other_put_away(self):
        with self.assertRaises(QueueFull) as raised, transaction.atomic():
            Order.objects.create()
            first = tasks.noop.enqueue()
            refused = [mill.queue("small").put(2), mill.queue("queue-1").put(3)]
            kept = tasks.noop.enqueue()
            with contextlib.suppress(RuntimeError), transaction.atomic():
                gone = tasks.noop.enqueue()
                raise RuntimeError
        self.assertEqual(Order.objects.count(), 1)
        self.assertLess({first.id, kept.id}, set(self.stored()))
        for job in [*refused, gone]:
            self.assertNotIn(job.id, self.stored())
        (note,) = raised.exception.__notes__
        names = ", ".join(f"message {job.id}" for job in refused)
        self.assertEqual(note, f"after the commit the store did not take {names}")

    def test_the_next_transaction_is_as_any_other(self):
        with self.assertRaises(QueueFull), transaction.atomic():
            mill.queue("small").put(2)
        with transaction.atomic():
            kept = tasks.noop.enqueue()
        self.assertIn(kept.id, self.stored())

    def test_a_store_that_is_away_is_asked_once(self):
        away = mock.patch.object(mill.broker, "put", side_effect=BrokerUnavailable("away"))
        with away as put, self.assertRaises(BrokerUnavailable) as raised, transaction.atomic():
            results = [tasks.noop.enqueue() for _ in range(12)]
        put.assert_called_once()
        refused, unsure = raised.exception.__notes__
        self.assertIn(results[1].id, refused)
        self.assertIn(results[10].id, refused)
        self.assertIn("and 1 more", refused)
        # the first put may have been stored before the store went away
        self.assertIn(f"may have stored {tasks.noop.module_path} {results[0].id}", unsure)
        self.assertEqual(results[0].status, TaskResultStatus.READY)
        self.assertEqual({result.status for result in results[1:]}, {TaskResultStatus.FAILED})

    def test_robust_asks_a_store_that_is_away_once(self):
        self.set_robust()
        away = mock.patch.object(mill.broker, "put", side_effect=BrokerUnavailable("away"))
        logged = self.assertLogs("tidemill.django", "ERROR")
        with away as put, logged as log, transaction.atomic():
            results = [tasks.noop.enqueue() for _ in range(12)]
        put.assert_called_once()
        refused, unsure = log.output
        self.assertIn(results[1].id, refused)
        self.assertIn(results[0].id, unsure)

    def test_a_mandatory_publication_without_a_queue_is_raised(self):
        with self.assertRaises(Unroutable) as raised, transaction.atomic():
            mill.publish("nobody.listens", 1, mandatory=True)
        self.assertIn("publication nobody.listens", raised.exception.__notes__[0])

    def test_robust_only_logs_it(self):
        self.set_robust()
        with self.assertLogs("tidemill.django", "ERROR") as logged, transaction.atomic():
            refused = mill.queue("small").put(2)
            kept = tasks.noop.enqueue()
        self.assertIn(kept.id, self.stored())
        self.assertNotIn(refused.id, self.stored())
        self.assertIn(f"did not take message {refused.id}", logged.output[0])

    def assert_says_so(self, kept, refused, seen):
        self.assertEqual([each[1] for each in seen], [kept.id])
        self.assertEqual(kept.status, TaskResultStatus.READY)
        self.assertEqual(refused.status, TaskResultStatus.FAILED)
        self.assertTrue(refused.is_finished)
        self.assertIsNotNone(refused.finished_at)
        (error,) = refused.errors
        self.assertIs(error.exception_class, QueueFull)
        with self.assertRaises(TaskResultDoesNotExist):
            refused.refresh()

    def test_the_result_of_the_framework_says_so(self):
        said = self.assertRaises(QueueFull)
        with received(task_enqueued) as seen, said, transaction.atomic():
            refused = tasks.noop.using(queue_name="queue-1").enqueue()
            kept = tasks.noop.enqueue()
        self.assert_says_so(kept, refused, seen)

    @override_settings(
        TASKS={"default": {"BACKEND": "tidemill.django.TaskBackend", "OPTIONS": {"ROBUST": True}}}
    )
    def test_robust_of_an_alias_only_logs_it(self):
        mill.queue("default", max_size=1)
        logged = self.assertLogs("tidemill.django", "ERROR")
        with received(task_enqueued) as seen, logged, transaction.atomic():
            kept = tasks.noop.enqueue()
            refused = tasks.noop.enqueue()
        self.assert_says_so(kept, refused, seen)


class CommitsInTestCase(TidemillTestCase):
    def test_the_transaction_of_the_test_does_not_count(self):
        self.assertTrue(connection.in_atomic_block)
        result = tasks.noop.enqueue()
        tasks.noop.get_result(result.id)

    def test_captured_callbacks_store_the_jobs(self):
        with self.captureOnCommitCallbacks(execute=True):
            with transaction.atomic():
                result = tasks.noop.enqueue()
            with self.assertRaises(TaskResultDoesNotExist):
                result.refresh()
        result.refresh()
