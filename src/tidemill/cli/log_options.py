"""The options of commands that log: ``-v``, ``-q``, ``--log-level`` and ``--log-format``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from tidemill.core.log_output import FORMATS, LEVELS, LogSettings


def log_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options, as ``logs``. Child processes find them in the environment."""

    @click.option("-v", "--verbose", is_flag=True, help="Log in detail: --log-level debug.")
    @click.option("-q", "--quiet", is_flag=True, help="Log trouble only: --log-level warning.")
    @click.option(
        "--log-level",
        type=click.Choice(LEVELS, case_sensitive=False),
        envvar="TIDEMILL_LOG",
        show_envvar=True,
        help="The lowest level that is logged; default info.",
    )
    @click.option(
        "--log-format",
        type=click.Choice(FORMATS, case_sensitive=False),
        envvar="TIDEMILL_LOG_FORMAT",
        show_envvar=True,
        default="text",
        show_default=True,
        help="Log lines of text, or one JSON object on each line.",
    )
    @functools.wraps(function)
    def command(
        *args: Any,
        verbose: bool,
        quiet: bool,
        log_level: str | None,
        log_format: str,
        **options: Any,
    ) -> Any:
        source = click.get_current_context().get_parameter_source("log_level")
        if source is not ParameterSource.COMMANDLINE:  # a variable must not override an option
            log_level = "debug" if verbose else "warning" if quiet else log_level
        logs = LogSettings(log_level or "", log_format)
        logs.export()
        return function(*args, logs=logs, **options)

    return command
