"""The verbs that change something: enqueue, retry, cancel, pause, resume, purge, backup."""

from __future__ import annotations

import json
import os
import pwd
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_store import Desk

import tidemill.cli.job_actions
import tidemill.cli.queues
from tidemill import InvalidOption, State, Tidemill, chain, group
from tidemill.brokers.generic.audit import notes
from tidemill.brokers.generic.notes import Notes
from tidemill.core.files import folder_mode
from tidemill.errors import StoreFull

pytestmark = pytest.mark.everyday


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.syspath_prepend(str(tmp_path))  # restores what --app adds to sys.path
    desk = Desk(tmp_path)
    yield desk
    desk.close()


class _Terminal:
    """Says that stdin is a terminal, and otherwise is what it stands for."""

    def __init__(self, module: object, monkeypatch: pytest.MonkeyPatch) -> None:
        import sys

        class Sys:
            stdin = self
            exit = staticmethod(sys.exit)

        monkeypatch.setattr(module, "sys", Sys)

    def isatty(self) -> bool:
        return True


# -- enqueue --------------------------------------------------------------------------------------


def test_arguments_are_json_where_they_parse(desk: Desk) -> None:
    # given
    app = desk.write_app()
    words = ["enqueue", "add", '[1, "x"]', "--kw", "b=a=b", "--app", app]
    # when
    result = desk.run(*words, url=False)
    # then
    assert result.exit_code == 0, result.output
    record = desk.mill.job(result.stdout.strip()).refresh()
    assert record.envelope.text == "[1, 'x'], b='a=b'"
    assert record.envelope.queue == "sums"


def test_options_reach_the_job(desk: Desk) -> None:
    options = [
        "--delay",
        "5 minutes",
        "--priority",
        "7",
        "--queue",
        "q2",
        "--key",
        "k",
        "--id",
        "mine",
    ]
    words = ["enqueue", "add", "1", *options, "--app", desk.write_app(), "--json"]
    document = json.loads(desk.run(*words, url=False).stdout)
    assert document == {"id": "mine", "placed": "created", "state": None, "result": None}
    public = desk.mill.job("mine").refresh().public()
    assert (public["state"], public["queue"], public["key"]) == ("scheduled", "q2", "k")
    assert public["priority"] == 7


def test_a_dotted_path_is_enqueued_when_the_app_allows_it(desk: Desk) -> None:
    app = desk.write_app()
    good = desk.run("enqueue", "math.copysign", "2", "--app", app, "--", "-3", url=False)
    assert good.exit_code == 0, good.output
    assert desk.mill.job(good.stdout.strip()).refresh().envelope.text == "2, -3"
    bad = desk.run("enqueue", "os.system", "ls", "--app", app, url=False)
    assert bad.exit_code == 2
    assert "allow_imports" in bad.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["add"], "missing"),
        (["add", "1", "2", "3"], "too many positional arguments"),
        (["add", "1", "--kw", "b"], "is not name=value"),
        (["add", "1", "--priority", "1000"], "priority must be"),
        (["add", "1", "--delay", "-1"], "delay must be"),
        (["add", "1", "--delay", "soon"], "delay 'soon' is no duration"),
    ],
)
def test_a_wrong_call_is_refused_at_once(desk: Desk, words: list[str], said: str) -> None:
    result = desk.run("enqueue", *words, "--app", desk.write_app(), url=False)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert "Traceback" not in result.output
    assert desk.mill.jobs().page().records == []


def test_without_an_app_nobody_checks_a_call_that_names_its_queue(desk: Desk) -> None:
    # given a store, and a worker's app that the shell knows nothing of
    desk.mill.queues()
    good = desk.run("enqueue", "add", "20", "--kw", "b=22", "--queue", "sums")
    lost = desk.run("enqueue", "no.such.task", "--queue", "lost")
    assert (good.exit_code, lost.exit_code) == (0, 0), good.output
    desk.work()
    assert desk.mill.job(good.stdout.strip()).result(timeout=5) == 42
    # then names and options are checked all the same
    for words, said in [
        (["addd"], "; did you mean 'add'? Else start its worker first"),
        (["no.such.task"], "'no.such.task' is no task of this app, and no worker on lmdb://"),
        (["a\tb"], "task 'a\\tb' contains a control"),
        (["add", "--priority", "1000"], "priority must be"),
        (["add", "--queue", ""], "queue must not be empty"),
    ]:
        result = desk.run("enqueue", *words)
        assert result.exit_code == 2, result.output
        assert said in result.stderr


