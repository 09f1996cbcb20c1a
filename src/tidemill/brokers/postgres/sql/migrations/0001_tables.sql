-- The tables. A job's row in "job" is written once and not touched again on the way that most jobs
-- go; where the job stands is said by a narrow row in exactly one of four tables:
--
--     ready   may run now            later   scheduled, or waiting for the one before it under its key
--     lease   runs                   done    finished, kept for a while
--
-- Whoever deletes that row makes the move: two that want the same job meet at one row.
-- Times are seconds since 1970 on the server's clock. 0 means none.

CREATE TABLE tidemill.meta (
    version   int    NOT NULL,
    functions text   NOT NULL,               -- digest of the functions that were installed
    store     text   NOT NULL,               -- tells this store from every other
    born      float8 NOT NULL
);

CREATE TABLE tidemill.queue (
    number   int     GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name     text    COLLATE "C" NOT NULL UNIQUE,
    listed   boolean NOT NULL DEFAULT false, -- shown although nothing was ever accepted
    paused   boolean NOT NULL DEFAULT false,
    max_size bigint  NOT NULL DEFAULT 0
);

CREATE SEQUENCE tidemill.acceptance;         -- the order in which jobs were accepted

CREATE TABLE tidemill.job (
    seq        bigint  PRIMARY KEY,
    rank       bigint  NOT NULL,
    due        float8  NOT NULL,
    expires    float8  NOT NULL,
    timeout    float8  NOT NULL,
    ttr        float8  NOT NULL,
    result_ttl float8  NOT NULL,
    line       int     NOT NULL,             -- 4 * queue + 0 tasks, 1 messages, 2 tasks that were lost
    policy     int     NOT NULL,             -- attempts it was put with; 0 without end
    tries      int     NOT NULL,             -- attempts it has; a kick gives it more
    attempt    int     NOT NULL DEFAULT 0,
    losses     int     NOT NULL DEFAULT 0,
    returns    int     NOT NULL DEFAULT 0,   -- how often it was leased and came back
    cancelling boolean NOT NULL DEFAULT false,
    id         text    COLLATE "C" NOT NULL UNIQUE,
    key        text    COLLATE "C",
    error      text    NOT NULL DEFAULT '',  -- why it waits
    trail      jsonb,                        -- attempts but the one in "done"
    envelope   bytea   NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
        autovacuum_vacuum_cost_delay = 0);

CREATE TABLE tidemill.ready (
    line int    NOT NULL,
    rank bigint NOT NULL,
    seq  bigint NOT NULL,
    PRIMARY KEY (line, rank, seq)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
        autovacuum_vacuum_cost_delay = 0);

CREATE TABLE tidemill.later (
    seq     bigint  PRIMARY KEY,
    due     float8  NOT NULL,
    waiting boolean NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
        autovacuum_vacuum_cost_delay = 0);
CREATE INDEX later_due ON tidemill.later (due) WHERE NOT waiting;

CREATE TABLE tidemill.lease (
    seq        bigint  PRIMARY KEY,
    token      bigint  NOT NULL,             -- the fence: seq << 16 | returns
    serial     bigint  NOT NULL,             -- of the step that took it
    leased     float8  NOT NULL,
    deadline   float8,                       -- when a consumer's time is over
    result_ttl float8  NOT NULL,
    owner      int     NOT NULL,
    line       int     NOT NULL,
    attempt    int     NOT NULL,
    keyed      boolean NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
        autovacuum_vacuum_cost_delay = 0);
CREATE INDEX lease_deadline ON tidemill.lease (deadline) WHERE deadline IS NOT NULL;

CREATE TABLE tidemill.done (
    seq      bigint   PRIMARY KEY,
    prune    float8   NOT NULL,
    finished float8   NOT NULL,
    class    smallint NOT NULL,              -- 0 succeeded, no result · 1 result or other end · 2 failed
    state    smallint NOT NULL,              -- 4 succeeded · 5 failed · 6 cancelled · 7 expired
    attempt  int,                            -- from here on: the last attempt, if it just succeeded
    leased   float8,
    started  float8,
    ended    float8,
    worker   text,
    error    text     NOT NULL DEFAULT '',
    result   bytea
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
        autovacuum_vacuum_cost_delay = 0);
CREATE INDEX done_prune ON tidemill.done (class, prune);

CREATE TABLE tidemill.expiry (               -- of unfinished jobs
    seq bigint PRIMARY KEY,
    due float8 NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
        autovacuum_vacuum_cost_delay = 0);
