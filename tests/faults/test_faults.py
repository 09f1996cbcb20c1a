"""The storm with misfortunes of the servers, small: the whole one is ``make faults``."""

from __future__ import annotations

from pathlib import Path

import pytest
from checker import check, check_nothing_held
from excuses import Blow, Excuses, Put, Span
from faults import RIGS, faults
from fuzz import fuzz
from harness import Place
from storm import LEAST, storm
from storm_app import APP

from tidemill.core.clock import new_id

CHOSEN = {
    "redis": ["fail-over to a replica that lags", "a cut line", "`maxmemory`"],
    "postgresql": ["fail-over to a standby that lags", "a lock on a table"],
    "lmdb": ["SIGSTOP of the lock's holder, then SIGKILL", "a full disk"],
    "rabbitmq": ["a cut line"],
    "http": ["SIGSTOP of the server", "a restored snapshot"],
}


@pytest.mark.parametrize("broker", RIGS)
def test_a_small_storm_with_misfortunes(tmp_path: Path, broker: str) -> None:
    # laws 1, 3, 5, 8
    path = tmp_path / "p"
    path.mkdir()
    outcome = faults(path, broker, seed=4, kills=4, chosen=CHOSEN[broker], seconds=3.5, rest=1.0)
    assert [outcome.rows[name].struck for name in CHOSEN[broker]] == [1] * len(CHOSEN[broker])
    assert outcome.seen["runs"] >= LEAST


@pytest.mark.everyday
def test_a_job_that_nothing_excuses_is_called_lost(place: Place) -> None:
    # Given a job that ran, and one that the store does not have.
    place.write(APP)
    kept, lost = place.enqueue("quick", 1).id, new_id()
    place.drain()
    put = Put("accepted", Span(100.0, 101.0), (kept, lost))
    forgetful = Blow("a fail-over", Span(99.0, 105.0), lost=Span(100.5, 103.0))
    later = Blow("a fail-over", Span(101.2, 105.0), lost=Span(101.5, 103.0))
    # Then the checker complains, unless the put was answered within a lost span.
    assert check(place, put.ids, [], excuses=Excuses([forgetful], [put]))["missing"] == 1
    for blows in ([], [later], [forgetful._replace(lost=None)]):
        with pytest.raises(AssertionError, match="1 accepted jobs are lost"):
            check(place, put.ids, [], excuses=Excuses(blows, [put]))


@pytest.mark.everyday
def test_a_job_that_nobody_holds_is_called_leaked(place: Place) -> None:
    # Given a job that a consumer took, and that no worker holds.
    place.mill.queue("left").put("a")
    message = place.mill.queue("left").get(timeout=5)
    # Then the checker complains until the job is given back.
    with pytest.raises(AssertionError, match="1 jobs are running, and nobody works on them"):
        check_nothing_held(place)
    message.release()
    check_nothing_held(place)


@pytest.mark.everyday
def test_a_repeated_run_needs_a_kill_or_a_server_that_forgets() -> None:
    # Given a run that ended at 101 s, in the time of a server that only hung from 100 to 120 s.
    hung = Excuses([Blow("a hang", Span(100.0, 120.0))], settling=4.0)
    # Then its verdict is settled some seconds after the server answers again.
    assert hung.settled(101.0, 4.0) == 124.0
    assert hung.settled(94.0, 4.0) == 98.0
    assert not hung.forgotten(99.0, 101.0)
    # And a server that forgot the steps between 110 and 115 s explains more.
    forgot = Blow("a fail-over", Span(100.0, 120.0), lost=Span(110.0, 115.0))
    excuses = Excuses([forgot], settling=4.0)
    assert excuses.forgotten(105.0, 107.0)
    assert not excuses.forgotten(104.0, 105.0)
    assert not excuses.forgotten(125.0, 126.0)


# -- storm -----------------------------------------------------------------------------------------


@pytest.mark.everyday
@pytest.mark.parametrize("broker", ["lmdb", "redis", "postgresql", "rabbitmq", "http"])
def test_a_small_storm(tmp_path: Path, broker: str) -> None:  # case Q20
    path = tmp_path / "p"
    path.mkdir()
    kills = 8 if broker == "lmdb" else 4  # a server takes seconds to come back
    table = storm(path, seed=4, kills=kills, broker=broker)
    assert table["runs"] >= LEAST


# -- odd requests ----------------------------------------------------------------------------------


def test_no_request_is_too_odd() -> None:  # case W2
    options = ("--phases", "fuzzing,stateful", "--max-examples", "3", "--no-shrink")
    seen = fuzz(*options, seed=4)
    assert seen["calls"] > 100
    assert seen["jobs there"] > 0
