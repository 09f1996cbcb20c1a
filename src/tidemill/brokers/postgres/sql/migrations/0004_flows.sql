-- Jobs that wait for others. What a job still waits for is a row of its own in "behind", kept as long
-- as the job is: so a group's end is counted without touching the job.

ALTER TABLE tidemill.job
    ADD COLUMN linked boolean NOT NULL DEFAULT false,  -- part of a flow
    ADD COLUMN inputs text[];                          -- ids whose ends come with its lease
ALTER TABLE tidemill.lease ADD COLUMN linked boolean NOT NULL DEFAULT false;

CREATE TABLE tidemill.behind (
    seq      bigint  PRIMARY KEY,
    id       text    COLLATE "C" NOT NULL UNIQUE,
    waits    text    NOT NULL,                         -- success · any · failure · barrier
    pending  bigint  NOT NULL,                         -- before it, that have not ended
    failures bigint  NOT NULL,                         -- before it, that did not succeed
    dropped  boolean NOT NULL DEFAULT false,           -- it ended for how those before it ended
    delay    float8  NOT NULL,                         -- from when it may begin
    at       float8  NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0);

CREATE TABLE tidemill.edge (
    parent bigint NOT NULL,                            -- a job, by its number
    child  text   COLLATE "C" NOT NULL                 -- one behind it, by its id
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
        autovacuum_vacuum_cost_delay = 0);
CREATE INDEX edge_parent ON tidemill.edge (parent);

ALTER TYPE tidemill.given
    ADD ATTRIBUTE linked boolean,
    ADD ATTRIBUTE next   text[],
    ADD ATTRIBUTE waits  text,
    ADD ATTRIBUTE inputs text[];