CREATE INDEX expiry_due ON tidemill.expiry (due);

CREATE TABLE tidemill.key (
    key       text   COLLATE "C" PRIMARY KEY,
    holder    bigint NOT NULL,
    successor bigint
);

CREATE TABLE tidemill.note (
    seq   bigint PRIMARY KEY,
    done  float8,
    total float8,
    log   jsonb  NOT NULL DEFAULT '[]'
);

-- Counters. A row updated by every put would have them all wait for each other: each transaction adds
-- a row of differences instead, and now and then one folds them.
CREATE TABLE tidemill.tally (
    queue     int    NOT NULL,
    waiting   bigint NOT NULL DEFAULT 0,
    scheduled bigint NOT NULL DEFAULT 0,
    ready     bigint NOT NULL DEFAULT 0,
    running   bigint NOT NULL DEFAULT 0,
    accepted  bigint NOT NULL DEFAULT 0,
    succeeded bigint NOT NULL DEFAULT 0,
    failed    bigint NOT NULL DEFAULT 0,
    retried   bigint NOT NULL DEFAULT 0,
    cancelled bigint NOT NULL DEFAULT 0,
    expired   bigint NOT NULL DEFAULT 0,
    kept      bigint NOT NULL DEFAULT 0      -- finished jobs here that are bounded by number
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0);

CREATE TABLE tidemill.owner (
    number  int     GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id      text    COLLATE "C" NOT NULL UNIQUE,
    name    text    NOT NULL,
    kind    text    NOT NULL,
    host    text    NOT NULL,
    channel text    NOT NULL,                -- where it hears
    locked  boolean NOT NULL,                -- it holds a session lock as long as it lives
    facts   bytea   NOT NULL
);

-- What changes with every step of an owner, on a page of its own as good as.
CREATE TABLE tidemill.pulse (
    owner      int     PRIMARY KEY,
    serial     bigint  NOT NULL DEFAULT 0,   -- of its last step
    turn       bigint  NOT NULL DEFAULT 0,   -- times a step was begun, repeated ones too
    until      float8  NOT NULL,             -- of its lease
    due        float8  NOT NULL DEFAULT 0,   -- until when it sleeps
    last_queue int     NOT NULL DEFAULT 0,   -- that a fair want was served from
    asleep     boolean NOT NULL DEFAULT false,
    tasks      boolean NOT NULL DEFAULT false,
    messages   boolean NOT NULL DEFAULT false,
    alone      boolean NOT NULL DEFAULT false,
    queues     int[],                        -- none means all
    missed     jsonb   NOT NULL DEFAULT '{}' -- what the last step could not settle and touch
) WITH (fillfactor = 25, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0);

CREATE TABLE tidemill.command (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    owner  int    NOT NULL,
    serial bigint,                           -- of the step that took it
    verb   text   NOT NULL,
    token  bigint NOT NULL
);
CREATE INDEX command_owner ON tidemill.command (owner);

-- The last call on each line to a client, so that one whose reply was lost is answered again.
CREATE TABLE tidemill.call (
    line   text   PRIMARY KEY,
    serial bigint NOT NULL,
    seen   float8 NOT NULL,
    answer jsonb
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0);

-- Who waits for a job to end (its seq) or for space in a queue (minus its number).
CREATE TABLE tidemill.await (
    ref     bigint NOT NULL,
    waiter  text   NOT NULL,
    channel text   NOT NULL,
    until   float8 NOT NULL,
    PRIMARY KEY (waiter, ref)
);
CREATE INDEX await_ref ON tidemill.await (ref);

-- How a client wants things, sent with every call: seconds, but for keep_count.
CREATE TYPE tidemill.prefs AS (
    shift       float8,                      -- added to the clock; for tests
    keep        float8,
    keep_failed float8,
    protect     float8,
    keep_count  bigint,
    lease       float8                       -- of an owner
);

-- A job as it is put: "ord" is its place, "verdict" that of the verdict it follows.
CREATE TYPE tidemill.given AS (
    ord bigint, id text, envelope bytea, line int, rank bigint, delay float8, at float8,
    expires float8, timeout float8, ttr float8, result_ttl float8, tries int, key text,
    conflict text, verdict int
);

-- What an owner wants of a step; "queues" NULL means all.
CREATE TYPE tidemill.want AS (
    count int, queues int[], mode text, tasks boolean, messages boolean, sleep boolean, alone boolean
);
