"""``tidemill doctor``: check the store and its workers, and advise on each problem."""

from __future__ import annotations

import sys

import click
import msgspec

from tidemill.cli import console
from tidemill.cli.connect import app_option, json_option, open_mill, url_option
from tidemill.doctor.examine import examine
from tidemill.doctor.findings import Finding
from tidemill.doctor.versions import installed, remedy
from tidemill.errors import TidemillError


@click.command()
@url_option
@app_option
@json_option
def doctor(url: str | None, app: str | None, as_json: bool) -> None:
    """Check the store, its disk, its clocks and its workers.

    Exit code 1 when something fails.
    """
    findings = [installed()]
    try:
        with open_mill(url, app) as mill:
            text = f"{mill.broker.url} opens, its format is known"
            findings.append(Finding("broker", "ok", text))
            findings += examine(mill)
    except TidemillError as error:
        problem = str(error).splitlines()[0]
        findings.append(Finding("broker", "fail", problem, remedy(problem)))
    failed = any(finding.status == "fail" for finding in findings)
    if as_json:
        checks = [msgspec.to_builtins(finding) for finding in findings]
        console.print_json({"ok": not failed, "checks": checks})
    else:
        out = console.console()
        for f in findings:
            line = console.styled(f.status)
            line.pad_right(6 - len(f.status))
            line.append(console.clean(f"{f.check:<11}{f.message}", one_line=True))
            out.print(line)
            if f.advice and f.status != "ok":
                out.print(console.clean(f"{'':17}→ {f.advice}", one_line=True))
    sys.exit(1 if failed else 0)
