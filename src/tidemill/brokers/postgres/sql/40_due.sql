-- Time: jobs that come due, finished jobs that were kept for long enough, and the counters.

-- Whether no running transaction has changed a row with this xmax. An xmax has the low 32 bits of a
-- transaction's number. The high bits come from the numbers in use now.
CREATE OR REPLACE FUNCTION tidemill.is_free(changed xid) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    now_at bigint := txid_snapshot_xmax(txid_current_snapshot());
    ahead  bigint := (changed::text::bigint - now_at) & 4294967295;
BEGIN
    IF changed = '0'::xid THEN
        RETURN true;
    ELSIF ahead > 2147483647 THEN
        ahead := ahead - 4294967296;
    END IF;
    RETURN coalesce(txid_status(now_at + ahead) <> 'in progress', true);
EXCEPTION WHEN invalid_parameter_value THEN
    -- The number is a multixact's: several transactions lock the row.
    RETURN true;
END $$;

-- Whether a step could move a job that is due: no running transaction has changed its row. Usually
-- the first row answers this.
CREATE OR REPLACE FUNCTION tidemill.can_move(t float8) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM (
            (SELECT xmax AS x FROM later WHERE due <= t AND NOT waiting ORDER BY due LIMIT 1) UNION ALL
            (SELECT xmax FROM expiry WHERE due <= t ORDER BY due LIMIT 1) UNION ALL
            (SELECT xmax FROM lease WHERE deadline <= t ORDER BY deadline LIMIT 1)) AS firsts
        WHERE is_free(x)
    ) OR EXISTS (
        SELECT FROM (
            SELECT xmax::text AS x FROM later WHERE due <= t AND NOT waiting UNION
            SELECT xmax::text FROM expiry WHERE due <= t UNION
            SELECT xmax::text FROM lease WHERE deadline <= t) AS changers
        WHERE is_free(x::xid));
END $$;

-- When the next job comes due; NULL when no job will. If running transactions hold all due jobs,
-- for instance a caller's own transaction, the answer is a moment from now. Otherwise an owner
-- would step again and again until those transactions end.
CREATE OR REPLACE FUNCTION tidemill.next_job_due(t float8) RETURNS float8
LANGUAGE plpgsql AS $$
DECLARE
    first float8 := CASE WHEN NOT EXISTS (SELECT FROM departure WHERE sealed) THEN
        least((SELECT min(due) FROM later WHERE NOT waiting),
              (SELECT min(due) FROM expiry),
              (SELECT min(deadline) FROM lease WHERE deadline IS NOT NULL)) END;
BEGIN
    IF coalesce(first > t, true) OR can_move(t) THEN
        RETURN first;
    END IF;
    RETURN least(t + 0.1,
                 (SELECT min(due) FROM later WHERE due > t AND NOT waiting),
                 (SELECT min(due) FROM expiry WHERE due > t),
                 (SELECT min(deadline) FROM lease WHERE deadline > t));
END $$;

-- When the next job comes due, or time opens a limiter; NULL when neither will happen.
CREATE OR REPLACE FUNCTION tidemill.next_due(limits boolean, t float8) RETURNS float8
LANGUAGE plpgsql AS $$
BEGIN
    IF NOT limits THEN
        RETURN next_job_due(t);
    END IF;
    RETURN CASE WHEN NOT is_sealed() THEN
        least(next_job_due(t), (SELECT min(due) / 1e6 FROM gate WHERE due IS NOT NULL)) END;
END $$;

-- Jobs whose time is over, so that they may end: at most 5000 of each kind. NULL when nothing at
-- all has come due.
CREATE OR REPLACE FUNCTION tidemill.end_by_time(t float8) RETURNS bigint[]
LANGUAGE plpgsql AS $$
BEGIN
    IF coalesce(next_job_due(t) > t, true) THEN
        RETURN NULL;
    END IF;
    RETURN ARRAY (SELECT seq FROM expiry WHERE due <= t ORDER BY due LIMIT 5000)
        || ARRAY (SELECT seq FROM lease WHERE deadline <= t ORDER BY deadline LIMIT 5000);
END $$;

-- Move jobs whose time has come, up to a few thousand; true when anything has come due. Jobs that another
-- transaction moves are skipped. Only jobs "seen" by end_by_time may end, since their keys are locked. The
-- children of a job that came due later would be neither locked nor counted down.
CREATE OR REPLACE FUNCTION tidemill.come_due(seen bigint[], t float8, p tidemill.prefs)
RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    l     lease;
    which bigint;
    most  int := 5000;
    ends  bigint[];
    came  bigint[];
