"""Many random commands and byte strings at once to our port, held to what is true of any order.

Each command gets one reply, of those that there are to it, and never INTERNAL_ERROR. No number is
given away twice, a job comes with the body it was put with, what was deleted never comes again, and
what was put and not deleted is there at the end, after a kill of the server, too.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from typing import BinaryIO, NamedTuple

from beanstalk_pair import ODD, SIMPLE, TUBES
from servers.beanstalk import Tongue

LINES = 16
AT_ONCE = 40
"""Commands that a line sends before it reads."""

BODIES = (b"", b"x", b"a\r\nb", b"\r\n", b"\0\xff", b"RESERVED 1 1\r\n", b"y" * 300)
NOBODY = 2**64 - 1
REPLIES = (
    *(b"INSERTED", b"BURIED", b"EXPECTED_CRLF", b"JOB_TOO_BIG", b"USING", b"RESERVED", b"KICKED"),
    *(b"DEADLINE_SOON", b"TIMED_OUT", b"DELETED", b"NOT_FOUND", b"RELEASED", b"TOUCHED", b"OK"),
    *(b"WATCHING", b"NOT_IGNORED", b"FOUND", b"PAUSED", b"BAD_FORMAT", b"UNKNOWN_COMMAND"),
)
WITH_BODY = (b"OK", b"RESERVED", b"FOUND")


class Sent(NamedTuple):
    """A command; ``job`` is its number, or the body of a put."""

    data: bytes
    words: tuple[bytes, ...]
    job: int = 0


class Line:
    """A client that sends much before it reads."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 60)
        self._replies: BinaryIO = self.socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self) -> tuple[bytes, list[bytes], bytes]:
        """The next reply's words, and its body; no word at the end."""
        line = self._replies.readline()
        words = line.split()
        if words and words[0] in WITH_BODY:
            size = int(words[-1])
            return words[0], words, self._replies.read(size + 2)[:size]
        return words[0] if words else b"", words, b""

    def close(self) -> None:
        self._replies.close()
        self.socket.close()


