"""The admin: jobs, queues, schedules and workers, with Django's permissions."""

import html
import re

from django.contrib.admin.models import ADDITION, CHANGE, DELETION, LogEntry
from django.contrib.auth.models import Permission, User
from django.urls import reverse
from shop import tasks
from shop.models import Order

from tidemill import State
from tidemill.django import mill
from tidemill.django.testing import TidemillTestCase
from tidemill.testing import worker


# case D3
class Admin(TidemillTestCase):
    def setUp(self):
        super().setUp()
        for each in list(mill.schedules):
            mill.schedules.remove(each.name)
        self.client.force_login(User.objects.create_superuser("root"))

    def page(self, kind, name="", **query):
        if name:
            return self.client.get(reverse(f"admin:tidemill_{kind}_change", args=[name]), query)
        return self.client.get(reverse(f"admin:tidemill_{kind}_changelist"), query)

    def act(self, kind, action, *names, page="", **more):
        url = reverse(f"admin:tidemill_{kind}_changelist")
        if page:
            url = reverse(f"admin:tidemill_{kind}_change", args=[page])
        data = {"action": action, "selected": names, "sure": "1", **more}
        return self.client.post(url, data, follow=True)

    def login_as(self, *permissions):
        user = User.objects.create_user(f"staff{User.objects.count()}", is_staff=True)
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        self.client.force_login(user)

    def test_the_index_lists_the_pages(self):
        answer = self.client.get(reverse("admin:index"))
        for kind in ("job", "queue", "schedule", "owner"):
            self.assertContains(answer, reverse(f"admin:tidemill_{kind}_changelist"))
        self.assertContains(answer, "Workers")

    def test_jobs_are_listed_filtered_and_searched(self):
        tasks.write_order.enqueue("a note")
        tasks.add.enqueue(1, 2)
        failed = tasks.failing.enqueue()
        mill.job(failed.id).cancel()
        answer = self.page("job")
        self.assertContains(answer, "shop.tasks.write_order")
        self.assertContains(answer, "shop.tasks.add")
        for query, count in (
            ({"state": "cancelled"}, 1),
            ({"state": "ready"}, 2),
            ({"task": "shop.tasks.add"}, 1),
            ({"text": "a note"}, 1),
            ({"queue": "nowhere"}, 0),
            ({"id": failed.id}, 1),
        ):
            with self.subTest(query):
                self.assertEqual(len(self.page("job", **query).context["jobs"]), count)
        self.assertContains(self.page("job", state="nothing"), "State must be one of")

    def test_a_long_list_has_pages(self):
        tasks_made = [tasks.noop.enqueue().id for _ in range(130)]
        first = self.page("job")
        after = self.client.get(f"{first.request['PATH_INFO']}?{first.context['older']}")
        shown = [row["id"] for row in [*first.context["jobs"], *after.context["jobs"]]]
        self.assertEqual(shown, tasks_made[::-1])
        self.assertNotIn("older", after.context)

    def test_a_job_shows_its_trail_and_its_traceback(self):
        result = tasks.with_options.enqueue(True)
        self.run_jobs(scheduled=True)
        answer = self.page("job", result.id)
        self.assertContains(answer, "Attempt 3")
        self.assertContains(answer, "started attempt 2 of 3")
        self.assertContains(answer, "RuntimeError: attempt 2")
        self.assertContains(answer, "mail")
        self.assertEqual(self.page("job", "no-such-job").status_code, 404)

    def test_text_of_jobs_is_escaped(self):
        job = tasks.write_order.enqueue("<script>alert(1)</script>")
        for answer in (self.page("job"), self.page("job", job.id)):
            self.assertNotContains(answer, "<script>alert(1)")
            self.assertContains(answer, "&lt;script&gt;alert(1)")

    def test_a_failed_job_is_retried_and_a_waiting_one_cancelled(self):
        failed, waiting = tasks.failing.enqueue(), tasks.noop.using(run_after=_hour()).enqueue()
        self.run_jobs()
        self.assertContains(self.act("job", "retry", failed.id), "Retried 1 of 1 job.")
        self.assertIs(mill.job(failed.id).state, State.READY)
        answer = self.act("job", "cancel", waiting.id, page=waiting.id)
        self.assertContains(answer, "Asked 1 of 1 job to stop.")
        self.assertIs(mill.job(waiting.id).state, State.CANCELLED)
        self.act("job", "delete", waiting.id, failed.id)
        self.assertEqual(list(mill.jobs()), [])

    def test_queues_are_paused_resumed_and_purged(self):
        tasks.noop.enqueue()
        self.assertContains(self.page("queue"), "default")
        self.act("queue", "pause", "default")
        self.assertTrue(mill.queues()[0].paused)
        self.assertContains(self.page("queue"), "paused")
        self.act("queue", "resume", "default")
        self.assertFalse(mill.queues()[0].paused)
        self.assertContains(self.act("queue", "purge", "default"), "Purged 1 job.")
        self.assertEqual(mill.queues()[0].ready, 0)
        self.assertContains(self.act("queue", "restore", "default"), "Restored 1 job.")
        self.assertEqual(mill.queues()[0].ready, 1)
        self.assertContains(self.act("queue", "restore", "default"), "Restored 0 jobs.")

    def test_schedules_are_edited_and_run(self):
        mill.schedules.add("nightly", tasks.write_order.call("night"), cron="0 3 * * *")
        self.assertContains(self.page("schedule"), "0 3 * * *")
        self.act("schedule", "run", "nightly")
        self.run_jobs()
        (job,) = mill.jobs(state="succeeded")
        self.assertEqual(job.record.envelope.planned.schedule, "nightly")
        self.act("schedule", "edit", "nightly", page="nightly", cron="30 4 * * *", stay="1")
        changed = mill.schedules.get("nightly")
        self.assertEqual((changed.next.hour, changed.next.minute), (4, 30))
        self.assertEqual(changed.arguments, "'night'")
        self.act("schedule", "edit", "nightly", page="nightly", every="15 minutes", stay="1")
        self.assertContains(self.page("schedule", "nightly"), "15 minutes")
        wrong = self.act("schedule", "edit", "nightly", page="nightly", cron="99 * * * *", stay="1")
        self.assertContains(wrong, "cron")
        for names in ((), ("nightly", "other")):
            self.assertLess(self.act("schedule", "edit", *names, every="1 day").status_code, 500)
        self.assertContains(self.page("schedule", "nightly"), "15 minutes")
        self.act("schedule", "pause", "nightly")
        self.assertTrue(mill.schedules.get("nightly").paused)
        self.act("schedule", "resume", "nightly")
        self.act("schedule", "remove", "nightly")
        self.assertEqual(list(mill.schedules), [])

    def add(self, store="", **given):
        url = reverse("admin:tidemill_schedule_add")
        return self.client.post(f"{url}?store={store}" if store else url, given, follow=True)

    def test_a_schedule_is_added(self):
        self.assertContains(self.page("schedule"), reverse("admin:tidemill_schedule_add"))
        form = self.client.get(reverse("admin:tidemill_schedule_add"))
        self.assertContains(form, '<option value="shop.tasks.write_order">')
        self.assertContains(form, 'value="America/Chicago"')
        answer = self.add(
            name="nightly",
            task="shop.tasks.write_order",
            queue="slow",
            arguments='["night"]',
            cron="30 4 * * *",
            zone="Europe/Berlin",
        )
        self.assertContains(answer, "The schedule nightly is added.")
        self.assertContains(answer, "30 4 * * *")
        made = mill.schedules.get("nightly")
        self.assertEqual((made.next.hour, made.next.minute, made.queue), (4, 30, "slow"))
        self.assertEqual(made.next.tzinfo.key, "Europe/Berlin")
        mill.schedules.run("nightly")
        self.run_jobs()
        self.assertEqual(Order.objects.get().note, "night")

    def test_a_schedule_is_added_for_each_kind_of_time_and_task(self):
        for number, times in enumerate(
            ({"every": "15 minutes"}, {"every": "1 day", "repeats": "3"}, {"at": "2126-05-04 3:00"})
        ):
            with self.subTest(times):
                name = f"schedule-{number}"
                kwargs = {"keywords": '{"note": "x"}', "zone": "Europe/Berlin"}
                self.add(name=name, task="shop.tasks.write_order", **kwargs, **times)
                self.assertIsNotNone(mill.schedules.get(name).next)
        self.add(name="framework", task="shop.tasks.add", arguments="[1, 2]", every="1 hour")
        job = mill.schedules.run("framework")
        self.run_jobs()
        self.assertEqual(job.result(), 3)

    def test_a_form_with_a_mistake_says_so_and_keeps_the_values(self):
        mill.schedules.add("taken", tasks.write_order.call("x"), every=60)
        good = {"name": "new", "task": "shop.tasks.write_order", "every": "1 day"}
        good["arguments"] = '["kept"]'
        for bad, said in (
            ({"name": "taken"}, "There is a schedule &#x27;taken&#x27; already"),
            ({"name": ""}, "This field is required."),
            ({"task": "shop.tasks.nothing"}, "shop.tasks.nothing"),
            ({"arguments": "night"}, "Enter a valid JSON."),
            ({"arguments": '{"a": 1}'}, "This must be a list in JSON."),
            ({"keywords": "[1]"}, "This must be an object in JSON."),
            ({"keywords": '{"nothing": 1}'}, "nothing"),
            ({"cron": "0 3 * * *"}, "not both cron= and every="),
            ({"every": ""}, "takes one of cron=, every= and at="),
            ({"every": "", "at": "2001-01-01 0:00"}, "would never fire"),
            ({"zone": "Mars/Olympus"}, "is no time zone"),
        ):
            with self.subTest(bad):
                answer = self.add(**{**good, **bad})
                self.assertContains(answer, said)
                self.assertContains(answer, "Correct the errors below.")
                self.assertContains(answer, 'value="shop.tasks.')
        self.assertEqual([each.name for each in mill.schedules], ["taken"])

    def test_a_schedule_is_added_to_the_store_that_is_shown(self):
        from shop.framework import task_backends

        second = task_backends["second"].mill
        self.addCleanup(second.schedules.remove, "there")
        self.add("second", name="there", task="shop.tasks.on_second", every="1 day")
        self.assertEqual([each.name for each in second.schedules], ["there"])
        self.assertEqual(list(mill.schedules), [])

    def test_adding_needs_its_permission(self):
        url = reverse("admin:tidemill_schedule_add")
        self.login_as("view_schedule", "change_schedule")
        self.assertNotContains(self.page("schedule"), url)
        self.assertEqual(self.client.get(url).status_code, 403)
        self.assertEqual(self.add(name="x", every="1 day").status_code, 403)
        self.login_as("view_schedule", "add_schedule")
        self.assertContains(self.page("schedule"), url)
        self.assertEqual(self.client.get(url).status_code, 200)

    def test_times_that_code_declares_are_not_edited(self):
        mill.schedule("declared", tasks.sleep_for.call(0), every=3600)
        self.addCleanup(mill.runtime.code_schedules._declared.clear)
        self.run_jobs()  # its worker stores the schedules
        answer = self.act("schedule", "edit", "declared", page="declared", every="1 day", stay="1")
        self.assertContains(answer, "Code declares the schedule")

    def test_workers_are_listed(self):
        self.assertContains(self.page("owner"), "No worker is running.")
        with worker(mill):
            self.assertContains(self.page("owner"), "testing")

    def test_other_stores_are_shown_too(self):
        result = tasks.on_second.enqueue()
        self.assertContains(self.page("job", store="second"), "shop.tasks.on_second")
        self.assertNotContains(self.page("job"), "shop.tasks.on_second")
        self.assertEqual(self.page("job", store="third").status_code, 404)
        self.assertIsNotNone(result.id)

    def test_a_second_page_asks_before_jobs_are_deleted(self):
        job = tasks.noop.enqueue()
        for kind, action, name in (("job", "delete", job.id), ("queue", "purge", "default")):
            answer = self.act(kind, action, name, sure="")
            self.assertContains(answer, "No, take me back")
            self.assertContains(answer, f'name="selected" value="{name}"')
        self.assertEqual(mill.queues()[0].ready, 1)
        self.assertEqual(LogEntry.objects.count(), 0)

    def test_actions_are_written_to_the_history_of_the_admin(self):
        job = tasks.noop.enqueue()
        self.act("queue", "pause", "default")
        self.add(name="a_b", task="shop.tasks.add", arguments="[1, 2]", every="1 hour")
        self.assertContains(self.client.get(LogEntry.objects.latest("pk").get_admin_url()), "a_b")
        self.act("job", "delete", job.id)
        entries = LogEntry.objects.order_by("pk").values_list("object_id", "action_flag")
        expected = [("default", CHANGE), ("a_b", ADDITION), (job.id, DELETION)]
        self.assertEqual([*entries], expected)
        self.assertContains(self.client.get(reverse("admin:index")), job.id)

    def test_all_jobs_of_a_search_are_cancelled_after_a_question(self):
        kept = tasks.add.enqueue(1, 2)
        ids = [tasks.write_order.enqueue(f"note {n}").id for n in range(103)]
        url = reverse("admin:tidemill_job_changelist") + "?task=shop.tasks.write_order"
        self.assertContains(self.client.get(url), 'name="everything"')
        data = {"action": "cancel", "everything": "on"}
        asked = self.client.post(url, data)
        self.assertContains(asked, "Cancel 103 jobs?")
        self.assertContains(asked, "and 3 more")
        self.assertEqual(mill.job(ids[0]).state, "ready")
        answer = self.client.post(url, {**data, "sure": "1"}, follow=True)
        self.assertContains(answer, "Asked 103 of 103 jobs to stop.")
        self.assertEqual({mill.job(each).state for each in ids}, {"cancelled"})
        self.assertEqual(mill.job(kept.id).state, "ready")
        entry = LogEntry.objects.get()
        self.assertEqual(entry.object_repr, "all that match: task=shop.tasks.write_order")

    def test_only_jobs_that_changed_are_in_the_history_of_the_admin(self):
        done, waiting = tasks.add.enqueue(1, 2), tasks.add.enqueue(3, 4)
        mill.job(done.id).cancel()
        self.act("job", "cancel", done.id, waiting.id)
        self.assertEqual([entry.object_id for entry in LogEntry.objects.all()], [waiting.id])

    def test_a_search_with_a_mistake_changes_nothing(self):
        tasks.add.enqueue(1, 2)
        url = reverse("admin:tidemill_job_changelist") + "?state=bogus"
        data = {"action": "cancel", "everything": "on", "sure": "1"}
        self.assertContains(self.client.post(url, data, follow=True), "bogus")
        self.assertEqual(LogEntry.objects.count(), 0)

    def test_an_action_that_fails_midway_is_in_the_history_as_far_as_it_came(self):
        mill.schedules.add("a", mill.call("shop.tasks.noop"), every=3600)
        answer = self.act("schedule", "pause", "a", "gone")
        self.assertContains(answer, "paused. Then: there is no schedule")
        self.assertEqual([entry.object_id for entry in LogEntry.objects.all()], ["a"])

    def test_the_page_of_a_job_leads_back_to_the_search(self):
        job = tasks.add.enqueue(1, 2)
        found = self.page("job", state="ready", queue="default")
        link = re.search(r'href="([^"]*/change/[^"]*)"', found.content.decode())[1]
        one = self.client.get(html.unescape(link))
        back = reverse("admin:tidemill_job_changelist") + "?state=ready&amp;queue=default"
        self.assertContains(one, f'href="{back}"')
        answer = self.client.post(html.unescape(link), {"action": "cancel", "selected": job.id})
        self.assertEqual(answer["Location"], html.unescape(back))

    def test_permissions_are_kept(self):
        job = tasks.noop.enqueue()
        self.login_as()
        self.assertEqual(self.page("job").status_code, 403)
        self.login_as("view_job")
        self.assertNotContains(self.page("job"), "Retry")
        self.assertEqual(self.page("queue").status_code, 403)
        for action in ("retry", "cancel", "delete"):
            self.assertEqual(self.act("job", action, job.id).status_code, 403)
        self.login_as("view_job", "change_job")
        self.assertEqual(self.act("job", "cancel", job.id).status_code, 200)
        self.assertEqual(self.act("job", "delete", job.id).status_code, 403)
        self.login_as("view_job", "delete_job")
        self.assertEqual(self.act("job", "delete", job.id).status_code, 200)
        self.assertEqual(list(mill.jobs()), [])
        self.client.logout()
        self.assertEqual(self.page("job").status_code, 302)

    def test_a_form_without_its_token_is_refused(self):
        from django.test import Client

        strict = Client(enforce_csrf_checks=True)
        strict.force_login(User.objects.get(username="root"))
        url = reverse("admin:tidemill_job_changelist")
        self.assertEqual(strict.post(url, {"action": "delete"}).status_code, 403)


def _hour():
    import datetime as dt

    return dt.timedelta(hours=1)
