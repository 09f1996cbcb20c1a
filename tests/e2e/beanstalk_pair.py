"""The same commands to beanstalkd and to our port, and their answers side by side.

Job ids differ: a job is known by the order in which it was put, and answers are compared with our
ids put in the place of theirs. Times are either nothing or long, so that no clock decides.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from servers.beanstalk import Tongue

from tidemill.server.beanstalk.stats import COUNTED

TUBES = (b"default", b"a", b"b.c")
_PASSING = {
    *("pid", "rusage-utime", "rusage-stime", "uptime", "id", "hostname", "os"),
    *("platform", "binlog-max-size", "age", "time-left", "pause-time-left", "total-connections"),
}
_COUNTED = {"current-jobs-urgent", "current-jobs-buried"}


class Pair:
    """One beanstalkd, one port of ours, and as many clients of each."""

    def __init__(self, theirs: int, ours: int, clients: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.ports = theirs, ours
        self.ids: dict[int, int] = {}  # theirs -> ours
        self.said: list[str] = []
        # Two that keep the tubes there, so that their counters are not begun anew.
        self.keepers = [Tongue(port) for port in self.ports]
        for tube in TUBES:
            self.both(self.keepers, b"watch %b\r\n" % tube)
        self.clients = [[Tongue(port) for port in self.ports] for _ in range(clients)]
        self.waits: list[Tongue] | None = None  # the client that waits for a job

    def close(self) -> None:
        for tongue in (*self.keepers, *(t for pair in self.clients for t in pair)):
            tongue.close()

    # -- asking both ----------------------------------------------------------------------------

    def both(self, client: list[Tongue], command: bytes, replies: int = 1) -> None:
        """Send the same, and compare what comes."""
        self.send(client, command)
        for _ in range(replies):
            self.compare(client)

    def send(self, client: list[Tongue], command: bytes) -> None:
        self.said.append(repr(command[:200]))
        theirs, ours = client
        theirs.send(command)
        ours.send(self._with_our_ids(command))

    def compare(self, client: list[Tongue]) -> None:
        theirs, ours = (self._read(tongue) for tongue in client)
        self.said.append(f"    {theirs[:80]!r}")
        words = theirs.split(None, 2)
        if words[:1] == [b"INSERTED"]:
            assert ours.startswith(b"INSERTED "), self.story(theirs, ours)
            self.ids[int(words[1])] = int(ours.split()[1])
            return
        if words[:1] in ([b"RESERVED"], [b"FOUND"]):
            number = b" %d " % int(words[1])
            theirs = theirs.replace(number, b" %d " % self.ids[int(words[1])], 1)
        if words[:1] == [b"OK"]:
            apart = set(_facts(theirs).items()) ^ set(_facts(ours, theirs).items())
            assert not apart, f"{self.story(theirs, ours)}\n{sorted(apart)}"
        else:
            assert theirs == ours, self.story(theirs, ours)

    def _read(self, tongue: Tongue) -> bytes:
        try:
            return tongue.read()
        except TimeoutError:
            whose = self.ports.index(tongue.socket.getpeername()[1])
            return b"nothing from " + (b"theirs", b"ours")[whose]

    def _with_our_ids(self, command: bytes) -> bytes:
        head, _, rest = command.partition(b"\r\n")
        words = head.split(b" ")
        if words[0] in _BY_ID and len(words) > 1 and words[1].isdigit():
            theirs = int(words[1])
            words[1] = b"%d" % self.ids.get(theirs, theirs if theirs > 2**40 else theirs + 2**40)
            return b" ".join(words) + b"\r\n" + rest
        return command

    def story(self, theirs: bytes, ours: bytes) -> str:
        """What led to it."""
        ours_first = {mine: their for their, mine in self.ids.items()}
        for reply, names in ((theirs, {}), (ours, ours_first)):  # the jobs that are spoken of
            for word in reply.split(None, 2)[1:2]:
                number = names.get(int(word), int(word)) if word.isdigit() else 0
                facts = [
                    k.ask(b"stats-job %d\r\n" % n)
                    for k, n in zip(self.keepers, (number, self.ids.get(number, 0)), strict=True)
                ]
                self.said += [repr(fact) for fact in facts]
        last = "\n".join(self.said[-60:])
        return f"{last}\ntheirs: {theirs!r}\nours:   {ours!r}"

    # -- one step -------------------------------------------------------------------------------

    def step(self) -> None:
        """One thing that some client does."""
        idle = [client for client in self.clients if client is not self.waits]
        client = self.random.choice(idle)
        does = self.random.random()
        if does < 0.02:
            self._leave(client)
        elif does < 0.04 and self.waits is None:
            self._wait(client)
        elif does < 0.12:
            many = self.random.randint(2, 8)
            commands = [self._command() for _ in range(many)]
            self.both(client, b"".join(map(self._with_their_ids, commands)), many)
        else:
            self.both(client, self._command())
        self._hear()

    def _with_their_ids(self, command: bytes) -> bytes:
        """Commands sent together name no jobs: only the first line's ids are changed."""
        return b"list-tube-used\r\n" if command.split(b" ")[0] in _BY_ID else command

    def _wait(self, client: list[Tongue]) -> None:
        """Reserve without an end."""
        self.waits = client
        self.send(client, b"reserve\r\n")

    def _hear(self) -> None:
        """What the one that waits is told, if it is."""
        if self.waits is None:
            return
        self.both(self.keepers, b"list-tube-used\r\n")  # they have seen to all by then
        if self.waits[0].has_said(0.01):
            self.compare(self.waits)
            self.waits = None

    def _leave(self, client: list[Tongue]) -> None:
        """A client hangs up, or is gone, and another comes."""
        for tongue, port, keeper in zip(client, self.ports, self.keepers, strict=True):
            before = _connections(keeper)
            tongue.close()
            until = time.monotonic() + 30
            while _connections(keeper) != before - 1:
                assert time.monotonic() < until
            client[client.index(tongue)] = Tongue(port)
            while _connections(keeper) != before:
                assert time.monotonic() < until
        self.said.append("    (left)")

    # -- commands -------------------------------------------------------------------------------

    def _job(self) -> bytes:
        """A job that was put not long ago, or one that never was."""
        known = list(self.ids)[-12:]
        return b"%d" % (
            self.random.choice(known) if known and self.random.random() < 0.95 else 10**9
        )

    def _command(self) -> bytes:
        makes = self.random.choices(_MAKERS, _WEIGHTS)[0]
        return makes(self)

    def put(self) -> bytes:
        r = self.random
        body = r.choice((b"", b"x", b"a\r\nb", b"\r\n", b"\0\xff", b"y" * 300))
        pri = r.choice((0, 1, 1023, 1024, 2**31, 2**32 - 1))
        head = b"put %d %d %d %d\r\n" % (pri, r.choice((0, 0, 0, 1000)), 1000, len(body))
        return head + body + b"\r\n"

    def odd(self) -> bytes:
        return self.random.choice(ODD)

    def tube(self) -> bytes:
        verb = self.random.choice((b"use", b"use", b"watch", b"watch", b"ignore", b"stats-tube"))
        return b"%b %b\r\n" % (verb, self.random.choice(TUBES))

    def pause(self) -> bytes:
        if self.waits is not None:  # else two would take at the same moment, in either order
            return b"list-tubes\r\n"
        return b"pause-tube %b %d\r\n" % (
            self.random.choice(TUBES),
            self.random.choice((0, 0, 1000)),
        )

    def by_id(self) -> bytes:
        return b"%b %b\r\n" % (self.random.choice(tuple(_PLAIN)), self._job())

    def release(self) -> bytes:
        r = self.random
        return b"release %b %d %d\r\n" % (
            self._job(),
            r.choice((0, 5, 1024)),
            r.choice((0, 0, 900)),
        )

    def bury(self) -> bytes:
        return b"bury %b %d\r\n" % (self._job(), self.random.choice((0, 7, 2000)))

    def plain(self) -> bytes:
        return self.random.choice(SIMPLE) + b"\r\n"

    def kick(self) -> bytes:
        return b"kick %d\r\n" % self.random.choice((0, 1, 2, 100))

    def reserve(self) -> bytes:
        return b"reserve-with-timeout 0\r\n"


