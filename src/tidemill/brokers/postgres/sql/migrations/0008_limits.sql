-- Limits: see 26_gates.sql and 27_limits.sql.
--
-- A gate is remembered for each queue that has a limit (q and its number), and for each lane: one key
-- of one limit by name (n and the name, chr(31), the key). The ready jobs of lanes are in "parked", not
-- in "ready"; of those that may start now the first ones stand in "stand".

CREATE TABLE tidemill.terms (
    id       text     COLLATE "C" PRIMARY KEY,  -- q and a queue's number, or n and a name
    terms    float8[] NOT NULL,                 -- see 26_gates.sql
    declared float8[],                          -- what code said last
    by_hand  boolean  NOT NULL                  -- "terms" were set by hand
);

-- What code says of a limit, or somebody sets, until it is taken over.
CREATE TABLE tidemill.said (
    n        bigint   GENERATED ALWAYS AS IDENTITY,
    id       text     COLLATE "C" NOT NULL,
    terms    float8[],                          -- none: by hand, have those hold that code declares
    by_code  boolean  NOT NULL,
    if_new   boolean  NOT NULL                  -- only if nothing is known of it
);

CREATE TABLE tidemill.gate (
    id       text     COLLATE "C" PRIMARY KEY,
    terms    text     COLLATE "C" NOT NULL,     -- their id
    filled   float8   NOT NULL DEFAULT 0,       -- when the bucket is full again; microseconds, as all here
    slots    float8[] NOT NULL DEFAULT '{}',    -- of the window: end, count, and so on
    failures int      NOT NULL DEFAULT 0,       -- attempts in a row
    until    float8   NOT NULL DEFAULT 0,       -- when the breaker lets the next one try
    opens    float8   NOT NULL DEFAULT 0,       -- of a queue: when it lets the next one start; 0 for now
    running  bigint   NOT NULL DEFAULT 0,       -- of a lane; a queue counts by its tallies
    turn     bigint   NOT NULL DEFAULT 0,       -- of a lane with a key: number of its last lease
    lines    int[]    NOT NULL DEFAULT '{}',    -- where the lane has jobs
    due      float8,                            -- when time opens it, and somebody is to look
    clear    float8                             -- when a lane that nothing is in can be forgotten
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0);
CREATE INDEX gate_due ON tidemill.gate (due) WHERE due IS NOT NULL;
CREATE INDEX gate_clear ON tidemill.gate (clear) WHERE clear IS NOT NULL;
CREATE INDEX gate_terms ON tidemill.gate (terms);

CREATE TABLE tidemill.parked (
    lane text   COLLATE "C" NOT NULL,
    line int    NOT NULL,
    rank bigint NOT NULL,
    seq  bigint NOT NULL,
    cost float8 NOT NULL,
    PRIMARY KEY (lane, line, rank, seq)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
        autovacuum_vacuum_cost_delay = 0);

CREATE TABLE tidemill.stand (
    line   int    NOT NULL,
    rank   bigint NOT NULL,
    number bigint NOT NULL,                     -- the job's, or the turn of its lane
    lane   text   COLLATE "C" NOT NULL,
    cost   float8 NOT NULL,
    PRIMARY KEY (line, rank, number, lane)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
        autovacuum_vacuum_cost_delay = 0);
CREATE INDEX stand_lane ON tidemill.stand (lane);

-- What happened at a gate, until somebody has the lock on it and takes it over.
CREATE TABLE tidemill.inbox (
    n    bigint  GENERATED ALWAYS AS IDENTITY,
    gate text    COLLATE "C" NOT NULL,
    line int,                                   -- a job of the lane came there
    ran  int     NOT NULL DEFAULT 0,            -- less of the lane run
    well boolean,                               -- an attempt has ended
    back float8,                                -- what was leased then goes back, and never ran
    cost float8
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0);

ALTER TABLE tidemill.queue ADD COLUMN gated boolean NOT NULL DEFAULT false;
ALTER TABLE tidemill.job
    ADD COLUMN lane text COLLATE "C",
    ADD COLUMN cost float8;
ALTER TABLE tidemill.lease ADD COLUMN lane text COLLATE "C";
ALTER TYPE tidemill.given
    ADD ATTRIBUTE lane   text,
    ADD ATTRIBUTE cost   float8,
    ADD ATTRIBUTE terms  float8[],
    ADD ATTRIBUTE if_new boolean;
