"""A job server on LMDB, behind a line that can be cut."""

from __future__ import annotations

from collections.abc import Collection

from servers import Proxy
from servers.http import JobServer

from misfortunes import Rig
from misfortunes.anywhere import CutLine, OldImage, Stopped


class HttpRig(Rig):
    """One job server. Kills of it are the storm's own."""

    def __init__(self, chosen: Collection[str] = ()) -> None:
        super().__init__(chosen)
        server = JobServer("--quiet")
        self.callback(server.close)
        line = Proxy(server.port)
        self.callback(line.close)
        self.servers.append(server)
        self.url = f"http://127.0.0.1:{line.port}"
        self.misfortunes = [
            Stopped(lambda: server, "the server"),
            CutLine(lambda: [line]),
            OldImage(lambda: server),
        ]