def _connections(keeper: Tongue) -> int:
    facts = _facts(keeper.ask(b"stats\r\n"))
    return int(facts["current-connections"])


def _facts(reply: bytes, theirs: bytes = b"") -> dict[str, str]:
    """The lines of YAML, but for what passes, in no order; of ours those that are only counted so
    far are taken from theirs."""
    lines = reply.decode().split("\r\n", 1)[1].splitlines()
    assert lines[0] == "---"
    facts = dict(line.split(": ", 1) if ": " in line else (line, "") for line in lines[1:])
    if theirs:
        for name, exact in _facts(theirs).items():
            if name in _COUNTED and COUNTED <= int(facts.get(name, 0)) < int(exact):
                facts[name] = exact
    return {k: "passing" if k in _PASSING else v for k, v in facts.items() if k != "cmd-stats"}


_PLAIN = (b"delete", b"reserve-job", b"touch", b"peek", b"kick-job", b"stats-job")
_BY_ID = {*_PLAIN, b"release", b"bury"}
SIMPLE = (
    *(b"peek-ready", b"peek-delayed", b"peek-buried", b"stats", b"list-tubes"),
    *(b"list-tube-used", b"list-tubes-watched"),
)
ODD = (
    *(b"\r\n", b"foo\r\n", b"put\r\n", b"put \r\n", b"put 1 2 3\r\n", b"put -1 0 1 1\r\n"),
    *(b"put 4294967296 0 1 1\r\n", b"put 1 0 1 4294967296\r\n", b"put 1 0 1 x\r\n"),
    *(b"put 1 0 1 1 \r\n", b"put 1 0 1 1 x\r\n", b"put 0 0 1000 3\r\nabcde"),
    *(b"put 0 0 1000 1\r\n\r\r\n",),
    *(b"put 0 0 1 70000\r\n" + b"z" * 70002, b"reserve \r\n", b"reservex\r\n", b"reserve-job\r\n"),
    *(b"reserve-with-timeout 0x\r\n", b"delete\r\n"),
    *(b"delete x\r\n", b"delete 1x\r\n", b"delete 18446744073709551616\r\n", b"delete -1\r\n"),
    *(b"release 1\r\n", b"release 1 2\r\n", b"release 1 2 3 4\r\n", b"release x 1 1\r\n"),
    *(
        b"bury 1\r\n",
        b"bury 1 2 3\r\n",
        b"bury 99999999999 4294967296\r\n",
        b"kick\r\n",
        b"kick x\r\n",
    ),
    *(
        b"kick  0\r\n",
        b"kick +0\r\n",
        b"kick 0x\r\n",
        b"kick 99999999999999999999\r\n",
        b"kick-job x\r\n",
    ),
    *(b"touch\r\n", b"touch  99999999999\r\n", b"touch 1 2\r\n", b"stats x\r\n", b"statsx\r\n"),
    *(b"stats-job\r\n", b"stats-job x\r\n", b"stats-tube\r\n", b"stats-tube nobody\r\n"),
    *(b"stats-tube -x\r\n", b"use\r\n", b"use \r\n", b"use -a\r\n", b"use a b\r\n", b"use a,b\r\n"),
    *(b"use " + b"n" * 201 + b"\r\n", b"watch " + b"n" * 219 + b"\r\n", b"ignore nobody\r\n"),
    *(b"ignore -\r\n", b"x" * 222 + b"\r\n", b"x" * 224 + b"\r\n", b"x" * 1000 + b"\r\n"),
    *(b"a\0b\r\n", b"stats\0\r\n", b"peek\r\n", b"peek  99999999999\r\n", b"peek 1.5\r\n"),
    *(b"peek-readyx\r\n", b"peek-delayed \r\n", b"peek-buried 1\r\n", b"list-tubes x\r\n"),
    *(b"list-tube-usedx\r\n", b"list-tubes-watched \r\n", b"pause-tube\r\n", b"pause-tube a\r\n"),
    *(
        b"pause-tube nobody 1\r\n",
        b"pause-tube a x\r\n",
        b"pause-tube a 1 2\r\n",
        b"pause-tube -a 1\r\n",
    ),
    *(b"pause-tube a 4294967296\r\n", b"PUT 1 0 1 1\r\n", b" stats\r\n", b"list-tube\r\n"),
    *(
        b"use $();+/_.-\r\n",
        b"use default\r\n",
        b"watch default\r\n",
        b"touch 18446744073709551615\r\n",
    ),
)
_MAKERS: tuple[Callable[[Pair], bytes], ...] = (
    *(Pair.put, Pair.reserve, Pair.by_id, Pair.release, Pair.bury, Pair.tube),
    *(Pair.kick, Pair.plain, Pair.odd, Pair.pause),
)
_WEIGHTS = (26, 20, 22, 6, 5, 8, 3, 4, 5, 2)
