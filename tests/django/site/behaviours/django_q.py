"""Behaviours of django-q's documentation, on tidemill.django.q."""

import datetime as dt
import logging
import math
from decimal import Decimal
from unittest import mock

from django.core.exceptions import ValidationError
from django.core.management import call_command
from django.db import IntegrityError
from django.db.models import Q
from django.test import override_settings
from django.utils import timezone
from shop import hooks, tasks
from shop.models import Customer, Order

from tidemill import InvalidOption, State
from tidemill.brokers.contract.schedules import Change
from tidemill.client.context import mark_records
from tidemill.django import mill
from tidemill.django.checks import check_settings
from tidemill.django.q import (
    AsyncTask,
    Chain,
    Iter,
    Schedule,
    async_chain,
    async_iter,
    async_task,
    count_group,
    delete_cached,
    delete_group,
    fetch,
    fetch_group,
    queue_size,
    result,
    result_group,
    schedule,
    validate_cron,
)
from tidemill.django.settings import store_url, worker_options
from tidemill.django.testing import TidemillTestCase
from tidemill.errors import CodecError
from tidemill.schedules.record import decode
from tidemill.worker.scheduling import Scheduling

HOURS = dt.timedelta(hours=1)
PAST = dt.datetime(2020, 1, 31, 12, tzinfo=dt.UTC)


class Case(TidemillTestCase):
    def setUp(self):
        super().setUp()
        hooks.seen.clear()
        for each in list(mill.schedules):
            mill.schedules.remove(each.name)


