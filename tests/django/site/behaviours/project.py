"""The setting TIDEMILL, system checks, tasks of tidemill, model instances, the command."""

import contextlib
import copy
import io
import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from unittest import mock

from asgiref.sync import async_to_sync
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.core.management.base import SystemCheckError
from django.db import connection
from django.test import SimpleTestCase
from django.utils import timezone
from shop import tasks
from shop.hooks import multiply
from shop.models import Customer, Order

from tidemill import State, Tidemill, this_job
from tidemill.django import mill
from tidemill.django.checks import check_settings, problems
from tidemill.django.connections import fresh_connections
from tidemill.django.management.commands.tidemill import APP, arguments_of
from tidemill.django.project import DjangoMill
from tidemill.django.settings import read_settings
from tidemill.django.testing import TidemillTestCase, _connections_shared, immediate, run_jobs
from tidemill.errors import CodecError
from tidemill.server.http.backend import Backend
from tidemill.server.settings import Settings as ServerSettings
from tidemill.worker.child_protocol import hello_of
from tidemill.worker.settings import Settings as WorkerSettings
from tidemill.worker.supervisor import Start


class Settings(SimpleTestCase):
    def errors(self, given):
        return [f"{message.id}: {message.msg}" for message in problems(given, "TIDEMILL")]

    def test_good_settings_have_no_problems(self):
        for good in ({}, {"URL": "lmdb://./x", "RETRIES": 3, "ENQUEUE_ON_COMMIT": "other"}):
            self.assertEqual(self.errors(good), [])

    def test_each_mistake_has_one_sentence(self):
        for bad, said in (
            ({"URLS": "x"}, "E001: TIDEMILL: TIDEMILL has no key 'URLS'; did you mean 'URL'?"),
            ({"url": "lmdb://x"}, "TIDEMILL has no key 'url'"),
            ({"URL": "lmbd://x"}, "no broker for lmbd:// in url 'lmbd://x'; did you mean 'lmdb'?"),
            ({"URL": "django://defalt"}, "E002: TIDEMILL['URL'] names the database 'defalt'"),
            ({"URL": "memory://"}, "W001"),
            ({"URL": "django://default"}, "W004: TIDEMILL['URL'] keeps the jobs in the SQLite"),
            ({"RETRIES": -1}, "retries"),
            ({"ENQUEUE_ON_COMMIT": "nowhere"}, "names no database 'nowhere'"),
            ({"JOIN_ATOMIC": "default"}, "E003: TIDEMILL['JOIN_ATOMIC'] needs a store in Post"),
            (
                {"JOIN_ATOMIC": "default", "URL": "postgresql://localhost/x"},
                "E004: TIDEMILL['JOIN_ATOMIC'] names 'default', which is no PostgreSQL database",
            ),
            ({"MIDDLEWARE": ["shop.nothing"]}, "TIDEMILL['MIDDLEWARE']"),
            ([], "TIDEMILL must be a dict, not list"),
        ):
            with self.subTest(bad):
                (error,) = self.errors(bad)
                self.assertIn(said, error)

    def test_a_store_in_sqlite_needs_immediate_transactions(self):  # case M15
        databases = copy.deepcopy(settings.DATABASES)
        databases["default"]["OPTIONS"]["transaction_mode"] = "IMMEDIATE"
        with self.settings(DATABASES=databases):
            self.assertEqual(self.errors({"URL": "django://default"}), [])

    def test_the_system_checks_report_them(self):
        with self.settings(TIDEMILL={"URLS": "x"}), self.assertRaises(SystemCheckError):
            call_command("check")
        second = {"BACKEND": "tidemill.django.TaskBackend", "OPTIONS": {"URL": "nothing://"}}
        said = self.assertRaisesMessage(SystemCheckError, "TASKS['second']['OPTIONS']")
        with self.settings(TASKS={"second": second}), said:
            call_command("check")

    def test_an_old_django_is_warned_of(self):
        for version, ids in (((5, 1, 9), ["tidemill.W005"]), ((5, 2), [])):
            with mock.patch("django.VERSION", version):
                self.assertEqual([warning.id for warning in check_settings()], ids)

    def test_a_wrong_setting_is_an_error_at_its_first_use(self):
        with self.assertRaises(ImproperlyConfigured):
            read_settings({"URLS": "x"})

    def test_the_import_opens_no_store(self):
        code = (
            "import django; django.setup(); import shop.tasks; from tidemill.django import mill;"
            "print(mill.runtime._broker)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "DJANGO_SETTINGS_MODULE": "project.settings"},
        )
        self.assertEqual(done.stdout.strip(), "None")

    def test_the_app_is_a_tidemill_with_the_options(self):
        app = DjangoMill(read_settings({"URL": "lmdb://./y", "RETRIES": 7, "TIMEOUT": 5}))
        self.assertIsInstance(app, Tidemill)
        self.assertEqual(
            (app.runtime.defaults.retries.max_attempts, app.runtime.defaults.timeout), (8, 5)
        )
        self.assertEqual(app.url, "memory://")  # while tests run
        self.assertEqual(app.runtime.settings.url, "lmdb://./y")

    def test_middleware_and_sync_are_settings(self):
        self.assertTrue(DjangoMill(read_settings({"SYNC": True})).sync)
        app = DjangoMill(read_settings({"MIDDLEWARE": ["shop.hooks.around"]}))
        self.addCleanup(app.close)
        task = app.task(name="double")(multiply)
        job = task.enqueue(4)
        run_jobs(app)
        self.assertEqual(job.result(), ["double", 8])


