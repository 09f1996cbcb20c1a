"""An answer of the dashboard, for any framework to send."""

from __future__ import annotations

from collections.abc import Generator, Iterator


class Response:
    """A status, headers, and a body: bytes, or an iterator of bytes.

    An iterator that searches for data sometimes makes an empty part. The iterator can be closed
    between two parts. ``headers`` is a list, because an answer may set several cookies.
    """

    def __init__(
        self,
        body: bytes | str | Iterator[bytes] = b"",
        status: int = 200,
        media: str = "text/html; charset=utf-8",
        headers: dict[str, str] | None = None,
    ) -> None:
        self.status = status
        self.body: bytes | Iterator[bytes] = body.encode() if isinstance(body, str) else body
        self.headers: list[tuple[str, str]] = [("content-type", media)] if body else []
        self.headers += [(name.lower(), value) for name, value in (headers or {}).items()]

    def header(self, name: str) -> str:
        """The first header of this name, or an empty text."""
        return next((value for key, value in self.headers if key == name.lower()), "")

    def set_cookie(
        self, name: str, value: str, path: str, *, secure: bool, age: int | None = None
    ) -> None:
        """Set a cookie that scripts and other sites cannot use; ``age`` is in seconds."""
        parts = [f"{name}={value}", f"Path={path or '/'}", "HttpOnly", "SameSite=Strict"]
        parts += ["Secure"] if secure else []
        parts += [f"Max-Age={age}"] if age is not None else []
        self.headers.append(("set-cookie", "; ".join(parts)))

    def read(self) -> bytes:
        """The whole body."""
        if not isinstance(self.body, bytes):
            self.body = b"".join(self.body)
        return self.body

    def parts(self) -> Generator[bytes]:
        """The parts of the body, some of them empty. Closing the generator closes the body."""
        body = iter((self.body,)) if isinstance(self.body, bytes) else self.body
        try:
            yield from body
        finally:
            if isinstance(body, Generator):
                body.close()