def test_a_call_needs_a_store_that_others_see(desk: Desk, tmp_path: Path) -> None:
    result = desk.run("enqueue", "add", "--url", "memory://", url=False)
    assert result.exit_code == 1
    assert "needs the feature processes" in result.stderr
    (tmp_path / "app_inside.py").write_text(
        "from tidemill import Tidemill\nmill = Tidemill('memory://')\n"
        "@mill.task(name='add')\ndef add(): ...\n"
    )
    result = desk.run("enqueue", "add", "--app", f"{tmp_path}/app_inside.py", url=False)
    assert result.exit_code == 1
    assert "needs the feature processes" in result.stderr
    # a mistyped url makes no store where no worker would look
    result = desk.run("enqueue", "add", "--url", f"lmdb://{tmp_path}/stoer", url=False)
    assert result.exit_code == 3
    assert not (tmp_path / "stoer").exists()


def test_a_taken_id_is_refused(desk: Desk) -> None:
    # case Q13
    words = ["enqueue", "add", "1", "--id", "mine", "--app", desk.write_app()]
    assert desk.run(*words, url=False).exit_code == 0
    words[2] = "2"
    result = desk.run(*words, url=False)
    assert result.exit_code == 1
    assert "mine" in result.stderr


def test_waiting_in_vain_says_so(desk: Desk) -> None:
    words = ["enqueue", "add", "1", "--wait", "0.1", "--app", desk.write_app()]
    result = desk.run(*words, url=False)
    assert result.exit_code == 1
    [job] = desk.mill.jobs().page().records
    said = f"job {job.envelope.id} is still ready after 0.1 s: no worker serves queue 'sums' of"
    assert result.stderr.startswith(f"tidemill: {said} {desk.mill.broker.url}: start one with ")


# -- retry and cancel -----------------------------------------------------------------------------


def test_retry_by_id_and_by_filter(desk: Desk) -> None:
    # given three failures
    failed = [desk.bad.enqueue(str(n)) for n in range(3)]
    desk.work()
    # when one is retried by id
    assert desk.json("retry", failed[0].id) == {"retried": [failed[0].id], "refused": []}
    # then it alone is ready
    states = [desk.mill.job(job.id).state for job in failed]
    assert states == [State.READY, State.FAILED, State.FAILED]
    # and the rest by filter
    result = desk.run("retry", "--task", "bad", "--all")
    assert result.stdout == "retried 2 jobs\n"
    assert {desk.mill.job(job.id).state for job in failed} == {State.READY}


def test_a_refused_retry_says_why(desk: Desk) -> None:
    done = desk.add.enqueue(0)
    desk.work()
    job = desk.add.enqueue(1)
    result = desk.run("retry", job.id, done.id, "nothing")
    assert result.exit_code == 1
    assert f"not {job.id}: it is ready" in result.stderr
    assert f"not {done.id}: it succeeded already" in result.stderr
    assert "not nothing: no job has this id here" in result.stderr