class Calls(Case):
    def test_a_path_or_a_function_is_called(self):
        ids = [
            async_task("math.copysign", 2, -2),
            async_task(math.copysign, 2, -2),
            async_task("shop.hooks.multiply", 3, b=5),
            async_task(tasks.write_order, "x"),
        ]
        self.assertEqual([result(each) for each in ids], [None] * 4)
        self.assertEqual(queue_size(), 4)
        self.run_jobs()
        self.assertEqual([result(each) for each in ids[:3]], [-2.0, -2.0, 15])
        self.assertTrue(fetch(ids[3]).success)

    def test_a_task_has_the_facts_of_django_q(self):
        task_id = async_task("shop.hooks.multiply", 3, task_name="triple", group="sums", b=4)
        self.assertIsNone(fetch(task_id))
        self.run_jobs()
        task = fetch("triple")
        self.assertEqual(task.id, task_id)
        self.assertEqual((task.name, task.group), ("triple", "sums"))
        self.assertEqual((task.func, task.args), ("shop.hooks.multiply", (3,)))
        self.assertEqual((task.kwargs, task.result, task.success), ({"b": 4}, 12, True))
        self.assertEqual(task.attempt_count, 1)
        self.assertLessEqual(task.started, task.stopped)
        self.assertGreaterEqual(task.time_taken(), 0)
        self.assertEqual((task.group_result(), task.group_count()), ([12], 1))

    def test_a_task_name_is_any_text(self):
        for name in ("Ada\u00a0Lovelace\n", "é" * 150):
            task_id = async_task("math.floor", 1.5, task_name=name)
            self.run_jobs()
            self.assertEqual(fetch(name).id, task_id)

    def test_long_names_with_the_same_beginning_are_two_names(self):
        names = ["é" * 150 + ending for ending in ("", "a", "b")]
        ids = [async_task("math.floor", 1.5, task_name=name) for name in names]
        self.run_jobs()
        self.assertEqual([fetch(name).id for name in names], ids)

    def test_a_failure_has_its_error_as_the_result(self):
        task_id = async_task("shop.hooks.fail")
        self.run_jobs()
        task = fetch(task_id)
        self.assertFalse(task.success)
        self.assertIn("ValueError: no", task.result)
        self.assertIn("Traceback", result(task_id))
        self.assertEqual(task.attempt_count, 1)  # max_attempts of Q_CLUSTER

    def test_the_log_of_a_worker_names_the_function(self):
        ids = [
            async_task("shop.hooks.multiply", 3),
            async_task(hooks.fail, hook=hooks.remember),
        ]
        self.assertEqual([job.id for job in mill.jobs(text="hooks.fail'")], ids[1:])
        self.addCleanup(logging.setLogRecordFactory, logging.getLogRecordFactory())
        mark_records()  # as each worker process does
        with self.assertLogs("tidemill.worker", "DEBUG") as logs:
            self.run_jobs()
        text = "\n".join(logs.output)
        for line in ("multiply[{}] started", "multiply[{}] succeeded"):
            self.assertIn(f"shop.hooks.{line.format(ids[0])} ", text)
        for line in ("fail[{}] started", "fail[{}] failed"):
            self.assertIn(f"shop.hooks.{line.format(ids[1])} ", text)
        self.assertIn("shop.hooks.remember[", text)
        self.assertNotIn("tidemill.django.q.", text)
        self.assertIn("shop.hooks.fail", {each.tidemill_task for each in logs.records})

    def test_a_hook_gets_the_task_also_after_a_failure(self):
        async_task("shop.hooks.multiply", 2, hook="shop.hooks.remember", group="g")
        async_task("shop.hooks.fail", hook=hooks.remember)
        async_task("shop.hooks.slow", 9, hook=hooks.remember, timeout=0.05)
        self.run_jobs()
        ended = {each[0]: each[1:] for each in hooks.seen if each != "slow"}
        self.assertEqual(ended["shop.hooks.multiply"], (True, 4, "g"))
        self.assertFalse(ended["shop.hooks.fail"][0])
        self.assertIn("JobTimeout", ended["shop.hooks.slow"][1])

    @override_settings(Q_CLUSTER={"retry": 1, "timeout": 60, "max_attempts": 5})
    def test_a_task_longer_than_retry_runs_once(self):
        task_id = async_task("shop.hooks.slow", 1.3)
        self.run_jobs()
        self.assertEqual((hooks.seen, result(task_id)), (["slow"], "done"))

    def test_options_stand_in_q_options_too(self):
        options = {"task_name": "named", "timeout": 7, "ack_failure": True, "cluster": "long"}
        task_id = async_task("shop.hooks.multiply", 1, q_options=options)
        envelope = mill.job(task_id).refresh().envelope
        self.assertEqual((envelope.timeout, envelope.queue), (7.0, "long"))
        self.assertEqual(envelope.retries.max_attempts, 1)
        with self.assertRaises(InvalidOption):
            async_task("shop.hooks.multiply", 1, q_options={"tiemout": 1})

    def test_sync_runs_at_once(self):
        task_id = async_task("shop.hooks.multiply", 4, sync=True, hook=hooks.remember, group="g")
        self.assertEqual(hooks.seen, [("shop.hooks.multiply", True, 8, "g")])
        self.assertEqual(list(mill.jobs()), [])
        self.assertEqual(mill.runtime.inline_jobs.get(task_id).state, State.SUCCEEDED)
        self.assertEqual((result(task_id), fetch(task_id).success), (8, True))  # case M15

    def test_sync_raises_the_error_of_a_failure(self):
        for hook in (None, hooks.remember):
            with self.subTest(hook), self.assertRaisesMessage(ValueError, "no"):
                async_task("shop.hooks.fail", sync=True, hook=hook)
        with self.assertRaisesMessage(ValueError, "no"):
            async_chain(["shop.hooks.fail"], group="broken", sync=True)
        self.assertEqual([each[:2] for each in hooks.seen], [("shop.hooks.fail", False)])

    def test_save_false_keeps_nothing(self):
        task_id = async_task("shop.hooks.multiply", 4, save=False, hook=hooks.remember)
        self.assertEqual(mill.job(task_id).refresh().envelope.result_ttl, 0)
        self.run_jobs()
        self.assertEqual(hooks.seen[0][1:3], (True, 8))

    def test_cached_is_a_time_in_the_store(self):
        task_id = async_task("shop.hooks.multiply", 4, cached=30)
        self.assertEqual(mill.job(task_id).refresh().envelope.result_ttl, 30)
        self.run_jobs()
        self.assertEqual(result(task_id, cached=True), 8)
        self.assertTrue(delete_cached(task_id))
        self.assertIsNone(result(task_id))

    def test_async_task_as_a_class(self):
        task = AsyncTask("shop.hooks.multiply", 5, b=5)
        task.kwargs["b"] = 6
        self.assertIsNone(task.result())
        task.run()
        self.run_jobs()
        self.assertEqual((task.result(), task.fetch().success), (30, True))

    def test_a_function_without_a_path_is_refused(self):
        for bad in (lambda: 1, 5):
            with self.subTest(bad), self.assertRaises(InvalidOption):
                async_task(bad)

    def test_a_model_instance_is_refused_with_the_remedy(self):
        with self.assertRaises(CodecError):
            async_task("shop.hooks.multiply", Customer(pk=1, name="Ada"))

    def test_an_instance_of_a_model_with_pass_by_key_travels(self):
        order, other = Order.objects.create(note="before"), Order.objects.create(note="other")
        task_id = async_task("shop.hooks.notes_of", order, other=other, hook=hooks.remember)
        order.note = "after"
        order.save()
        self.run_jobs()
        self.assertEqual(result(task_id), ["after", "other"])
        self.assertEqual(fetch(task_id).args, (order,))
        self.assertEqual(fetch(task_id).kwargs, {"other": other})

    @override_settings(Q_CLUSTER=None)
    def test_the_setting_must_be_there(self):
        with self.assertRaisesMessage(InvalidOption, "Q_CLUSTER = {}"):
            async_task("shop.hooks.multiply", 1)


