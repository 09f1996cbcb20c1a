"""The settings of a session with PostgreSQL, for ``postgresql://`` and for ``django://``.

A role, a database or a server may have other defaults. Behind PgBouncer, settings last for one
transaction and then concern the sessions of others: there nothing is set.
"""

from __future__ import annotations

_SETTINGS = {
    # A step must see what other transactions commit during the step.
    "default_transaction_isolation": "read committed",
    # Times arrive as text.
    "extra_float_digits": 1,
    # A connection that listens is idle for hours, and holds locks.
    "idle_session_timeout": 0,
    # These would end the wait for a synchronous standby, and the server would report success.
    "statement_timeout": 0,
    "transaction_timeout": 0,
}


def settings_of(backend: int, **more: object) -> str:
    """The statement that makes the settings of a new session, and ``more`` settings.

    ``backend`` is the process of the server, as the server told the driver. The statement leaves
    out settings that older servers do not know. It answers with the process that runs it: behind
    PgBouncer this is another process.
    """
    values = ", ".join(f"('{name}', '{value}')" for name, value in {**_SETTINGS, **more}.items())
    return (
        "SELECT pg_backend_pid(), (SELECT count(set_config(name, value, false)) "
        f"FROM (VALUES {values}) AS s(name, value) "
        f"WHERE pg_backend_pid() = {backend} AND current_setting(name, true) IS NOT NULL)"
    )