def test_bulk_asks_first(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    job = desk.add.enqueue(1)
    # when nobody can be asked
    result = desk.run("cancel", "--queue", "sums")
    assert result.exit_code == 2
    assert "this would cancel 1 job; to go on add --all" in result.stderr
    # when somebody says no, then yes
    _Terminal(tidemill.cli.job_actions, monkeypatch)
    assert desk.run("cancel", "--queue", "sums", input="n\n").exit_code == 1
    assert desk.mill.job(job.id).state is State.READY
    assert desk.run("cancel", "--queue", "sums", input="y\n").exit_code == 0
    assert desk.mill.job(job.id).state is State.CANCELLED


@pytest.mark.parametrize("words", [["retry"], ["cancel"], ["cancel", "x", "--all"]])
def test_an_unclear_selection_of_jobs_is_wrong_usage(desk: Desk, words: list[str]) -> None:
    desk.add.enqueue(1)
    assert desk.run(*words).exit_code == 2


def test_cancel_before_the_start(desk: Desk) -> None:
    # case T14
    jobs = [desk.add.enqueue(n) for n in range(1200)]
    assert desk.run("cancel", "--all").stdout == "cancelled 1,200 jobs\n"
    desk.work()
    assert {job.state for job in jobs} == {State.CANCELLED}


# -- alter ----------------------------------------------------------------------------------------


def test_alter_by_id_and_by_filter(desk: Desk) -> None:
    # given
    jobs = [desk.add.enqueue(n) for n in range(3)]
    first = jobs[0].id
    # when
    assert desk.json("alter", first, "--to-priority", "5") == {"altered": [first], "refused": []}
    result = desk.run("alter", "--queue", "sums", "--to-queue", "slow", "--all")
    # then
    assert result.stdout == "altered 3 jobs\n"
    shown = [job.refresh().public() for job in jobs]
    assert [(it["queue"], it["priority"]) for it in shown] == [
        ("slow", 5),
        ("slow", 0),
        ("slow", 0),
    ]
    assert "altered: queue slow" in desk.run("job", first).stdout


def test_a_refused_alter_says_why(desk: Desk) -> None:
    done = desk.add.enqueue(0)
    desk.work()
    job = desk.add.enqueue(1)
    desk.mill.broker.set_queue("full", max_size=1)
    desk.mill.queue("full").put("x")
    result = desk.run("alter", done.id, job.id, "nothing", "--to-queue", "full")
    assert result.exit_code == 1
    assert f"not {done.id}: it succeeded already" in result.stderr
    assert f"not {job.id}: the queue 'full' is full (max_size)" in result.stderr
    assert "not nothing: no job has this id here" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "alter needs another priority, another queue, or both"),
        (["--to-priority", "101"], "priority must be a number from -100 to 100"),
        (["--to-queue", ""], "queue must not be empty"),
    ],
)
def test_alter_needs_a_target(desk: Desk, words: list[str], said: str) -> None:
    job = desk.add.enqueue(1)
    result = desk.run("alter", job.id, *words)
    assert result.exit_code == 2
    assert said in result.stderr


# -- queues ---------------------------------------------------------------------------------------


def test_token_create_and_revoke_print_documents(desk: Desk, tmp_path: Path) -> None:
    auth = ("--auth", str(tmp_path / "tokens.json"), "--json")
    words = ("token", "create", "shop", "--role", "viewer", "-Q", "orders", *auth)
    made = json.loads(desk.run(*words, url=False).stdout)
    assert made.pop("token")
    expected = {"name": "shop", "role": "viewer", "queues": ["orders"], "expires": None}
    assert made == expected
    gone = desk.run("token", "revoke", "shop", *auth, url=False)
    assert json.loads(gone.stdout) == {"revoked": "shop"}


def test_pause_and_resume(desk: Desk) -> None:
    job = desk.add.enqueue(1)
    assert desk.run("pause", "sums").stdout == "sums is paused\n"
    desk.work()
    assert job.state is State.READY
    assert "paused" in desk.run("queues").stdout
    assert desk.run("resume", "sums").stdout == "sums goes on\n"
    desk.work()
    assert job.state is State.SUCCEEDED


def test_a_queue_that_is_not_there(desk: Desk) -> None:
    desk.add.enqueue(1)
    for verb in ("resume", "purge"):
        result = desk.run(verb, "smus")
        assert result.exit_code == 1
        assert "no queue has the name 'smus' here; did you mean 'sums'?" in result.stderr