class Groups(Case):
    def test_a_group_collects_results(self):
        for number in (1, 2, 3):
            async_task("shop.hooks.multiply", number, group="sums")
        async_task("shop.hooks.fail", group="sums")
        self.assertEqual((count_group("sums"), result_group("sums")), (0, []))
        self.run_jobs()
        self.assertEqual(result_group("sums", wait=5000), [2, 4, 6])
        self.assertEqual(len(result_group("sums", failures=True)), 4)
        self.assertEqual(result_group("sums", count=2, wait=-1), [2, 4, 6])
        self.assertEqual((count_group("sums"), count_group("sums", failures=True)), (4, 1))
        self.assertEqual([task.success for task in fetch_group("sums")], [True] * 3 + [False])
        self.assertEqual(delete_group("sums", tasks=True), 4)
        self.assertEqual(count_group("sums"), 0)

    def test_a_group_that_is_deleted_leaves_its_tasks(self):
        ids = [async_task("shop.hooks.multiply", number, group="sums") for number in (1, 2)]
        self.run_jobs()
        late = async_task("shop.hooks.multiply", 3, group="sums")
        self.assertEqual(delete_group("sums"), 2)
        self.assertEqual((count_group("sums"), fetch_group("sums")), (0, []))
        self.assertEqual([result(each) for each in ids], [2, 4])
        self.assertEqual([fetch(each).group for each in ids], [None, None])
        # a task that had not ended stays, and the name can be used again
        self.run_jobs()
        new = async_task("shop.hooks.multiply", 4, group="sums")
        self.run_jobs()
        self.assertEqual([task.id for task in fetch_group("sums")], [late, new])
        self.assertEqual(fetch(new).group, "sums")
        self.assertEqual((delete_group("sums"), delete_group("sums")), (2, 0))
        self.assertEqual(result(late), 6)

    def test_a_large_group_is_deleted_in_parts(self):
        with mock.patch("tidemill.django.q.calls.IDS_PER_JOB", 2):
            for number in range(5):
                async_task("shop.hooks.multiply", number, group="large")
            self.run_jobs()
            self.assertEqual(delete_group("large"), 5)
        self.assertEqual(count_group("large"), 0)

    def test_waiting_for_a_group_ends_in_time(self):
        async_task("shop.hooks.multiply", 1, group="never")
        self.assertEqual(result_group("never", wait=100), [])

    def test_async_iter_has_one_result(self):
        task_id = async_iter("math.floor", [1.5, 2.5, 3.5], hook=hooks.remember)
        self.run_jobs()
        self.assertEqual(result(task_id), [1, 2, 3])
        self.assertEqual(hooks.seen[0][1:3], (True, [1, 2, 3]))
        each = Iter("math.copysign")
        each.append(1, -1)
        each.append(2, -1)
        self.assertEqual(each.length(), 2)
        each.run()
        self.run_jobs()
        self.assertEqual((each.result(), each.fetch().success), ([-1.0, -2.0], True))

    def test_a_chain_runs_in_order(self):
        links = [("math.copysign", (1, -1)), ("shop.hooks.multiply", (2,), {"b": 5}), "time.time"]
        group = async_chain(links, group="chain")
        self.assertEqual(group, "chain")
        self.run_jobs()
        self.assertEqual(result_group("chain", count=3)[:2], [-1.0, 10])
        chain = Chain()
        chain.append("math.floor", 1.5)
        self.assertEqual(chain.append("shop.hooks.multiply", 3), 2)
        self.assertIsNone(chain.result())
        chain.run()
        self.assertEqual(chain.current(), 1)
        self.run_jobs()
        self.assertEqual((chain.result(), chain.current()), ([1, 6], 3))
        self.assertEqual([task.success for task in chain.fetch()], [True, True])

    def test_a_failure_ends_a_chain(self):
        async_chain(["shop.hooks.fail", ("shop.hooks.multiply", (2,))], group="broken")
        self.run_jobs()
        self.assertEqual(count_group("broken", failures=True), 2)
        self.assertEqual(result_group("broken"), [])


