"""Output: tables and colours for people, one JSON document for programs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec

from tidemill.core.clock import clock as clocks
from tidemill.doctor.words import duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.segment import Segment
    from rich.text import Text

_STYLES = {
    "ready": "cyan",
    "running": "blue",
    "scheduled": "magenta",
    "waiting": "magenta",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "yellow",
    "expired": "yellow",
    "ok": "green",
    "warn": "yellow",
    "fail": "bold red",
    "paused": "yellow",
}
_PIPE_WIDTH = 10_000  # columns of a pipe, wide enough that no line is cut
_LEAST = 12  # a column is cut to this width before other columns are left out
_CUT_LEAST = 4  # a column is cut to this width when no column can be left out


def console(stderr: bool = False) -> Console:
    """A console with colours on terminals only. NO_COLOR turns them off, and markup is ignored."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
    return Console(
        file=stream, width=width, markup=False, highlight=False, emoji=False, soft_wrap=False
    )


class Table:
    """Rows of cells, as lines for rich, whose own table takes ten times as long for many rows."""

    marked = 0
    """The number of a row to show in reverse colours, from 1 on; 0 for none."""

    def __init__(self, columns: Sequence[tuple[int, bool]], rows: Sequence[Sequence[Any]]) -> None:
        """``columns`` have a width, and True if they are aligned to the right."""
        # A cell is a string or a styled text. The first row is the header.
        self._columns, self._rows = columns, rows

    def __rich_console__(self, console: Console, options: object) -> Iterator[Segment]:
        from rich.segment import Segment
        from rich.style import Style

        styles = {self.marked: Style(reverse=True), 0: Style(bold=True)}
        for number, row in enumerate(self._rows):
            plain, style = "", styles.get(number)
            for n, (cell, (width, is_right)) in enumerate(zip(row, self._columns, strict=True)):
                plain += "  " if n else ""
                if isinstance(cell, str):
                    plain += _fitted(cell, width, is_right)
                    continue
                text = cell.copy()
                text.truncate(width, overflow="ellipsis")
                before = " " * (width - text.cell_len) if is_right else ""
                yield Segment(plain + before, style)
                yield from text.render(console)
                plain = "" if is_right else " " * (width - text.cell_len)
            yield Segment(plain if number == self.marked else plain.rstrip(), style)
            yield Segment.line()


def table(out: Console, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A table without borders, fitted to the width of the console.

    A column's name may end with marks. ``#`` marks a column of numbers, ``…`` a column that may be
    cut. ``?`` marks a column that a narrow console leaves out, beginning with the rightmost.
    """
    names = [name.rstrip("#…?") for name in columns]
    cells: list[list[Any]] = [names]
    cells += ([_cell(cell) for cell in row] for row in rows)
    needs = [max(_width(row[n]) for row in cells) for n in range(len(names))]
    least = [
        min(need, _LEAST) if _has(name, "…") else need
        for need, name in zip(needs, columns, strict=True)
    ]
    shown = list(range(len(columns)))
    for n in reversed(range(len(columns))):
        if _has(columns[n], "?") and _total(least, shown) > out.width:
            shown.remove(n)
    for n in reversed(shown):
        if _has(columns[n], "…"):
            least[n] -= max(0, min(_total(least, shown) - out.width, least[n] - _CUT_LEAST))
    while _total(least, shown) > out.width and max(least[n] for n in shown) > 1:
        least[max(shown, key=least.__getitem__)] -= 1
    spare = max(0, out.width - _total(least, shown))
    fitted = []
    for n in shown:
        more = max(0, min(spare, needs[n] - least[n]))
        spare -= more
        fitted.append((least[n] + more, _has(columns[n], "#")))
    return Table(fitted, [[row[n] for n in shown] for row in cells])


def _width(cell: str | Text) -> int:
    from rich.cells import cell_len

    if isinstance(cell, str):
        return len(cell) if cell.isascii() else cell_len(cell)
    return cell.cell_len


def _fitted(text: str, width: int, is_right: bool) -> str:
    from rich.cells import set_cell_size

    spare = width - _width(text)
    if spare < 0:
        return set_cell_size(text, width - 1) + "…"
    return " " * spare + text if is_right else text + " " * spare


def _has(name: str, mark: str) -> bool:
    return mark in name[len(name.rstrip("#…?")) :]


def _total(widths: Sequence[int], shown: Sequence[int]) -> int:
    return sum(widths[n] + 2 for n in shown) - 2


def _cell(cell: object) -> str | Text:
    from rich.text import Text

    return cell if isinstance(cell, Text) else clean(str(cell), one_line=True)


def styled(word: str) -> Text:
    from rich.text import Text

    return Text.assemble((word, style_of(word)))


def style_of(word: str) -> str:
    return _STYLES.get(word, "")


def clean(text: str, *, one_line: bool = False) -> str:
    """Text from jobs; characters that could control a terminal are escaped."""
    if text.isprintable():
        return text
    keep = "" if one_line else "\n\t"
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def clock(moment: float) -> str:
    """A wall time in the local zone, to the millisecond."""
    if not moment:
        return "-"
    local = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    return f"{local}.{int(moment % 1 * 1000):03d}"


def ago(moment: float) -> str:
    """The time from a wall time until now, or from now until a wall time."""
    if not moment:
        return "-"
    seconds = clocks.wall() - moment
    return f"in {duration(-seconds)}" if seconds < 0 else duration(seconds)


def plain(value: Any) -> Any:
    """A value for JSON; a value that JSON cannot hold becomes its Python text."""
    try:
        msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return repr(value)
    return value


def print_json(document: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def answer(document: Any, as_json: bool, *lines: str) -> None:
    if as_json:
        print_json(document)
    else:
        click.echo("\n".join(lines))


def answer_table(
    document: Any, as_json: bool, columns: Sequence[str], rows: Iterable[Sequence[Any]], none: str
) -> None:
    """Print one JSON document for programs, or a table for people; ``none`` replaces no rows."""
    out, cells = console(), [*rows]
    if as_json:
        print_json(document)
    elif cells:
        out.print(table(out, columns, cells))
    else:
        out.print(none)