class Flood:
    """The flood that a seed begins, and what must be there after it."""

    def __init__(self, port: int, seed: int) -> None:
        self.port = port
        self.random = random.Random(seed)
        self.commands = 0
        self.alive: dict[int, int] = {}  # by number, which body
        self.dead: set[int] = set()
        self._fresh: set[int] = set()  # those who died in this round
        self._known: list[int] = []
        self._lines = [Line(port) for _ in range(LINES)]
        for tube in TUBES:
            for line in self._lines:
                line.send(b"watch %b\r\n" % tube)
                assert line.read()[0] == b"WATCHING"

    def close(self) -> None:
        for line in self._lines:
            line.close()

    def run(self, commands: int) -> None:
        """So many commands and byte strings, at least."""
        until = self.commands + commands
        while self.commands < until:
            self._round()
            if self.random.random() < 0.1:
                self._leave()
            if self.random.random() < 0.3:
                self._babble()

    # -- well-formed, and answered one by one -----------------------------------------------------

    def _round(self) -> None:
        """Each line sends some, then each reads what came."""
        self._fresh.clear()
        batches = []
        for line in self._lines:
            batch = [make(self) for make in self.random.choices(_MAKERS, _WEIGHTS, k=AT_ONCE)]
            line.send(b"".join([sent.data for sent in batch]))
            batches.append((line, batch))
        came: list[tuple[int, bytes]] = []
        for line, batch in batches:
            for sent in batch:
                self._hear(sent, *line.read(), came)
            self.commands += len(batch)
        for number, body in came:
            assert number not in self.dead or number in self._fresh, f"{number} is back"
            if number in self.alive:
                assert body == BODIES[self.alive[number]], number

    def _hear(
        self,
        sent: Sent,
        word: bytes,
        words: list[bytes],
        body: bytes,
        came: list[tuple[int, bytes]],
    ) -> None:
        assert word in sent.words, f"{sent.data[:80]!r} was answered {words!r}"
        if word == b"INSERTED":
            number = int(words[1])
            assert number not in self.alive, f"{number} was given away twice"
            assert number not in self.dead, f"{number} was given away twice"
            self.alive[number] = sent.job
            self._known.append(number)
        elif word == b"DELETED":
            assert self.alive.pop(sent.job, None) is not None, f"{sent.job} was deleted twice"
            self.dead.add(sent.job)
            self._fresh.add(sent.job)
        elif word in (b"RESERVED", b"FOUND"):
            came.append((int(words[1]), body))

    def _job(self) -> int:
        """One that is there, as far as is known; now and then one that is not."""
        known, r = self._known, self.random
        while known and r.random() < 0.97:
            at = r.randrange(len(known))
            number = known[at]
            if number in self.alive:
                return number
            known[at] = known[-1]
            known.pop()
        return r.choice((0, 10**9, NOBODY))

    def put(self) -> Sent:
        r = self.random
        which = r.randrange(len(BODIES))
        body = BODIES[which]
        pri, delay = r.choice((0, 1, 1024, 2**32 - 1)), r.choice((0, 0, 0, 0, 1, 1000))
        ttr = r.choice((1, 1000, 1000, 1000))
        data = b"put %d %d %d %d\r\n%b\r\n" % (pri, delay, ttr, len(body), body)
        return Sent(data, (b"INSERTED",), which)

    def reserve(self) -> Sent:
        words = (b"RESERVED", b"TIMED_OUT", b"DEADLINE_SOON")
        return Sent(b"reserve-with-timeout 0\r\n", words)

    def delete(self) -> Sent:
        job = self._job()
        return Sent(b"delete %d\r\n" % job, (b"DELETED", b"NOT_FOUND"), job)

    def by_id(self) -> Sent:
        head, words = self.random.choice(_BY_ID)
        return Sent(head % self._job(), words)

    def tube(self) -> Sent:
        head, words = self.random.choice(_TUBE)
        return Sent(head % self.random.choice(TUBES), words)

    def plain(self) -> Sent:
        r = self.random
        command = r.choice((*SIMPLE, b"stats-tube " + r.choice(TUBES)))
        return Sent(command + b"\r\n", (b"FOUND", b"NOT_FOUND", b"OK", b"USING"))

    def kick(self) -> Sent:
        return Sent(b"kick %d\r\n" % self.random.choice((0, 1, 2, 100)), (b"KICKED",))

    def odd(self) -> Sent:
        return Sent(self.random.choice(_REFUSED), (b"BAD_FORMAT", b"UNKNOWN_COMMAND"))

    def noise(self) -> Sent:
        """A line that is no command, of any bytes but its end."""
        r = self.random
        data = r.randbytes(r.choice((0, 3, 20, 218, 400))).replace(b"\r", b"\n")
        return Sent(b"~" + data + b"\r\n", (b"BAD_FORMAT", b"UNKNOWN_COMMAND"))

    # -- what nobody waits for, and what nobody understands ---------------------------------------

    def _leave(self) -> None:
        """A line breaks, in the midst of what it had asked for, and another comes."""
        at = self.random.randrange(LINES)
        line = self._lines[at]
        ask = (b"put 7 0 1000 6\r\nunsaid\r\n", b"reserve-with-timeout 0\r\n", b"reserve\r\n")
        line.send(b"".join(self.random.choices(ask, k=AT_ONCE)))
        self.commands += AT_ONCE
        line.close()
        self._lines[at] = line = Line(self.port)
        for tube in TUBES:
            line.send(b"watch %b\r\n" % tube)
            assert line.read()[0] == b"WATCHING"

    def _babble(self) -> None:
        """Strings of any bytes, and commands with an error in them; then all that is said to it."""
        strings = [self._string() for _ in range(5 * AT_ONCE)]
        line = Line(self.port)
        line.send(b"use noise\r\n" + b"".join(strings))
        line.socket.shutdown(socket.SHUT_WR)
        words = []
        while word := line.read()[0]:
            words.append(word)
        assert words[0] == b"USING"
        assert set(words) <= {*REPLIES}, set(words)
        line.close()
        self.commands += len(strings)

    def _string(self) -> bytes:
        r = self.random
        if r.random() < 0.3:
            return r.randbytes(r.randrange(300))
        string = bytearray(r.choice(_SPOILED))
        for _ in range(r.choice((1, 1, 2, 5))):
            at = r.randrange(len(string))
            wrong = r.choice((b"\r\n", b"\0", b" ", b"-", r.randbytes(1)))
            string[at : at + r.randrange(2)] = wrong
        return bytes(string)

    # -- the end ----------------------------------------------------------------------------------

    def settle(self) -> None:
        """All that must be there is, with its body, and nothing that was deleted."""
        client = Tongue(self.port, 120)
        missing, until = dict(self.alive), time.monotonic() + 120
        while missing:
            assert time.monotonic() < until, f"lost: {sorted(missing)[:20]}"
            for tube in client.ask(b"list-tubes\r\n").split(b"---\n")[1].split(b"\n")[:-1]:
                name = tube.removeprefix(b"- ")
                client.ask(b"use %b\r\n" % name)
                client.ask(b"watch %b\r\n" % name)
                while client.ask(b"kick 1000\r\n") != b"KICKED 0":
                    pass
            while (reply := client.ask(b"reserve-with-timeout 0\r\n")).startswith(b"RESERVED"):
                head, _, body = reply.partition(b"\r\n")
                number = int(head.split()[1])
                assert number not in self.dead, f"{number} is back"
                which = missing.pop(number, None)
                assert which is None or body == BODIES[which], number
                assert client.ask(b"delete %d\r\n" % number) == b"DELETED"
        client.close()


