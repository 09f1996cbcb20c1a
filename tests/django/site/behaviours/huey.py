"""Behaviours of huey's documentation for Django, on tidemill.django: the table of the page
docs/how-to/from-huey.md, in its order."""

import datetime as dt
import time

from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import transaction
from django.test import TransactionTestCase
from django.utils import timezone
from shop import beans
from shop.models import Order
from shop.tasks import write_order

from tidemill import (
    InvalidOption,
    JobCancelled,
    JobFailed,
    Limit,
    ResultTimeout,
    State,
    chain,
    group,
    map_many,
)
from tidemill.django import mill
from tidemill.django.management.commands.tidemill import APP, arguments_of
from tidemill.django.project import DjangoMill
from tidemill.django.settings import read_settings
from tidemill.django.testing import TidemillTestCase, TidemillTestMixin, immediate, run_jobs
from tidemill.errors import JobExpired, LimitTimeout
from tidemill.testing import worker


class Case(TidemillTestCase):
    def setUp(self):
        super().setUp()
        beans.ran.clear()
        for each in list(mill.schedules):
            mill.schedules.remove(each.name)


class Declaring(Case):
    def test_a_task_is_enqueued_and_its_result_is_read(self):
        job = beans.count_beans.enqueue(100)
        self.assertEqual(beans.ran, [])
        self.run_jobs()
        self.assertEqual(job.result(timeout=60), "Counted 100 beans")
        self.assertEqual(job.result(timeout=60), "Counted 100 beans")  # a read deletes nothing

    def test_a_call_is_call_local(self):
        self.assertEqual(beans.count_beans(3), "Counted 3 beans")
        self.assertEqual(list(mill.jobs()), [])

    def test_a_result_that_is_not_there_in_time(self):
        with self.assertRaises(ResultTimeout):
            beans.count_beans.enqueue(1).result(timeout=0)

    def test_a_task_that_queries_needs_no_decorator_of_its_own(self):
        job = write_order.enqueue("beans")
        self.run_jobs()
        self.assertEqual(Order.objects.get(pk=job.result()).note, "beans")

    def test_a_periodic_task_fires_every_five_minutes(self):
        app = DjangoMill(read_settings({"URL": "lmdb://./unused"}))
        self.addCleanup(app.close)
        name = "every five minutes"
        app.task(name=name, schedule="*/5 * * * *")(beans.every_five_mins)
        app.runtime.code_schedules.store()
        first, second = app.schedules.next_times(name, 2)
        self.assertEqual((second - first, first.minute % 5), (dt.timedelta(minutes=5), 0))
        app.schedules.run(name)
        run_jobs(app)
        self.assertEqual(beans.ran, ["five minutes"])
        app.schedules.pause(name)
        self.assertIsNone(app.schedules.get(name).next)

    def test_a_task_is_scheduled_by_a_delay_or_a_time(self):
        hour = dt.timedelta(hours=1)
        by_delay = beans.count_beans.using(delay=3600).enqueue(1)
        by_time = beans.count_beans.using(at=timezone.now() + hour).enqueue(2)
        self.run_jobs()
        self.assertEqual({by_delay.state, by_time.state}, {State.SCHEDULED})
        self.assertEqual(len(list(mill.jobs(state="scheduled"))), 2)
        self.run_jobs(scheduled=True)
        self.assertEqual(sorted(beans.ran), [1, 2])

    def test_a_task_is_mapped_over_arguments(self):
        jobs = mill.enqueue(map_many(beans.double, [1, 2, 3]))
        self.run_jobs()
        self.assertEqual(list(jobs.result(timeout=60)), [2, 4, 6])

    def test_a_task_knows_itself(self):
        job = beans.facts.enqueue()
        self.run_jobs()
        self.assertEqual(job.result(), [job.id, 1, "shop.beans.facts"])


class Options(Case):
    def test_retries_wait_for_their_delay(self):
        job = beans.flaky.enqueue(2)
        self.run_jobs()
        record = job.refresh()
        self.assertIs(record.state, State.SCHEDULED)
        left = record.due - timezone.now().timestamp()
        self.assertLess(abs(left - 10), 9)
        self.run_jobs(scheduled=True)
        self.assertEqual(job.result(), 3)

    def test_the_last_failure_is_the_result(self):
        job = beans.flaky.enqueue(9)
        self.run_jobs(scheduled=True)
        with self.assertRaisesMessage(JobFailed, "ConnectionError: attempt 3"):
            job.result()

    def test_a_task_asks_for_its_retry(self):
        job = beans.asks_for_a_retry.enqueue()
        self.run_jobs()
        self.assertIs(job.state, State.SCHEDULED)
        self.run_jobs(scheduled=True)
        self.assertEqual(job.result(), "again")

    def test_a_task_cancels_its_execution(self):
        failed, skipped = beans.gives_up.enqueue(), beans.is_skipped.enqueue()
        self.run_jobs()
        self.assertEqual((failed.state, skipped.state), (State.FAILED, State.SUCCEEDED))
        self.assertEqual((len(failed.attempts), len(skipped.attempts)), (1, 1))

    def test_a_higher_priority_goes_first(self):
        for number, priority in ((1, 0), (2, 50), (3, 10)):
            beans.count_beans.using(priority=priority).enqueue(number)
        self.run_jobs()
        self.assertEqual(beans.ran, [2, 3, 1])

    def test_an_expired_task_does_not_run(self):
        job = beans.count_beans.using(expires=3600).enqueue(1)
        expired = beans.count_beans.using(expires=0.001).enqueue(2)
        time.sleep(0.01)  # until it has expired
        self.run_jobs()
        self.assertEqual(beans.ran, [1])
        self.assertEqual((job.state, expired.state), (State.SUCCEEDED, State.EXPIRED))
        with self.assertRaises(JobExpired):
            expired.result()

    def test_a_lock_leaves_a_second_job_out(self):
        first = beans.report.enqueue("first")
        second = beans.report.enqueue("second")
        self.assertEqual((second.id, second.placed), (first.id, "kept"))
        self.run_jobs()
        self.assertEqual(beans.ran, ["first"])
        beans.report.enqueue("third")
        self.run_jobs()
        self.assertEqual(beans.ran, ["first", "third"])

    def test_a_lock_as_a_block(self):
        limit = Limit(name="block", concurrency=1)
        with (
            mill.limits.hold(limit, timeout=60),
            self.assertRaises(LimitTimeout),
            mill.limits.hold(limit, timeout=0.01),
        ):
            self.fail("two have the lock")
        with mill.limits.hold(limit, timeout=60):
            pass

    def test_a_rate_lets_jobs_wait(self):
        first, _ = beans.call_api.enqueue(1), beans.call_api.enqueue(2)
        with worker(mill):
            first.wait(60)
        self.assertEqual(beans.ran, [1])