class Tasks(TidemillTestCase):
    def test_a_worker_finds_the_tasks_of_all_apps_and_no_other_function(self):
        app = DjangoMill(read_settings({"ALLOW_IMPORTS": ["math.*"]}))
        app.runtime.find_in_apps()
        settings = WorkerSettings(app="tidemill.django.worker:mill")
        banner = Start("w", "lmdb://x", settings, hello_of(app.runtime)).banner()
        self.assertRegex(banner, r"by name: math\.\*, tasks in the modules of \d packages\n")
        self.assertIsNone(app.runtime.find_task("shop.hooks.multiply"))
        self.assertIsNotNone(app.runtime.find_task("math.hypot"))

    def test_tasks_take_types_that_json_lacks(self):
        now = timezone.now()
        job = tasks.rich.enqueue(now, b"raw")
        self.run_jobs()
        self.assertEqual(job.result(), now)

    def test_a_task_writes_in_the_transaction_of_the_test(self):
        job = tasks.write_order.enqueue("new")
        self.run_jobs()
        self.assertEqual(Order.objects.get(pk=job.result()).note, "new")

    def test_a_call_by_name_finds_a_module_of_the_project(self):
        self.assertNotIn("project.more", sys.modules)
        job = mill.enqueue("project.more.far")
        run_jobs()
        self.assertEqual(job.result(), "far")

    def test_a_module_that_only_workers_can_import_takes_calls_by_name(self):
        job = mill.enqueue(mill.call("project.apart.far").using(queue="far"))
        self.assertEqual(job.state, State.READY)

    def test_an_event_loop_imports_no_module_for_a_call_by_name(self):
        call = mill.call("project.script.far").using(queue="far")
        job = async_to_sync(mill.aenqueue)(call)
        self.assertEqual(job.state, State.READY)

    def test_a_job_server_imports_no_module_for_a_call_by_name(self):
        with mock.patch.object(mill.runtime, "imports_tasks", mill.runtime.imports_tasks):
            Backend(mill, ServerSettings())
            job = mill.enqueue(mill.call("project.script.far").using(queue="far"))
        self.assertEqual(job.state, State.READY)
        self.assertNotIn("project.script", sys.modules)

    def test_jobs_run_at_once_inside_immediate(self):
        with immediate():
            job = tasks.write_order.enqueue("now")
        self.assertEqual(Order.objects.get(pk=job.result()).note, "now")
        self.assertEqual(list(mill.jobs()), [])

    def test_jobs_run_at_once_while_a_test_overrides_sync(self):  # case M15
        with self.settings(TIDEMILL={"SYNC": True}):
            tasks.write_order.enqueue("now")
        self.assertEqual([order.note for order in Order.objects.all()], ["now"])
        for other in (None, {"RETRIES": 1}):
            with self.settings(TIDEMILL=other):
                self.assertEqual(tasks.orders_are_counted.enqueue().state, State.READY)

    def test_jobs_at_once_read_the_rows_of_the_test(self):  # case M15
        Order.objects.create()
        for task in (tasks.count_orders_async, tasks.orders_are_counted):
            with self.subTest(task), immediate():
                self.assertEqual(mill.job(task.enqueue().id).result(), 1)

    async def test_jobs_at_once_read_the_rows_of_the_test_for_asyncio(self):  # case M15
        await Order.objects.acreate()
        for task in (tasks.count_orders, tasks.count_orders_async, tasks.orders_are_counted):
            with self.subTest(task), immediate():
                self.assertEqual(await mill.job((await task.aenqueue()).id), 1)
                self.assertIsNone(this_job(None))  # the job has ended

    async def test_a_put_that_is_not_awaited_runs_its_job_as_well(self):  # case M15
        await Order.objects.acreate()
        both = tasks.count_orders, tasks.count_orders_async
        for task in (*both, tasks.orders_are_counted, tasks.count_orders_by_a_job):
            with self.subTest(task), immediate():
                self.assertEqual(await mill.job(task.enqueue().id), 1)

    def test_a_model_instance_travels_by_its_key(self):
        order = Order.objects.create(note="before")
        job = tasks.note_of.enqueue(order)
        Order.objects.update(note="after")
        self.run_jobs()
        self.assertEqual(job.result(), "after")

    def test_an_instance_is_read_by_one_query(self):
        order = Order.objects.create(note="x")
        argument = tasks.note_of.arguments.bind([{"pk": order.pk, "using": "default"}], {})[0][0]
        self.assertIs(type(argument), Order)
        self.assertEqual(argument, order)
        with self.assertNumQueries(1):
            self.assertEqual((argument.note, argument.pk), ("x", order.pk))

    def test_an_instance_that_is_gone_does_not_exist(self):
        order = Order.objects.create(note="before")
        job = tasks.note_of.enqueue(order)
        Order.objects.all().delete()
        self.run_jobs()
        self.assertIn("DoesNotExist", job.error)

    def test_an_instance_that_is_not_saved_is_refused(self):
        with self.assertRaisesMessage(CodecError, "this Order has no key yet; save it before"):
            tasks.note_of.enqueue(Order())

    def test_other_models_are_refused_with_the_remedy(self):
        with self.assertRaisesMessage(CodecError, "pass its key, and load the object in the task"):
            tasks.name_of.enqueue(Customer.objects.create(name="Ada"))


