-- History: rows of numbers by period, see 52_history.sql.

CREATE TABLE tidemill.history (
    span int    NOT NULL,
    kind text   COLLATE "C" NOT NULL,
    at   bigint NOT NULL,
    name text   COLLATE "C" NOT NULL,
    data bytea  NOT NULL,                    -- the row, packed by the client
    PRIMARY KEY (span, kind, at, name)
);

-- Rows that steps have added. Their sums are not in the table above yet.
CREATE TABLE tidemill.history_added (
    n    bigint GENERATED ALWAYS AS IDENTITY,
    rows bytea  NOT NULL                     -- all rows of one step, packed by the client
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0);

-- One row: the count of changes of sums.
CREATE TABLE tidemill.history_changes (count bigint NOT NULL);
INSERT INTO tidemill.history_changes VALUES (0);
