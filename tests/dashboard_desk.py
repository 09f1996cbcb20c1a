"""A visitor of the dashboard without a browser, and the numbers that a page shows."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlencode

from starlette.responses import Response

from tidemill import Tidemill
from tidemill.dashboard.dashboard import Dashboard, parts_of
from tidemill.dashboard.roles import Role, User
from tidemill.dashboard.routes import part_of

LINK = re.compile(r'<a (?:class="[^"]*" )?href="([^"]*/jobs\?[^"]*)"[^>]*>(.*?)</a>', re.DOTALL)
VALUE = re.compile(r'class="value">([^<]*)<')

ANNA = User("anna", Role.ADMIN)


class Visitor:
    """One person with one browser. Every answer of the dashboard is kept in ``last``."""

    def __init__(
        self, dashboard: Dashboard | Tidemill, user: User | None = ANNA, root: str = ""
    ) -> None:
        self.dashboard = Dashboard(dashboard) if isinstance(dashboard, Tidemill) else dashboard
        self.user = user
        self.root = root
        self.cookies: dict[str, str] = {}
        self.last = Response()

    def send(
        self,
        method: str,
        path: str,
        form: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Response:
        """Send a request as a browser on the same site does."""
        path, _, query = path.partition("?")
        sent = {"cookie": "; ".join(f"{k}={v}" for k, v in self.cookies.items())}
        if form is not None:
            sent |= {"content-type": "application/x-www-form-urlencoded"}
            sent |= {"sec-fetch-site": "same-origin"}
        scope = {
            "type": "http",
            "method": method,
            "root_path": self.root,
            "path": self.root + unquote(path),
            "query_string": query.encode(),
            "headers": [
                (name.encode(), value.encode()) for name, value in (sent | (headers or {})).items()
            ],
        }
        self.last = self.dashboard.handle(scope, self.user, urlencode(form or {}).encode())
        for value in self.last.headers.getlist("set-cookie"):
            key, _, rest = value.partition("=")
            self.cookies[key] = rest.partition(";")[0]
            if "Max-Age=0" in value:
                del self.cookies[key]
        return self.last

    @staticmethod
    def dashboard_path(queue: str) -> str:
        """The path of the page of a queue."""
        return f"/queues/{part_of(queue)}"

    def get(self, path: str, status: int = 200) -> str:
        """The text of a page, which has this status."""
        response = self.send("GET", path)
        text = read(response)
        assert response.status_code == status, (response.status_code, text[-600:])
        return text

    def post(self, path: str, status: int = 303, /, **form: str) -> Response:
        """Send a form; the answer has this status."""
        response = self.send("POST", path, form)
        assert response.status_code == status, (response.status_code, response.body[-600:])
        return response

    def act(self, path: str, /, **form: str) -> str:
        """Send a form, follow the redirect, and return the message that the next page shows."""
        location = self.post(path, **form).headers["location"]
        text = self.get(location.removeprefix(self.root))
        found = re.search(r'<p class="flash (\w+)">.*?<span>(.*?)</span></p>', text, re.DOTALL)
        assert found, "no message on the page"
        return f"{found[1]}: {html.unescape(found[2])}"


def read(response: Response) -> str:
    """The whole text of an answer."""
    return b"".join(parts_of(response)).decode()


def words(text: str) -> str:
    """The text of a page as a reader sees it, in one line."""
    body = text.partition("<main")[2]
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


class Reader:
    """A client of an ASGI application that takes a part only when the test says so."""

    def __init__(self, app: Any, path: str, user: str = "anna") -> None:
        self.status = 0
        self.parts: asyncio.Queue[bytes] = asyncio.Queue()
        self._may_send = asyncio.Semaphore(0)
        self._gone = asyncio.Event()
        self._asked = False
        scope = {
            "type": "http",
            "method": "GET",
            "path": path,
            "query_string": b"",
            "headers": [(b"x-user", user.encode())] if user else [],
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b""}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        if message.get("body"):
            self.parts.put_nowait(message["body"])
            await self._may_send.acquire()

    async def part(self) -> bytes:
        """The next part; the application may go on after it."""
        async with asyncio.timeout(30):
            part = await self.parts.get()
        self._may_send.release()
        return part

    async def leave(self) -> None:
        """Go away, and wait until the application has noticed."""
        self._gone.set()
        async with asyncio.timeout(30):
            await self.task


# -- numbers and lists -----------------------------------------------------------------------------


def numbers(text: str) -> list[tuple[str, int]]:
    """Links to lists of jobs, each with the number that the link shows."""
    found = []
    for link, inside in LINK.findall(text):
        value = VALUE.search(inside)
        shown = value[1] if value else re.sub(r"<[^>]*>", " ", inside)
        number = re.fullmatch(r"\D*?(\d[\d,]*)( for good)?", shown.strip())
        if number and "%" not in shown:
            found.append((html.unescape(link), int(number[1].replace(",", ""))))
    return found


def listed(get: Callable[[str], str], link: str) -> int:
    """The number of jobs in a list, over all its pages."""
    count = 0
    while link:
        text = get(link)
        count += len(re.findall(r'name="id" value="', text))
        more = re.search(r'href="([^"]+)">(?:Older|Go on looking)', text)
        link = html.unescape(more[1]) if more else ""
    return count


def counted(text: str) -> int:
    """The number of matching jobs in the title of a list."""
    found = re.search(r'<span class="count">([\d,]+)', text)
    assert found, "no number in the title"
    return int(found[1].replace(",", ""))