class Schedules(Case):
    def fire(self, name, jobs, record=None):
        """Fire a schedule as a worker does, if its record is as given; add its new job to jobs."""
        before = {each.id for each in mill.jobs()}
        record = record or mill.broker.schedules([name])[0]
        if record is not None and 0 < record.due <= mill.broker.wall():
            Scheduling().fire(mill.broker, [record])
        jobs += [each for each in mill.jobs() if each.id not in before]

    def test_an_update_may_end_the_match(self):
        schedule("shop.hooks.multiply", 2, name="a", schedule_type=Schedule.DAILY)
        daily = Schedule.objects.filter(schedule_type=Schedule.DAILY)
        found, is_new = daily.update_or_create(name="a", defaults={"schedule_type": "H"})
        self.assertEqual((found.schedule_type, is_new), (Schedule.HOURLY, False))

    def test_a_monthly_schedule_keeps_its_day(self):
        last = dt.datetime(2030, 1, 31, 12, tzinfo=dt.UTC)
        made = schedule("shop.hooks.multiply", 2, name="a", schedule_type="M", next_run=last)
        made.minutes = 5
        made.save()
        days = [moment.day for moment in mill.schedules.next_times("a", 3)]
        self.assertEqual(days, [31, 28, 31])

    def test_conditions_and_arguments_with_a_mistake_are_refused(self):
        for make in (
            lambda: Schedule.objects.filter(Q(name="a") ^ Q(name="b")),
            lambda: Schedule.objects.create(func="shop.hooks.multiply", kwargs="{1: 2}"),
            lambda: Schedule.objects.create(func="shop.hooks.multiply", kwargs=5),
            lambda: Schedule.objects.create(func="shop.hooks.multiply", args="{[]: 1}"),
            lambda: Schedule.objects.create(func="shop.hooks.multiply", kwargs="{1, 2}"),
            lambda: Schedule.objects.create(func="shop.hooks.multiply", kwargs="**{'b': 2}"),
        ):
            with self.assertRaises(InvalidOption):
                make()

    def test_each_type_has_its_times(self):
        start = timezone.now() + HOURS
        for kind, second in (
            (Schedule.HOURLY, HOURS),
            (Schedule.DAILY, 24 * HOURS),
            (Schedule.WEEKLY, 7 * 24 * HOURS),
            (Schedule.BIWEEKLY, 14 * 24 * HOURS),
        ):
            made = schedule("shop.hooks.multiply", 2, name=kind, schedule_type=kind, next_run=start)
            times = mill.schedules.next_times(kind, 2)
            self.assertLess(abs(made.next_run - start), dt.timedelta(seconds=1))
            # days have 23 to 25 hours in the project's time zone
            self.assertLess(abs(times[1] - times[0] - second), 2 * HOURS)
        for kind, months in (("M", 1), ("BM", 2), ("Q", 3), ("Y", 12)):
            schedule("shop.hooks.multiply", 2, name=kind, schedule_type=kind, next_run=start)
            first, later = mill.schedules.next_times(kind, 2)
            passed = 12 * (later.year - first.year) + later.month - first.month
            self.assertEqual(passed, months)
        every = schedule("shop.hooks.multiply", 2, schedule_type=Schedule.MINUTES, minutes=5)
        first, later = mill.schedules.next_times(every.name, 2)
        self.assertEqual(later - first, dt.timedelta(minutes=5))

    @override_settings(TIME_ZONE="Europe/Berlin")
    def test_cron_is_in_the_time_zone_of_the_project(self):
        made = schedule("shop.hooks.multiply", 2, schedule_type="C", cron="0 3 * * *", repeats=2)
        self.assertEqual((timezone.localtime(made.next_run).hour, made.repeats), (3, 2))
        self.assertEqual(len(mill.schedules.next_times(made.name, 5)), 2)

    def test_once_is_the_default_and_runs(self):
        from tidemill.testing import join, worker

        schedule(
            "shop.hooks.planned", name="soon", intended_date_kwarg="when", hook=None, group="once"
        )
        with worker(mill):
            while not (found := fetch_group("once", wait=10_000, count=1)):
                join(mill, 10)
        self.assertIsNotNone(dt.datetime.fromisoformat(found[0].result).tzinfo)

    def test_a_hook_of_a_schedule_is_called(self):
        later = {"schedule_type": "H", "next_run": timezone.now() + HOURS}
        made = schedule("shop.hooks.multiply", 6, hook=hooks.remember, **later)
        mill.schedules.run(made.name)
        self.run_jobs()
        self.assertEqual(hooks.seen, [("shop.hooks.multiply", True, 12, made.name)])

    def test_a_name_is_taken_once(self):
        schedule("shop.hooks.multiply", 1, name="one", schedule_type="H")
        with self.assertRaises(IntegrityError):
            schedule("shop.hooks.multiply", 1, name="one", schedule_type="H")

    def test_schedule_objects_make_find_and_delete(self):
        objects = Schedule.objects
        hourly = {"func": "shop.hooks.multiply", "args": "2, 3", "schedule_type": Schedule.HOURLY}
        hourly["next_run"] = timezone.now() + HOURS
        _, created = objects.get_or_create(name="a", defaults=hourly)
        _, again = objects.get_or_create(name="a", defaults=hourly)
        self.assertEqual((created, again), (True, False))
        daily = {"schedule_type": "D", "kwargs": "b=5", "args": "(4,)"}
        _, created = objects.update_or_create(name="a", defaults=daily)
        self.assertFalse(created)
        self.assertEqual(objects.get(name="a").schedule_type, "D")
        mill.schedules.run("a")
        self.run_jobs()
        (job,) = mill.jobs(state="succeeded")
        self.assertEqual(job.result(), 20)
        objects.create(name="b", func="math.floor", args="1.5", schedule_type="H", minutes=None)
        self.assertEqual((objects.count(), objects.filter(func="math.floor").count()), (2, 1))
        self.assertEqual(objects.filter(func=hooks.multiply).first().name, "a")
        self.assertTrue(objects.filter(name="b").exists())
        self.assertEqual(objects.filter(name="b").delete()[0], 1)
        self.assertEqual([each.name for each in objects.all()], ["a"])
        with self.assertRaises(InvalidOption):
            objects.get_or_create(schedule_type="Y")

    def test_a_schedule_has_the_fields_of_django_q(self):
        start = timezone.now() + HOURS
        given = {"func": "shop.hooks.multiply", "args": "2", "kwargs": "b=5", "cluster": "slow"}
        objects, times = Schedule.objects, {"schedule_type": "I", "minutes": 60, "next_run": start}
        objects.create(name="a", hook="shop.hooks.remember", repeats=3, **given, **times)
        found = objects.get(func="shop.hooks.multiply", args="(2,)", kwargs={"b": 5})
        for field, value in {**given, **times, "hook": "shop.hooks.remember"}.items():
            self.assertEqual(getattr(found, field), value)
        self.assertEqual((found.pk, found.repeats, str(found)), ("a", 3, given["func"]))
        self.assertEqual((found.task, found), (None, objects.get(pk="a")))
        found.next_run = PAST
        found.save()
        jobs = []
        self.fire("a", jobs)
        found = objects.get(task=jobs[0].id)
        self.assertEqual((found.task, jobs[0].refresh().envelope.queue), (jobs[0].id, "slow"))
        self.run_jobs()
        self.assertEqual(hooks.seen, [("shop.hooks.multiply", True, 10, "a")])

    def test_schedules_are_looked_up_and_ordered(self):
        objects, later = Schedule.objects, timezone.now() + HOURS
        for name, func in (("a-1", "math.floor"), ("b-1", "math.ceil"), ("a-2", "math.ceil")):
            objects.create(name=name, func=func, args="1", schedule_type="H", next_run=later)
        names = objects.order_by("func", "-name").values_list("name", flat=True)
        self.assertEqual(names, ["b-1", "a-2", "a-1"])
        for lookups, found in (
            (Q(name__startswith="a"), ["a-1", "a-2"]),
            (Q(name__icontains="A-", func=math.ceil), ["a-2"]),
            (Q(func__in=["math.ceil"], hook__isnull=True), ["a-2", "b-1"]),
            (Q(next_run__lt=timezone.now()) | Q(id__in=["b-1"]), ["b-1"]),
            (~Q(func="math.ceil"), ["a-1"]),
            (Q(pk="a-1") & Q(func="math.ceil"), []),
        ):
            with self.subTest(lookups):
                self.assertEqual([each.name for each in objects.filter(lookups)], found)
        self.assertEqual(objects.exclude(func="math.ceil").values("id", "args")[0]["id"], "a-1")
        self.assertEqual(objects.filter(func="math.ceil").update(minutes=1, schedule_type="I"), 2)
        self.assertEqual(mill.schedules.get("b-1").when, "every 60 s")
        self.assertRaises(Schedule.DoesNotExist, objects.get, name="other")
        self.assertRaises(Schedule.MultipleObjectsReturned, objects.get, func="math.ceil")
        with self.assertRaisesMessage(InvalidOption, "no lookup 'name__regex'; after name__ can"):
            objects.filter(name__regex="x")
        with self.assertRaisesMessage(InvalidOption, "no field 'nothing'; it has name, func"):
            objects.order_by("nothing").exists()
        with self.assertRaisesMessage(InvalidOption, "no field 'task'"):
            objects.update(task="x")
        self.assertEqual(objects.exclude(name__in=["a-1"]).delete()[0], 2)
        self.assertEqual([each.name for each in mill.schedules], ["a-1"])

    def test_save_stores_only_what_the_object_has_changed(self):
        made = Schedule(func="shop.hooks.multiply", args="2", schedule_type="D", name="a")
        made.save()
        other = Schedule.objects.get(name="a")
        other.repeats, other.cluster = 4, "slow"
        other.save()
        made.args, made.schedule_type = (3,), Schedule.HOURLY
        made.save()
        found = Schedule.objects.get()
        self.assertEqual((found.args, found.schedule_type, found.repeats), ("(3,)", "H", 4))
        self.assertEqual(found.cluster, "slow")
        found.name = "b"
        with self.assertRaisesMessage(InvalidOption, "a schedule keeps its name 'a'"):
            found.save()
        other.refresh_from_db()
        self.assertEqual((other.args, other.name), ("(3,)", "a"))
        self.assertEqual((made.delete()[0], made.delete()[0], made.id), (1, 0, None))
        with self.assertRaisesMessage(Schedule.DoesNotExist, "is gone: nothing is saved"):
            other.minutes = 3
            other.save()
        self.assertFalse(mill.broker.schedules(["a"])[0])

    def test_a_change_beside_another_change_loses_neither(self):
        made = schedule("shop.hooks.multiply", 2, name="a", schedule_type="H", next_run=PAST)

        class Meanwhile(int):
            """A number; somebody else changes the schedule while the change is made."""

            def __int__(self):
                if not jobs:
                    self_case.fire("a", jobs)
                return 7

        self_case, jobs = self, []
        made.minutes, made.hook = Meanwhile(7), hooks.remember
        made.save()
        self.assertEqual((len(jobs), made.minutes, made.hook), (1, 7, "shop.hooks.remember"))
        self.assertGreater(made.next_run, timezone.now())
        jobs.clear()
        self.assertEqual(Schedule.objects.filter(next_run__lt=PAST).update(minutes=9), 0)
        Schedule.objects.update(next_run=PAST)
        late = Schedule.objects.filter(next_run__lte=PAST)
        self.assertEqual((late.update(minutes=Meanwhile(7)), len(jobs), late.count()), (0, 1, 0))

    def test_an_overdue_schedule_runs_once_after_a_change(self):
        schedule("math.floor", 1, name="a", schedule_type="D", next_run=PAST, repeats=3)
        made = Schedule.objects.get(next_run__lt=timezone.now())
        (claimed,) = mill.broker.schedules(["a"])
        made.args = "2"
        made.save()
        self.assertEqual((made.next_run, made.repeats), (PAST, 3))
        jobs = []
        self.fire("a", jobs, claimed)  # a worker had the record before the change
        self.assertEqual(len(jobs), 0)
        self.fire("a", jobs)
        self.fire("a", jobs)
        self.run_jobs()
        self.assertEqual([each.result() for each in jobs], [2])
        found = Schedule.objects.get(name="a")
        self.assertEqual((found.repeats, made.repeats), (2, 3))
        made.cluster = "slow"
        made.save()
        self.assertEqual((made.repeats, made.next_run), (2, found.next_run))
        Schedule.objects.update(repeats=5)
        self.assertEqual(Schedule.objects.get().repeats, 5)
        self.assertGreater(made.next_run, timezone.now())

    def test_a_paused_schedule_stays_paused_until_it_gets_a_time(self):
        made = schedule("math.floor", 1, name="a", schedule_type="D", next_run=PAST, repeats=3)
        mill.schedules.pause("a")
        made.refresh_from_db()
        self.assertEqual((made.next_run, made.repeats), (None, 3))
        made.args, made.repeats, made.schedule_type = "2", 5, "W"
        made.save()
        self.assertEqual((made.next_run, made.repeats), (None, 5))
        self.assertTrue(mill.schedules.get("a").paused)
        made.next_run = timezone.now() + HOURS
        made.save()
        self.assertEqual(mill.schedules.get("a").next, made.next_run)
        Schedule.objects.update(next_run=None)
        self.assertTrue(mill.schedules.get("a").paused)

    def test_a_schedule_without_repeats_rests_with_its_time(self):
        schedule("math.floor", 1, name="a", schedule_type="D", next_run=PAST)
        Schedule.objects.filter(name="a").update(repeats=0)
        found = Schedule.objects.get(repeats=0)
        self.assertEqual((found.next_run, mill.schedules.get("a").paused), (PAST, True))
        found.repeats = -1
        found.save()
        self.assertEqual((found.next_run, mill.schedules.get("a").paused), (PAST, False))

    def test_arguments_that_are_no_literals_stay(self):
        order = Order.objects.create(note="x")
        moment, price = timezone.now(), Decimal("1.10")
        given = (order, moment, {1, 2})
        schedule("shop.hooks.given", *given, name="a", order=order, price=price)
        before = decode(mill.broker.schedules(["a"])[0].body).job
        found = Schedule.objects.get(kwargs={"price": price, "order": order}, args=given)
        found.hook, found.next_run = hooks.remember, timezone.now() + HOURS
        found.save()
        Schedule.objects.update_or_create(name="a", defaults={"hook": None, "func": hooks.given})
        after = decode(mill.broker.schedules(["a"])[0].body).job
        self.assertEqual((after.body, after.tags), (before.body, before.tags))
        found.refresh_from_db()
        self.assertIn("Decimal('1.10')", found.kwargs)
        job = mill.schedules.run("a")
        self.run_jobs()
        self.assertEqual(job.result(), [order.pk, moment, {1, 2}, order.pk, price])

    def test_a_keyword_may_be_named_as_a_field_of_the_record(self):
        made = schedule("shop.hooks.named", args=[1], name="a", kwargs={"b": 2}, group="g")
        self.assertEqual(made.kwargs, "{'group': 'g', 'args': [1], 'kwargs': {'b': 2}}")
        self.run_jobs()
        self.assertEqual(result_group("g"), [[[1], {"b": 2}]])

    @override_settings(USE_TZ=False, TIME_ZONE="Asia/Tokyo")
    def test_times_have_no_zone_without_use_tz(self):
        soon = dt.datetime.now() + HOURS
        made = schedule("math.floor", 1, name="a", schedule_type="H", next_run=soon)
        self.assertEqual(made.next_run, soon)
        self.assertEqual(Schedule.objects.filter(next_run__gt=dt.datetime.now()).get(), made)
        made.next_run = soon + HOURS
        made.save()
        Schedule.objects.create(func="math.floor", args="1")
        self.assertEqual(Schedule.objects.get(name="a").next_run, soon + HOURS)
        self.assertEqual(mill.schedules.get("a").next.timestamp(), (soon + HOURS).timestamp())

    def test_schedules_of_plain_tidemill_are_found_and_get_other_times(self):
        mill.schedules.add("a", tasks.write_order.call("x"), every=300, repeats=9, jitter=100)
        (before,) = mill.broker.schedules(["a"])
        mill.schedules.add("b", tasks.write_order.call("y"), every=90, jitter=5)
        found, is_new = Schedule.objects.get_or_create(name="a", defaults={"func": "math.floor"})
        self.assertEqual(
            (is_new, found.func, found.args), (False, "shop.tasks.write_order", "('x',)")
        )
        self.assertEqual((found.schedule_type, found.minutes, found.repeats), ("I", 5, 9))
        found.schedule_type = "H"
        found.save()
        self.assertEqual(mill.schedules.get("a").when, "every 3600 s")
        self.assertEqual(mill.broker.schedules(["a"])[0].due, before.due)
        found.args = "'z'"
        with self.assertRaisesMessage(InvalidOption, "only its times can change"):
            found.save()
        odd = Schedule.objects.get(name="b")
        odd.next_run = timezone.now() + HOURS
        odd.save()
        self.assertEqual((odd.schedule_type, mill.schedules.get("b").when), (None, "every 90 s"))
        self.assertEqual(mill.schedules.get("b").next, odd.next_run)

    def test_a_record_of_another_version_is_left_out(self):
        schedule("math.floor", 1, name="a", schedule_type="H")
        mill.broker.change_schedules([Change("newer", 0, 1.0, b"\xc1")])
        self.assertEqual([each.name for each in Schedule.objects.all()], ["a"])
        self.assertEqual(Schedule.objects.update(minutes=2), 1)
        self.assertEqual(Schedule.objects.get_or_create(name="a")[1], False)
        with self.assertRaisesMessage(IntegrityError, "there is a schedule 'newer' already"):
            Schedule.objects.get_or_create(name="newer", defaults={"func": "math.floor"})

    def test_a_schedule_without_a_first_time_is_due_at_once(self):
        past = {"schedule_type": "M", "next_run": PAST.replace(tzinfo=None)}
        for given in ({}, {"schedule_type": "D"}, past):
            made = Schedule.objects.create(func="math.floor", args="1", **given)
            jobs = []
            self.fire(made.name, jobs)
            self.assertEqual(len(jobs), 1)

    def test_wrong_fields_are_refused(self):
        validate_cron("0 3 * * *")
        with self.assertRaises(ValidationError):
            validate_cron("0 30 * * *")
        for field, value in (("cron", "x"), ("minutes", -5), ("args", "a b"), ("kwargs", "1")):
            with self.subTest(field), self.assertRaisesMessage(InvalidOption, field):
                Schedule.objects.create(func="math.floor", schedule_type="C", **{field: value})
        self.assertEqual(Schedule.objects.count(), 0)

    def test_an_unknown_type_is_refused(self):
        with self.assertRaisesMessage(InvalidOption, "schedule_type must be one of"):
            schedule("shop.hooks.multiply", 1, schedule_type="X")