class Workflows(Case):
    def test_a_pipeline_passes_its_results_on(self):
        line = mill.enqueue(chain(beans.add.call(1, 2), beans.add.call(10), beans.double))
        self.run_jobs()
        self.assertEqual(line.result(timeout=60), 26)

    def test_an_error_handler_gets_the_failure(self):
        mill.enqueue(beans.gives_up.call().on_failure(beans.note_failure.call()))
        self.run_jobs()
        self.assertEqual(beans.ran, [State.FAILED])

    def test_a_group_and_a_chord(self):
        jobs = mill.enqueue(group([beans.add.call(1, 1), beans.add.call(2, 2)]))
        chord = mill.enqueue(
            chain(group([beans.double.call(1), beans.double.call(2)]), beans.total)
        )
        self.run_jobs()
        self.assertEqual(list(jobs.result(timeout=60)), [2, 4])
        self.assertEqual(chord.result(timeout=60), 6)


class Managing(Case):
    def test_a_revoked_task_does_not_run_and_can_be_restored(self):
        job = beans.count_beans.enqueue(1)
        self.assertTrue(job.cancel())
        self.run_jobs()
        self.assertEqual(beans.ran, [])
        with self.assertRaises(JobCancelled):
            job.result()
        job.retry()
        self.run_jobs()
        self.assertEqual(beans.ran, [1])

    def test_pending_and_scheduled_tasks_are_listed(self):
        ready = beans.count_beans.enqueue(1)
        later = beans.count_beans.using(delay=60).enqueue(2)
        self.assertEqual([job.id for job in mill.jobs(state="ready")], [ready.id])
        self.assertEqual([job.id for job in mill.jobs(state="scheduled")], [later.id])

    def test_hooks_before_and_after_a_task_are_middleware(self):
        given = {"URL": "lmdb://./unused", "MIDDLEWARE": ["shop.beans.around"]}
        app = DjangoMill(read_settings(given))
        self.addCleanup(app.close)
        task = app.task(name="beans")(beans.count_beans.function)
        task.enqueue(4)
        run_jobs(app)
        self.assertEqual(beans.ran, ["before beans", 4, "after"])

    def test_hooks_at_the_start_and_the_end_of_a_process_are_events(self):
        app = DjangoMill(read_settings({"URL": "lmdb://./unused"}))
        self.addCleanup(app.close)
        app.on("process_start")(lambda: beans.ran.append("start"))
        app.on("process_stop")(lambda: beans.ran.append("stop"))
        with worker(app):
            pass
        self.assertEqual(beans.ran, ["start", "stop"])


class Immediate(Case):
    def test_immediate_runs_a_task_at_once(self):
        with immediate():
            self.assertEqual(beans.count_beans.enqueue(2).result(), "Counted 2 beans")
            line = mill.enqueue(chain(beans.add.call(1, 2), beans.double))
            self.assertEqual(line.result(), 6)
        self.assertEqual(list(mill.jobs()), [])

    def test_immediate_raises_where_the_task_is_enqueued(self):
        with immediate(), self.assertRaises(ConnectionError):
            beans.flaky.enqueue(9)

    def test_the_setting_makes_it_so_for_the_project(self):
        app = DjangoMill(read_settings({"SYNC": True}))
        self.assertTrue(app.sync)
        with self.settings(DEBUG=True):
            self.assertFalse(DjangoMill(read_settings({})).sync)


class Consumer(Case):
    def test_the_consumer_is_a_verb_with_its_options(self):
        self.assertEqual(
            arguments_of(["worker", "-p", "4", "-c", "1"], APP),
            ["worker", APP, "-p", "4", "-c", "1"],
        )

    def test_the_checks_know_no_setting_of_huey(self):
        with self.settings(HUEY={"name": "shop"}):
            call_command("check")
        with self.assertRaises(ImproperlyConfigured):
            read_settings({"immediate": True})
        with self.assertRaises(InvalidOption):
            mill.task(retry_delay=10)(beans.around)


class OnCommit(TidemillTestMixin, TransactionTestCase):
    def test_every_task_is_an_on_commit_task(self):
        with transaction.atomic():
            job = beans.count_beans.enqueue(1)
            self.assertEqual(list(mill.jobs()), [])
        self.assertIs(job.state, State.READY)
        self.assertIs(beans.count_beans.enqueue(2).state, State.READY)