def test_purge_wants_the_name_typed(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    done = desk.add.enqueue(0)
    desk.work()
    desk.add.enqueue(1)
    desk.add.using(delay=60).enqueue(2)
    # when nobody can be asked
    refused = desk.run("purge", "sums", "--now")
    assert refused.exit_code == 2
    assert "this deletes 2 jobs for good; to go on add --yes" in refused.stderr
    way_back = "this deletes 2 jobs; 'tidemill restore sums' brings them back; to go on add --yes"
    assert way_back in desk.run("purge", "sums").stderr
    # when the name is typed wrong, then right
    _Terminal(tidemill.cli.queues, monkeypatch)
    assert desk.run("purge", "sums", "--now", input="sum\n").exit_code == 1
    assert len(desk.mill.jobs().page().records) == 3
    purged = desk.run("purge", "sums", "--now", input="sums\n")
    assert "deleted 2 jobs of sums\n" in purged.stdout
    assert "for good" in purged.stderr
    # then what had finished is still there
    assert [record.envelope.id for record in desk.mill.jobs().page().records] == [done.id]


def test_purge_without_asking(desk: Desk) -> None:
    desk.add.enqueue(1)
    told = desk.json("purge", "sums", "--yes", "--now")
    assert told == {"queue": "sums", "deleted": 1, "kept": 0, "purge": None}


def test_a_purge_is_listed_and_restored(desk: Desk) -> None:
    desk.add.enqueue(1)
    first = desk.json("purge", "sums", "--yes")
    assert (first["deleted"], first["kept"]) == (1, 1)
    desk.add.enqueue(2)
    desk.add.enqueue(3)
    purged = desk.run("purge", "sums", "--yes").stdout
    assert purged == "deleted 2 jobs of sums; to bring them back: tidemill restore sums\n"

    listed = desk.json("purges", "sums")["purges"]
    assert [row["jobs"] for row in listed] == [2, 1]
    assert listed[1]["id"] == first["purge"]
    assert first["purge"] in desk.run("purges", "sums").stdout

    assert desk.run("restore", "sums").stdout == "restored 2 jobs of sums\n"
    restored = desk.json("restore", "sums", first["purge"])
    assert restored == {"queue": "sums", "restored": 1, "left": 0}
    assert "no purge of sums can be restored" in desk.run("purges", "sums").stdout
    again = desk.run("restore", "sums")
    assert again.exit_code == 1
    assert "no purge of queue 'sums' can be restored" in again.stderr
    assert desk.mill.queues()[0].ready == 3


# -- audit ----------------------------------------------------------------------------------------


def test_the_audit_list_has_what_the_command_line_did(desk: Desk) -> None:
    one, other = desk.add.enqueue(1), desk.add.enqueue(2)
    desk.run("pause", "sums", "mail")
    desk.run("resume", "mail")
    desk.run("cancel", "--queue", "sums", "--all")
    desk.run("cancel", one.id)  # which changes nothing
    desk.run("retry", one.id, "no-such-job")
    desk.run("purge", "sums", "--yes")
    desk.run("restore", "sums")
    desk.run("limit", "sums", "--queue", "--rate", "5/s")
    desk.run("schedule", "add", "nightly", "add", "--cron", "0 3 * * *", "--queue", "sums")
    desk.run("schedule", "pause", "nightly")
    desk.run("schedule", "remove", "nightly")
    desk.run("delete-queue", "sums", "--force")
    found = [(note.what, note.target, note.count) for note in reversed([*notes(desk.mill.broker)])]
    assert found == [
        ("paused queue", "sums", 1),
        ("paused queue", "mail", 1),
        ("resumed queue", "mail", 1),
        ("cancelled jobs", f"{other.id}, {one.id}", 2),
        ("retried jobs", one.id, 1),
        ("purged queue", "sums", 1),
        ("restored queue", "sums", 1),
        ("changed queue limits", "sums", 1),
        ("added schedule", "nightly", 1),
        ("paused schedule", "nightly", 1),
        ("removed schedule", "nightly", 1),
        ("deleted queue", "sums", 2),
    ]
    who = {note.who for note in notes(desk.mill.broker)}
    user = pwd.getpwuid(os.getuid()).pw_name
    assert who == {f"{user} at {socket.gethostname()}, command line"}


def test_an_act_is_done_although_the_audit_list_cannot_be_written(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def put(*_: object, **__: object) -> None:
        raise StoreFull("the disk is full")

    desk.add.enqueue(1)
    monkeypatch.setattr(Notes, "put", put)
    result = desk.run("pause", "sums")
    assert (result.exit_code, result.stdout) == (0, "sums is paused\n")
    assert "the audit list lacks this" in caplog.text
    assert "paused queue sums (the disk is full)" in caplog.text


# -- backup ---------------------------------------------------------------------------------------


def test_a_backup_opens_as_a_store(desk: Desk, tmp_path: Path) -> None:
    job = desk.add.enqueue(1)
    target = tmp_path / "copy"
    assert desk.run("backup", str(target)).exit_code == 0
    with Tidemill(f"lmdb://{target}") as copy:
        assert copy.job(job.id).state is State.READY
    again = desk.run("backup", str(target))
    assert again.exit_code == 2
    assert "holds a store already" in again.stderr


@pytest.mark.parametrize("mode", [0o600, 0o660])
def test_a_backup_has_the_modes_of_the_store(desk: Desk, tmp_path: Path, mode: int) -> None:
    desk.add.enqueue(1)
    (tmp_path / "store/data.mdb").chmod(mode)
    before = os.umask(0o022)
    try:
        assert desk.run("backup", str(tmp_path / "copies/first")).exit_code == 0
    finally:
        os.umask(before)
    copy = tmp_path / "copies/first"
    assert copy.joinpath("data.mdb").stat().st_mode & 0o777 == mode
    assert copy.stat().st_mode & 0o777 == folder_mode(mode)


def test_a_group_is_cancelled_retried_and_deleted_whole(desk: Desk) -> None:
    handle = desk.mill.enqueue(group([desk.add.call(1), desk.bad.call("x")]))
    desk.work()
    facts = desk.json("job", handle.id)
    assert facts["members"] == {"count": 2, "ended": 2, "failures": 1}
    assert "2 of 2 have ended, 1 of them without success" in desk.run("job", handle.id).stdout
    assert desk.json("job", handle[0].id)["members"] is None
    ids = [row["id"] for row in desk.json("jobs", "--group", handle.id)["jobs"]]
    assert ids == [handle[1].id, handle[0].id]
    # retry: what did not succeed
    assert desk.json("retry", handle.id)["retried"] == [handle.id]
    assert handle.progress == (1, 2)
    assert desk.json("cancel", handle.id)["cancelled"] == [handle.id]
    assert str(handle[1].state) == "cancelled"
    assert str(handle.state) == "failed"
    again = desk.mill.enqueue(group([desk.add.call(1), desk.add.call(2)]).on_success(desk.add))
    found = desk.json("cancel", "--group", again.id, "--all")["cancelled"]
    assert sorted(found) == [again[0].id, again[1].id]
    # delete: all there is
    assert desk.json("delete", handle.id, again.id)["deleted"] == [handle.id, again.id]
    assert desk.json("jobs")["jobs"] == []
    single = desk.add.enqueue(1)
    assert desk.run("delete", "--task", "add").exit_code == 2
    assert desk.json("delete", "--task", "add", "--all")["deleted"] == [single.id]


def test_a_chain_shows_its_steps(desk: Desk) -> None:
    handle = desk.mill.enqueue(chain(desk.add.call(1), group([desk.add]), desk.bad, desk.add))
    desk.work()
    ids = [step.id for step in handle.steps]
    desk.mill.broker.delete(ids[:1])
    shown = [(step["id"], step["state"]) for step in desk.json("job", handle.id)["steps"]]
    assert shown == [*zip(ids[1:], ["succeeded", "failed", "cancelled"], strict=True)]
    lines = desk.run("job", handle.id).stdout.splitlines()
    whole, failed, last = (line for line in lines if line.startswith(("chain ", "step ")))
    text = "failed; 4 steps: 1 succeeded, 1 failed, 1 cancelled, 1 no longer kept"
    assert whole.split(maxsplit=1)[1] == text
    assert failed.split()[1:4] == ["3", "failed", ids[2]]
    assert "ValueError" in failed
    assert last.split()[1:4] == ["4", "cancelled", handle.id]
    # other jobs have no steps
    assert desk.json("job", ids[1])["steps"] is desk.json("job", ids[2])["steps"] is None


def test_a_retry_by_the_id_of_a_chain_is_of_the_whole(desk: Desk) -> None:
    # case M2
    inner = chain(desk.bad.call("x"), desk.add.call(), desk.add.call())
    handle = desk.mill.enqueue(group([desk.add.call(1), inner]))
    desk.work()
    first, middle, last = f"{handle.id}.0000001.0000", f"{handle.id}.0000001.0001", handle[1].id
    # when a step is retried that cannot run
    refused = desk.run("retry", middle)
    # then the failed job is named
    assert refused.exit_code == 1
    assert f"job {first}, which failed: " in refused.stderr
    # and the chain and the group begin with the failed job
    for whole in (last, handle.id):
        assert desk.json("retry", whole) == {"retried": [whole], "refused": []}
        states = [desk.mill.job(job_id).state for job_id in (first, middle, last, handle.id)]
        assert states == [State.READY, State.WAITING, State.WAITING, State.WAITING]
        desk.work()


def test_force_is_refused_for_a_group_and_a_chain(desk: Desk) -> None:
    # given a group and a chain, each with a part that failed
    failed = desk.bad.enqueue("x")
    members = desk.mill.enqueue(group([desk.add.call(1), desk.bad.call("x")]))
    steps = desk.mill.enqueue(chain(desk.add.call(1), desk.bad))
    desk.work()
    # when they are to run again by force
    result = desk.run("retry", failed.id, members.id, "--force")
    with pytest.raises(InvalidOption, match="a step that succeeded never runs again"):
        steps.retry(force=True)
    # then a sentence says why not, and nothing runs
    assert result.exit_code == 2
    assert "--force never repeats members of a group that succeeded" in result.stderr
    assert [job.state for job in (failed, members[1], steps)] == [State.FAILED] * 3


def test_the_beginning_of_a_groups_or_chains_id_is_enough(desk: Desk) -> None:
    pair = desk.mill.enqueue(group([desk.add.call(1), desk.add.call(2)]).on_success(desk.add))
    steps = desk.mill.enqueue(chain(desk.add.call(1), desk.add, desk.add))
    same = [a == b for a, b in zip(pair.id, steps.id, strict=True)]
    most = same.index(False) + 1
    for whole in (pair, steps):
        begun = whole.id[:most]
        assert desk.json("job", begun)["id"] == whole.id
        shown = [row["id"] for row in desk.json("jobs", "--group", begun)["jobs"]]
        assert shown == [job.id for job in desk.mill.jobs(group=whole.id)]
        assert desk.run("explain", begun).exit_code == 0
        assert desk.json("cancel", begun)["cancelled"] == [whole.id]
    several = desk.run("job", pair.id[: most - 1])
    assert several.exit_code == 2
    assert f"several ids begin with {pair.id[: most - 1]}: " in several.stderr
    for whole in (pair, steps):
        assert whole.id in several.stderr
    assert desk.json("delete", pair.id[:most])["deleted"] == [pair.id]
    assert desk.json("delete", "--group", steps.id[:most], "--all")["deleted"]


def test_ids_of_peoples_own_are_no_parts_of_each_other(desk: Desk) -> None:
    for job_id in ("thumb.a", "thumb.b"):
        desk.add.using(id=job_id).enqueue(1)
    several = desk.run("job", "thumb")
    assert "several ids begin with thumb: thumb.b, thumb.a" in several.stderr
    assert desk.json("job", "thumb.a")["id"] == "thumb.a"