class Connections(TidemillTestCase):
    def test_a_job_that_outlives_the_run_leaves_the_connection_of_the_test_alone(self):
        # given a job that a timeout interrupts, and whose thread ends after run_jobs has returned
        begun, over = threading.Event(), threading.Event()

        def interrupted():
            begun.set()
            over.wait(60)
            raise SystemExit

        def run():
            with contextlib.suppress(SystemExit):
                fresh_connections(interrupted, SimpleNamespace(token=1))

        thread = threading.Thread(target=run)
        with _connections_shared():
            thread.start()
            begun.wait(60)
        # when its thread ends
        over.set()
        thread.join()
        # then the transaction of the test is as before
        self.assertTrue(connection.in_atomic_block)
        self.assertEqual(Order.objects.count(), 0)


class SetUpWithoutTheBase(TidemillTestCase):
    def setUp(self):
        """Make what the tests need; Django asks for no call of the base."""

    def test_the_store_is_empty_before_a_first_test(self):
        self.assertEqual(list(mill.jobs()), [])
        tasks.noop.enqueue()

    test_the_store_is_empty_before_a_second_test = test_the_store_is_empty_before_a_first_test


class Command(TidemillTestCase):
    def test_verbs_run_with_the_projects_app(self):
        tasks.noop.enqueue()
        for verb in (["queues"], ["jobs"]):
            out = io.StringIO()
            with self.assertRaises(CommandError):  # memory:// is for this process alone
                call_command("tidemill", *verb, "--json", stdout=out)
        self.assertFalse(mill.runtime.reading)

    def test_help_lists_the_verbs(self):
        out = io.StringIO()
        call_command("tidemill", stdout=out)
        self.assertIn("worker", out.getvalue())

    def test_help_of_a_worker_is_about_this_command(self):
        out = io.StringIO()
        call_command("tidemill", "worker", "--help", stdout=out)
        self.assertIn("Usage: manage.py tidemill worker", out.getvalue())
        self.assertIn("--noreload", out.getvalue())

    def test_worker_and_server_get_the_app(self):
        self.assertEqual(arguments_of(["worker", "-p", "2"], APP), ["worker", APP, "-p", "2"])
        self.assertEqual(arguments_of(["server"], APP), ["server", APP])
        self.assertEqual(
            arguments_of(["server", "--port", "1", "--workers"], APP),
            ["server", "--port", "1", "--workers", APP],
        )

    def test_a_worker_reloads_in_development(self):
        with self.settings(DEBUG=True):
            self.assertEqual(arguments_of(["worker"], APP), ["worker", APP, "--reload"])
            self.assertEqual(arguments_of(["worker", "--noreload"], APP), ["worker", APP])

    def test_an_unknown_verb_is_an_error(self):
        with self.assertRaises(CommandError):
            call_command("tidemill", "wroker")