_BY_ID: tuple[tuple[bytes, tuple[bytes, ...]], ...] = (
    (b"reserve-job %d\r\n", (b"RESERVED", b"NOT_FOUND")),
    (b"touch %d\r\n", (b"TOUCHED", b"NOT_FOUND")),
    (b"peek %d\r\n", (b"FOUND", b"NOT_FOUND")),
    (b"kick-job %d\r\n", (b"KICKED", b"NOT_FOUND")),
    (b"stats-job %d\r\n", (b"OK", b"NOT_FOUND")),
    (b"release %d 3 0\r\n", (b"RELEASED", b"NOT_FOUND")),
    (b"release %d 2000 1\r\n", (b"RELEASED", b"NOT_FOUND")),
    (b"bury %d 7\r\n", (b"BURIED", b"NOT_FOUND")),
)
_TUBE: tuple[tuple[bytes, tuple[bytes, ...]], ...] = (
    (b"use %b\r\n", (b"USING",)),
    (b"watch %b\r\n", (b"WATCHING",)),
    (b"ignore %b\r\n", (b"WATCHING", b"NOT_IGNORED")),
    (b"pause-tube %b 0\r\n", (b"PAUSED", b"NOT_FOUND")),
)
_REFUSED = (
    *(b"\r\n", b"foo\r\n", b"put\r\n", b"put 1 2 3\r\n", b"put -1 0 1 1\r\n", b"reserve \r\n"),
    *(b"delete x\r\n", b"delete 18446744073709551616\r\n", b"release 1 2\r\n", b"kick x\r\n"),
    *(b"use -a\r\n", b"watch " + b"n" * 219 + b"\r\n", b"x" * 1000 + b"\r\n", b"a\0b\r\n"),
    *(b"peek 1.5\r\n", b"pause-tube a x\r\n", b"PUT 1 0 1 1\r\n", b" stats\r\n"),
)
_SPOILED = (
    *(b"put 1 0 1000 5\r\nhello\r\n", b"put 0 9 1 0\r\n\r\n", b"reserve-with-timeout 0\r\n"),
    *(b"release 18446744073709551615 1 1\r\n", b"bury 18446744073709551615 1\r\n"),
    *(b"touch 18446744073709551615\r\n", b"peek 1\r\n", b"kick-job 1\r\n", b"kick 1\r\n"),
    *(b"use noise\r\n", b"watch noise\r\n", b"ignore default\r\n", b"stats\r\n", b"list-tubes\r\n"),
    *(b"peek-ready\r\n", b"stats-tube default\r\n"),
    *(odd for odd in ODD if not odd.startswith((b"pause", b"delete"))),
)
"""Commands to be spoiled: none that deletes a job, or pauses a tube, with another number."""
_MAKERS: tuple[Callable[[Flood], Sent], ...] = (
    *(Flood.put, Flood.reserve, Flood.delete, Flood.by_id, Flood.tube),
    *(Flood.kick, Flood.plain, Flood.odd, Flood.noise),
)
_WEIGHTS = (15, 12, 18, 7, 12, 1, 1, 14, 20)
