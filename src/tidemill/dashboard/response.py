"""A long answer of the dashboard, such as an export."""

from __future__ import annotations

from collections.abc import Generator, Mapping

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class LongResponse(StreamingResponse):
    """An answer whose parts are made one at a time, as the reader takes them.

    A generator that searches for data sometimes makes an empty part, and may be closed there.
    """

    def __init__(self, parts: Generator[bytes], headers: Mapping[str, str], media_type: str):
        super().__init__(parts, headers=headers, media_type=media_type)
        self.parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, until its end or until the reader has gone."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.parts.close()