BEGIN
    IF seen IS NULL THEN
        RETURN false;
    END IF;
    ends := lock_flows(seen, all_bad(seen), names_of(seen));
    FOR l IN
        SELECT * FROM lease WHERE seq = ANY (seen) AND deadline <= t
        ORDER BY deadline FOR UPDATE SKIP LOCKED
    LOOP  -- the delay -1 means the delay of the job's policy, for tasks too
        PERFORM close_attempt(l, coalesce((SELECT name FROM owner WHERE number = l.owner), ''),
                              retry_of(l.token, -1, 'ttr passed without an ack', t), t, p);
    END LOOP;
    FOR which IN
        SELECT seq FROM expiry WHERE seq = ANY (seen) AND due <= t
        ORDER BY due FOR UPDATE SKIP LOCKED
    LOOP
        DELETE FROM expiry WHERE seq = which;
        IF unplace(which, false) IN ('ready', 'scheduled', 'waiting') THEN
            PERFORM finish(which, 'expired', 'not started before it expired', NULL, t, p);
        END IF;
    END LOOP;
    PERFORM flow(ends, t, p);
    WITH gone AS (
        DELETE FROM later WHERE seq = ANY (ARRAY (
            SELECT seq FROM later WHERE due <= t AND NOT waiting
            ORDER BY due LIMIT most FOR UPDATE SKIP LOCKED))
        RETURNING seq
    )
    SELECT array_agg(seq) INTO came FROM gone;
    PERFORM make_ready(came);
    RETURN true;
END $$;

-- Move due jobs, for a caller that locks nothing else.
CREATE OR REPLACE FUNCTION tidemill.move_due(t float8, p tidemill.prefs) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    seen bigint[] := end_by_time(t);
BEGIN
    PERFORM lock_keys(seen, '{}');
    RETURN come_due(seen, t, p);
END $$;

-- Forget finished jobs that are too old or too many, up to "most"; return how many.
CREATE OR REPLACE FUNCTION tidemill.prune(most int, t float8, p tidemill.prefs) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
    pruned  int := 0;
    surplus bigint;
    few     int;
BEGIN
    IF is_sealed() THEN
        RETURN 0;
    END IF;
    PERFORM look_at_flows(most, t, p);
    FOR c IN 0..2 LOOP
        pruned := pruned + prune_rows(ARRAY (
            SELECT ctid FROM done WHERE class = c AND prune <= t
            ORDER BY prune LIMIT most - pruned FOR UPDATE SKIP LOCKED));
    END LOOP;
    SELECT sum(kept) - p.keep_count INTO surplus FROM tally;
    FOR c IN 0..1 LOOP
        few := least(surplus, most - pruned);
        EXIT WHEN coalesce(few <= 0, true);
        few := prune_rows(ARRAY (
            SELECT ctid FROM done WHERE class = c AND (c = 0 OR finished <= t - p.protect)
            ORDER BY prune LIMIT few FOR UPDATE SKIP LOCKED));
        pruned := pruned + few;
        surplus := surplus - few;
    END LOOP;
    RETURN pruned;
END $$;

CREATE OR REPLACE FUNCTION tidemill.prune_rows(rows tid[]) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
    pruned int;
BEGIN
    IF cardinality(rows) = 0 THEN
        RETURN 0;
    END IF;
    WITH gone AS (
        DELETE FROM done WHERE ctid = ANY (rows) RETURNING seq, class
    ), jobs AS (
        DELETE FROM job WHERE seq = ANY (ARRAY (SELECT seq FROM gone)) RETURNING seq, line, linked
    ), edges AS (
        DELETE FROM edge WHERE parent = ANY (ARRAY (SELECT seq FROM jobs WHERE linked))
    ), counts AS (
        DELETE FROM behind WHERE seq = ANY (ARRAY (SELECT seq FROM jobs WHERE linked))
    ), notes AS (
        DELETE FROM note WHERE seq = ANY (ARRAY (SELECT seq FROM gone))
    ), counted AS (
        INSERT INTO tally (queue, kept)
        SELECT line / 4, -count(*) FROM jobs JOIN gone USING (seq) WHERE class < 2 GROUP BY 1
    )
    SELECT count(*) INTO pruned FROM gone;
    RETURN pruned;
END $$;

-- Fold the counters. A concurrent reader sees the old rows or the new row, never both.
CREATE OR REPLACE FUNCTION tidemill.fold() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF pg_try_advisory_xact_lock('tally'::regclass::oid::int, 0) THEN
        WITH gone AS (DELETE FROM tally RETURNING *)
        INSERT INTO tally
        SELECT queue, sum(waiting), sum(scheduled), sum(ready), sum(running), sum(accepted),
               sum(succeeded), sum(failed), sum(retried), sum(cancelled), sum(expired), sum(kept),
               sum(purged)
        FROM gone GROUP BY queue;
    END IF;
END $$;

-- Do chores, now and then, besides the work of a call. Only one call at a time folds the counters.
CREATE OR REPLACE FUNCTION tidemill.do_chores(most int, p tidemill.prefs) RETURNS void
LANGUAGE plpgsql SET search_path = tidemill, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    PERFORM fold();
    PERFORM prune(most, clock(p), p);
    PERFORM sweep_keys(most, clock(p));
    PERFORM sweep_gates(most, clock(p));
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'chores are put off: %', SQLERRM;
END $$;
