"""Behaviours of django-q's documentation, on tidemill.django.q."""

import datetime as dt
import math
from unittest import mock

from django.core.management import call_command
from django.test import override_settings
from django.utils import timezone
from shop import hooks, tasks
from shop.models import Customer, Order

from tidemill import InvalidOption, State
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
)
from tidemill.django.settings import store_url, worker_options
from tidemill.django.testing import TidemillTestCase
from tidemill.errors import CodecError, ScheduleExists

HOURS = dt.timedelta(hours=1)


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

    def test_a_failure_has_its_error_as_the_result(self):
        task_id = async_task("shop.hooks.fail")
        self.run_jobs()
        task = fetch(task_id)
        self.assertFalse(task.success)
        self.assertIn("ValueError: no", task.result)
        self.assertIn("Traceback", result(task_id))
        self.assertEqual(task.attempt_count, 1)  # max_attempts of Q_CLUSTER

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
        task_id = async_task("shop.hooks.multiply", 4, sync=True, hook=hooks.remember)
        self.assertEqual(len(hooks.seen), 1)
        self.assertEqual(list(mill.jobs()), [])
        self.assertEqual(mill.runtime.inline_jobs.get(task_id).state, State.SUCCEEDED)
        self.assertEqual((result(task_id), fetch(task_id).success), (8, True))  # case M15

    def test_sync_keeps_the_error_of_a_failure(self):
        task_id = async_task("shop.hooks.fail", sync=True)
        self.assertFalse(fetch(task_id).success)
        self.assertIn("ValueError", result(task_id))

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
            self.assertLess(abs(made.next - start), dt.timedelta(seconds=1))
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
        self.assertEqual((made.next.hour, made.repeats), (3, 2))
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
        made = schedule("shop.hooks.multiply", 6, hook=hooks.remember, schedule_type="H")
        mill.schedules.run(made.name)
        self.run_jobs()
        self.assertEqual(hooks.seen, [("shop.hooks.multiply", True, 12, None)])

    def test_a_name_is_taken_once(self):
        schedule("shop.hooks.multiply", 1, name="one", schedule_type="H")
        with self.assertRaises(ScheduleExists):
            schedule("shop.hooks.multiply", 1, name="one", schedule_type="H")

    def test_schedule_objects_make_find_and_delete(self):
        objects = Schedule.objects
        hourly = {"func": "shop.hooks.multiply", "args": "2, 3", "schedule_type": Schedule.HOURLY}
        _, created = objects.get_or_create(name="a", defaults=hourly)
        _, again = objects.get_or_create(name="a", defaults=hourly)
        self.assertEqual((created, again), (True, False))
        daily = {"schedule_type": "D", "kwargs": "b=5", "args": "(4,)"}
        _, created = objects.update_or_create(name="a", defaults=daily)
        self.assertFalse(created)
        self.assertEqual(objects.get(name="a").when, mill.schedules.get("a").when)
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
            objects.get_or_create(schedule_type="H")

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
                worker_options(),
                {"-p": "4", "-c": "1", "--max-jobs": "500", "--max-memory": "100"},
            )

    def test_keys_without_meaning_are_warned_of(self):
        given = {"bulk": 10, "poll": 1, "sqs": {}, "wrokers": 3, "timeout": 9}
        with self.settings(Q_CLUSTER=given):
            warnings = [message for message in check_settings() if message.id == "tidemill.W002"]
        self.assertEqual(len(warnings), 4)
        self.assertIn("Q_CLUSTER['bulk'] has no meaning here", warnings[0].msg)
        self.assertIn("a put wakes a worker", warnings[1].hint)
        call_command("check")
