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
    max_size bigint  NOT NULL DEFAULT 0,
    gated    boolean NOT NULL DEFAULT false  -- it has a limit
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
    tries      int     NOT NULL,             -- attempts it has; a retry gives it more
    attempt    int     NOT NULL DEFAULT 0,
    losses     int     NOT NULL DEFAULT 0,
    returns    int     NOT NULL DEFAULT 0,   -- how often it was leased and came back
    cancelling boolean NOT NULL DEFAULT false,
    id         text    COLLATE "C" NOT NULL UNIQUE,
    key        text    COLLATE "C",
    error      text    NOT NULL DEFAULT '',  -- why it waits
    trail      jsonb,                        -- attempts but the one in "done"
    envelope   bytea   NOT NULL,
    backoff    float8[],                     -- unless it is the default, see 29_backoff.sql
    body       int[],                        -- of a large body: its bytes in the envelope, and the bytes behind it
    linked     boolean NOT NULL DEFAULT false, -- part of a flow
    inputs     text[],                       -- ids whose ends come with its lease
    lane       text COLLATE "C",             -- its key of a limit
    cost       float8                        -- there
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
    keyed      boolean NOT NULL,
    linked     boolean NOT NULL DEFAULT false,
    lane       text    COLLATE "C"
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

-- Keys, see 15_unique.sql. The times belong to the last job in line for the key.
CREATE TABLE tidemill.key (
    key       text   COLLATE "C" PRIMARY KEY,
    holder    bigint NOT NULL,
    successor bigint,
    until     float8 NOT NULL DEFAULT 0,     -- the job has the key so long, also if it has succeeded
    since     float8 NOT NULL DEFAULT 0,     -- the acceptance of the first job that it replaced
    over      text   COLLATE "C"             -- the job that has succeeded and still holds the key
);
CREATE INDEX key_held ON tidemill.key (until) WHERE over IS NOT NULL;

CREATE TABLE tidemill.note (
    seq   bigint PRIMARY KEY,
    done  float8,
    total float8,
    log   jsonb  NOT NULL DEFAULT '[]',
    text  text   NOT NULL DEFAULT ''         -- of the report of progress
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
    kept      bigint NOT NULL DEFAULT 0,     -- finished jobs here that are bounded by number
    purged    bigint NOT NULL DEFAULT 0
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0);

CREATE TABLE tidemill.owner (
    number  int     GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id      text    COLLATE "C" NOT NULL UNIQUE,
    name    text    NOT NULL,
    kind    text    NOT NULL,
    host    text    NOT NULL,
    channel text    NOT NULL,                -- where it hears
    facts   bytea   NOT NULL,
    lease   float8  NOT NULL DEFAULT 0       -- seconds of silence after which a remote owner is given up
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
    missed     jsonb   NOT NULL DEFAULT '{}', -- what the last step could not settle and touch
    room       int     NOT NULL DEFAULT 0,   -- the jobs that puts may lease to it; 0 unless it is asleep
    handed     bigint[] NOT NULL DEFAULT '{}' -- the tokens of these leases that it has not heard of
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

-- The last call on each line to a client, so that a client whose reply was lost is answered again. A put
-- with a nonce leaves a row that does not change, for ten minutes. So rows with a nonce have an index of
-- their own, and changes of the other rows stay within their page.
CREATE TABLE tidemill.call (
    line   text   PRIMARY KEY,
    serial bigint NOT NULL,
    seen   float8 NOT NULL,
    answer jsonb,
    once   float8                            -- when the put with this nonce came
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0);
CREATE INDEX call_once ON tidemill.call (once) WHERE once IS NOT NULL;
CREATE INDEX call_line ON tidemill.call (line) WHERE once IS NULL;

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
    conflict text, verdict int, linked boolean, next text[], waits text, inputs text[],
    period float8, max_wait float8, lane text, cost float8, terms float8[], if_new boolean,
    backoff float8[], body int[]
);

-- What an owner wants of a step; "queues" NULL means all.
CREATE TYPE tidemill.want AS (
    count int, queues int[], mode text, tasks boolean, messages boolean, sleep boolean, alone boolean,
    hand boolean                             -- a put may lease to it while it sleeps
);

-- Moving: whether this store moves to another store, and how far other stores were taken in.

CREATE TABLE tidemill.departure (
    mark     text    NOT NULL,
    moves_to text    NOT NULL,
    sealed   boolean NOT NULL
);

CREATE TABLE tidemill.arrival (
    mark   text   PRIMARY KEY,
    cursor text   NOT NULL,
    first  bigint NOT NULL               -- the first of its numbers here
);

-- Flows. The row of a job in "behind" says what the job still waits for. The row stays as long as the job.
-- So the end of a group changes this row, and not the job.

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

-- Schedules, see 55_schedules.sql.

CREATE TABLE tidemill.schedule (
    name    text   COLLATE "C" PRIMARY KEY,
    version bigint NOT NULL,                 -- fresh with every change
    due     float8 NOT NULL,                 -- 0 for never
    next    float8,                          -- when it is to be handed out
    body    bytea  NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0);
CREATE INDEX schedule_next ON tidemill.schedule (next) WHERE next IS NOT NULL;

-- A job that a put hands over is seen before it is on disk, see 25_handoff.sql. A server that died empties
-- this table when it comes back: then something that was seen may have been lost.

CREATE UNLOGGED TABLE tidemill.uptime (
    since float8 NOT NULL
);
INSERT INTO tidemill.uptime VALUES (extract(epoch FROM now()));

-- Limits, see 26_limiter.sql and 27_limits.sql.
--
-- A gate is remembered for each queue that has a limit (q and its number), and for each lane: one key
-- of one limit by name (n and the name, chr(31), the key). The ready jobs of lanes are in "parked", not
-- in "ready"; of those that may start now the first ones stand in "stand".

CREATE TABLE tidemill.terms (
    id       text     COLLATE "C" PRIMARY KEY,  -- q and a queue's number, or n and a name
    terms    float8[] NOT NULL,                 -- see 26_limiter.sql
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

-- Numbers that were given away, for protocols whose jobs have numbers, see 72_job_numbers.sql.

CREATE TABLE tidemill.numbered (
    last bigint NOT NULL
);
INSERT INTO tidemill.numbered VALUES (0);

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
