"""The rights of a user who puts and runs jobs, but does not migrate.

The rights on sequences include ``UPDATE``. After a crash of the server, or on a standby that takes
over, numbers may be lost. The first call then moves the sequence past the numbers in use
(``25_handoff.sql``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.errors import InvalidOption

if TYPE_CHECKING:
    from tidemill.brokers.postgres.statements import Session

_RIGHTS = {
    "TABLES": "SELECT, INSERT, UPDATE, DELETE",
    "SEQUENCES": "USAGE, SELECT, UPDATE",
    "ROUTINES": "EXECUTE",
}

_MISSING = """
SELECT format('%%s on %%s', want, what) FROM (
    SELECT 'USAGE' AS want, 'schema ' || quote_ident(%(schema)s) AS what
    WHERE NOT has_schema_privilege(%(schema)s, 'USAGE')
    UNION ALL
    SELECT string_agg(w.want, ', ' ORDER BY n),
        CASE c.relkind WHEN 'S' THEN 'sequence ' ELSE 'table ' END || c.oid::regclass
    FROM pg_class AS c
    JOIN (VALUES ('r', 'SELECT', 1), ('r', 'INSERT', 2), ('r', 'UPDATE', 3), ('r', 'DELETE', 4),
                 ('v', 'SELECT', 1),
                 ('S', 'USAGE', 1), ('S', 'SELECT', 2), ('S', 'UPDATE', 3)) AS w (kind, want, n)
        ON c.relkind = w.kind::"char"
    WHERE c.relnamespace = %(schema)s::regnamespace
      AND NOT (c.relname = 'meta' AND w.want <> 'SELECT')
      AND (c.relkind <> 'S' OR c.relname = 'acceptance'
           OR (c.relname, w.want) = ('owner_number_seq', 'USAGE'))  -- others: identity
      AND NOT CASE WHEN c.relkind = 'S' THEN has_sequence_privilege(c.oid, w.want)
                   ELSE has_table_privilege(c.oid, w.want) END
    GROUP BY c.oid, c.relkind
    UNION ALL
    SELECT 'EXECUTE', count(*) || ' functions of schema ' || quote_ident(%(schema)s)
    FROM pg_proc AS p
    WHERE p.pronamespace = %(schema)s::regnamespace AND NOT has_function_privilege(p.oid, 'EXECUTE')
    HAVING count(*) > 0) AS x
ORDER BY what
"""


def statements(schema: str, role: str) -> list[str]:
    """Return the SQL that lets a role use a store, and the tables of later migrations."""
    if not role or "\0" in role:
        raise InvalidOption(f"--grants must be the name of a role, not {role!r}")
    where, whom = f'"{schema}"', '"' + role.replace('"', '""') + '"'
    given = [f"GRANT USAGE ON SCHEMA {where} TO {whom};"]
    for kind, rights in _RIGHTS.items():
        given.append(f"GRANT {rights} ON ALL {kind} IN SCHEMA {where} TO {whom};")
    given.append(f"REVOKE INSERT, UPDATE, DELETE ON {where}.meta FROM {whom};")
    later = f"ALTER DEFAULT PRIVILEGES IN SCHEMA {where} GRANT"
    for kind, rights in _RIGHTS.items():
        given.append(f"{later} {rights} ON {kind} TO {whom};")
    return given


def missing(session: Session) -> list[str]:
    """Return the rights that the user of a session lacks."""
    return [text for (text,) in session.query(_MISSING, {"schema": session.address.schema})]