class Cluster(Case):
    def test_keys_are_mapped(self):
        for given, url in (
            ({"orm": "default"}, "django://default"),
            ({"redis": "redis://h:1/2"}, "redis://h:1/2"),
            ({"redis": {"host": "h", "port": 1, "db": 3, "password": "p"}}, "redis://:p@h:1/3"),
            ({}, None),
        ):
            with self.settings(Q_CLUSTER=given):
                self.assertEqual(store_url(), url)
        given = {"workers": 4, "recycle": 500, "max_rss": 102_400}
        with self.settings(Q_CLUSTER=given):
            self.assertEqual(
                worker_options(), {"-p": "4", "-c": "1", "--max-jobs": "500", "--max-memory": "100"}
            )

    def test_keys_without_meaning_are_warned_of(self):
        given = {"bulk": 10, "poll": 1, "sqs": {}, "wrokers": 3, "timeout": 9}
        with self.settings(Q_CLUSTER=given):
            warnings = [message for message in check_settings() if message.id == "tidemill.W002"]
        self.assertEqual(len(warnings), 4)
        self.assertIn("Q_CLUSTER['bulk'] has no meaning here", warnings[0].msg)
        self.assertIn("a put wakes a worker", warnings[1].hint)
        call_command("check")

    def test_one_job_for_all_missed_times_is_what_catch_up_false_says(self):
        with self.settings(Q_CLUSTER={"catch_up": False}):
            self.assertEqual(check_settings(), [])
        with self.settings(Q_CLUSTER={"catch_up": True}):
            (warning,) = check_settings()
        self.assertIn("one job for all missed times", warning.hint)
