-- Composite arguments and results of functions. Tables have no columns of these types.

DROP TYPE IF EXISTS tidemill.batch, tidemill.shape, tidemill.verdict, tidemill.step_request, tidemill.step_reply,
    tidemill.step_settled, tidemill.claimant, tidemill.chosen_jobs, tidemill.leased_jobs,
    tidemill.schedule_changes CASCADE;

-- Jobs to accept. "shape" has the number of each job's shape: see unpack.
CREATE TYPE tidemill.batch AS (ids text[], envelopes bytea[], shape int[], shapes jsonb);

-- The shape of a plain job.
CREATE TYPE tidemill.shape AS (
    line int, rank bigint, timeout float8, ttr float8, result_ttl float8, tries int, backoff float8[], body int[]
);

-- How one run of a job ended. close_attempt lists the outcomes. A "rank" of -1 keeps the rank.
CREATE TYPE tidemill.verdict AS (
    token bigint, outcome int, delay float8, error text, traceback text, started float8, ended float8,
    result bytea, hold boolean, rank bigint
);

-- The request of a step.
CREATE TYPE tidemill.step_request AS (
    me             int,
    serial         bigint,                   -- 0 for a step on behalf of a remote owner
    tokens         bigint[],                 -- plain successes, settled in bulk:
    starts         float8[],
    ends           float8[],
    results        bytea[],
    verdicts       jsonb,                    -- all other verdicts
    touch_tokens   bigint[],
    touch_seconds  float8[],
    notes          jsonb,                    -- [token, done, total, line, time, text] each
    heard          bigint[],                 -- tokens of hand-offs that arrived
    held           bigint[]                  -- all leases the owner knows of; NULL for no such list
);

CREATE TYPE tidemill.step_reply AS (
    answer jsonb, leases bytea, turn bigint, ended bigint[], moved boolean, hungry int, idle boolean,
    limited boolean
);

-- The results of settling. Each int[] lists positions, from 1, in an array of the request.
CREATE TYPE tidemill.step_settled AS (
    missed  int[],                           -- plain verdicts that found no lease
    lost    int[],                           -- other verdicts that found no lease
    late    int[],                           -- touches that found no lease
    ended   bigint[],                        -- jobs that ended
    moved   boolean
);

CREATE TYPE tidemill.claimant AS (me int, serial bigint, consumes boolean);

-- Jobs chosen for leasing, in order; see choose.
CREATE TYPE tidemill.chosen_jobs AS (
    seqs bigint[], lanes text[], numbers bigint[], turns bigint[], rows tid[], free bigint[]
);

-- The jobs leased in one claim: their number, and the packed leases. Limiters are charged with the
-- arrays: each job's partition, its cost, the number that it drew in a partition with a key
-- ("fresh"), and its line. The jobs in "overdue" were not leased, since they had expired.
CREATE TYPE tidemill.leased_jobs AS (
    got int, leases bytea, lanes text[], costs float8[], fresh bigint[], lines int[], overdue bigint[]
);

-- Changes of schedules. "owners" has, for each job of the batch, the position in "names" of the
-- change that puts the job.
CREATE TYPE tidemill.schedule_changes AS (
    names text[], expects bigint[], dues float8[], bodies bytea[], gone bigint[], dues_instead float8[],
    bodies_instead bytea[], owners int[]
);
