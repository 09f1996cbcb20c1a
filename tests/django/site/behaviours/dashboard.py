"""The dashboard under a URL of the project."""

import asyncio
import re
from unittest import mock

from django.contrib.auth.models import Permission, User
from django.core.handlers.asgi import ASGIHandler
from django.test import SimpleTestCase
from shop import tasks

from tidemill.dashboard.dashboard import Dashboard as Pages
from tidemill.dashboard.http import LongResponse
from tidemill.dashboard.roles import Role
from tidemill.django import mill
from tidemill.django.dashboard import role_of, view
from tidemill.django.testing import TidemillTestCase

OPERATOR = ("view_job", "change_job", "delete_job", "change_queue", "change_schedule")


class Dashboard(TidemillTestCase):
    def user(self, *permissions, **more):
        user = User.objects.create_user(f"user{User.objects.count()}", **more)
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        return User.objects.get(pk=user.pk)

    def send(self, path, site="same-origin"):
        """Send a form from a page of a site, and return the status of the answer."""
        return self.client.post(path, headers={"Sec-Fetch-Site": site}).status_code

    def test_the_pages_show_the_project(self):
        tasks.add.enqueue(1, 2)
        self.client.force_login(User.objects.create_superuser("root"))
        for path in ("/tidemill/", "/tidemill/queues"):
            answer = self.client.get(path)
            self.assertEqual(answer.status_code, 200, path)
        self.assertContains(answer, "/tidemill/queues/default")
        style = re.search(r'href="(/tidemill/static/[^"]+\.css[^"]*)"', answer.content.decode())
        self.assertEqual(self.client.get(style[1]).status_code, 200)

    def test_a_form_has_a_length_that_is_a_number(self):
        self.client.force_login(User.objects.create_superuser("root"))
        for length in ("-1", "many", "9" * 30):
            answer = self.client.post("/tidemill/queues", CONTENT_LENGTH=length)
            self.assertEqual(answer.status_code, 413, length)

    def test_a_stranger_logs_in_first(self):
        answer = self.client.get("/tidemill/jobs")
        self.assertRedirects(answer, "/admin/login/?next=/tidemill/jobs")
        self.client.force_login(self.user())
        self.assertEqual(self.client.get("/tidemill/").status_code, 403)

    def test_roles_follow_the_permissions(self):
        viewer = self.user("view_job", is_staff=True)
        operator = self.user(*OPERATOR, is_staff=True)
        for user, role in (
            (self.user("view_job"), None),
            (self.user(is_staff=True), None),
            (viewer, Role.VIEWER),
            (self.user("view_job", "change_job", is_staff=True), Role.VIEWER),
            (operator, Role.OPERATOR),
            (User.objects.create_superuser("root"), Role.ADMIN),
            # the model of a project that has no more than the admin needs
            (mock.Mock(["is_active", "is_staff", "has_perm"]), Role.ADMIN),
        ):
            self.assertIs(role_of(user), role)

    def test_a_form_acts_from_its_site_and_with_its_role(self):
        tasks.add.enqueue(1, 2)
        path = "/tidemill/queues/default"
        self.client.force_login(self.user(*OPERATOR, is_staff=True))
        self.assertEqual(self.client.post(f"{path}/pause").status_code, 403)
        self.assertEqual(self.send(f"{path}/pause", "cross-site"), 403)
        self.assertFalse(mill.queues()[0].paused)
        self.assertEqual(self.send(f"{path}/pause"), 303)
        self.assertContains(self.client.get(path), "is paused: running")  # by a signed cookie
        self.assertTrue(mill.queues()[0].paused)
        self.client.force_login(self.user("view_job", is_staff=True))
        self.assertEqual(self.send(f"{path}/resume"), 403)
        self.assertTrue(mill.queues()[0].paused)

    def test_a_task_in_a_module_that_is_not_imported_is_no_alarm(self):
        for path in ("project.apart.far", "shop.tasks.lost"):
            mill.schedules.add(path, mill.call(path).using(queue="q"), every=60)
        self.client.force_login(User.objects.create_superuser("root"))
        known = {"project.apart.far": True, "shop.tasks.lost": False}
        self.assertEqual({row.name: row.known for row in mill.schedules}, known)
        answer = self.client.get("/tidemill/")
        self.assertContains(answer, "1 of 2 name a task that neither this app nor a worker has")

    def test_commands_are_those_of_the_project(self):
        tasks.add.enqueue(1, 2)
        self.client.force_login(User.objects.create_superuser("root"))
        self.assertContains(self.client.get("/tidemill/workers"), "manage.py tidemill worker")

    def test_an_export_has_all_jobs(self):
        for number in range(3):
            tasks.add.enqueue(number, 2)
        self.client.force_login(User.objects.create_superuser("root"))
        answer = self.client.get("/tidemill/jobs.json")
        self.assertTrue(answer.streaming)
        self.assertEqual(len(answer.getvalue().splitlines()), 3)


class Streams(SimpleTestCase):
    """A long answer under ASGI, without a database."""

    def setUp(self):
        self.made, self.closed = 0, False

    def body(self):
        try:
            while True:
                self.made += 1
                yield b"x" * 1000
        finally:
            self.closed = True

    async def read(self, count):
        """Read some parts of an answer without an end, and go away."""
        handler, gone, parts = ASGIHandler(), asyncio.Event(), []
        asked = iter([{"type": "http.request", "body": b""}])

        async def answer(request):
            request.user = User(username="root", is_superuser=True, is_staff=True)
            return view(request, "jobs.json")

        async def receive():
            for message in asked:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if message.get("body"):
                parts.append(self.made)
                if len(parts) == count:
                    gone.set()
                    await asyncio.Event().wait()  # a reader who takes nothing more

        scope = {"type": "http", "method": "GET", "path": "/tidemill/jobs.json", "headers": []}
        response = LongResponse(self.body(), {}, "application/x-ndjson")
        with (
            mock.patch.object(handler, "get_response_async", answer),
            mock.patch.object(Pages, "handle", return_value=response),
        ):
            async with asyncio.timeout(30):
                await handler(scope, receive, send)
        return parts

    def test_an_answer_is_made_as_it_is_read_and_ends_with_its_reader(self):
        self.assertEqual(asyncio.run(self.read(3)), [1, 2, 3])
        self.assertTrue(self.closed)
