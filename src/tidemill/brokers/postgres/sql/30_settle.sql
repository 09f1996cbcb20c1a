-- Settling: the ends of runs, and the reports of running jobs.

-- The hot path: settle successes with nothing else to do. "settle" takes the successes of jobs with
-- a key. Returns the places of the verdicts that found their lease, and the jobs that ended.
CREATE OR REPLACE FUNCTION tidemill.settle_plain(
    req tidemill.step_request, my_name text, limits boolean, t float8, p tidemill.prefs, OUT settled int[], OUT ended bigint[])
LANGUAGE plpgsql AS $$
DECLARE
    one   record;
    lines int[];
    lanes text[];
BEGIN
    -- All transactions that lock several leases lock them in the order of their numbers. Each lease is
    -- looked up alone, in the index: the planner could turn a join around, and scan a table that has
    -- grown since.
    WITH v AS MATERIALIZED (
        SELECT DISTINCT ON (v.token) v.*, l.row
        FROM (SELECT * FROM unnest(req.tokens, req.starts, req.ends, req.results) WITH ORDINALITY
                  AS v (token, started, ended, result, ord) ORDER BY token) AS v
        CROSS JOIN LATERAL (
            SELECT lease.ctid AS row FROM lease
            WHERE lease.seq = v.token >> 16 AND lease.token = v.token AND lease.owner = req.me
              AND NOT lease.keyed
            FOR UPDATE OFFSET 0) AS l
        ORDER BY v.token, v.ord
    ), deleted AS (
        DELETE FROM lease WHERE ctid = ANY (ARRAY (SELECT row FROM v)) RETURNING *
    ), gone AS MATERIALIZED (
        SELECT deleted.*, v.started, v.ended, nullif(v.result, '') AS result, v.ord
        FROM deleted JOIN v USING (token)
    ), mortal AS (
        DELETE FROM expiry WHERE seq = ANY (ARRAY (SELECT seq FROM gone))
    ), acked AS (
        DELETE FROM job WHERE seq = ANY (ARRAY (SELECT seq FROM gone WHERE line & 3 = 1))
    ), said AS (
        DELETE FROM note WHERE seq = ANY (ARRAY (SELECT seq FROM gone WHERE line & 3 = 1))
    ), needless AS (
        DELETE FROM behind
        WHERE seq = ANY (ARRAY (SELECT seq FROM gone WHERE line & 3 = 1 AND linked))
    ), kept AS (
        INSERT INTO done (seq, prune, finished, class, state, attempt, leased, started, ended,
                          worker, result)
        SELECT seq, t + CASE WHEN linked THEN first_look('succeeded', result_ttl, p)
                             ELSE keep_for('succeeded', result_ttl, result IS NOT NULL, p) END, t,
               CASE WHEN linked THEN 3 WHEN result IS NULL THEN 0 ELSE 1 END, 4, attempt, leased, gone.started,
               gone.ended, my_name, result
        FROM gone WHERE line & 3 <> 1
    ), counted AS (
        INSERT INTO tally (queue, running, succeeded, kept)
        SELECT line / 4, -count(*), count(*),
               count(*) FILTER (WHERE line & 3 <> 1 AND NOT linked)
        FROM gone GROUP BY 1
    )
    SELECT coalesce(array_agg(ord), '{}'), coalesce(array_agg(seq), '{}'), array_agg(line), array_agg(lane)
    INTO settled, ended, lines, lanes FROM gone;
    IF limits THEN
        PERFORM leave_all(lines, lanes);
    END IF;
    IF cardinality(settled) < cardinality(req.tokens) THEN
        FOR one IN
            SELECT * FROM unnest(req.tokens, req.starts, req.ends, req.results) WITH ORDINALITY
                AS v (token, started, ended, result, ord)
            WHERE NOT ord = ANY (settled) ORDER BY ord
        LOOP
            IF settle(req.me, my_name, ROW(one.token, 0, 0, '', '', one.started, one.ended,
                      nullif(one.result, ''), false, -1)::verdict, t, p) THEN
                settled := settled || one.ord::int;
                ended := ended || (one.token >> 16);
            END IF;
        END LOOP;
    END IF;
END $$;

-- Close a lease. False when the lease was lost: then nothing changes.
CREATE OR REPLACE FUNCTION tidemill.settle(
    me int, my_name text, v tidemill.verdict, t float8, p tidemill.prefs) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    l lease;
BEGIN
    SELECT * INTO l FROM lease
    WHERE seq = v.token >> 16 AND token = v.token AND owner = me FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM close_attempt(l, my_name, v, t, p);
    RETURN true;
END $$;

-- The verdict that gives a lease back; "began" is 0 when the job did not start.
CREATE OR REPLACE FUNCTION tidemill.release_of(token bigint, why text, began float8)
RETURNS tidemill.verdict
LANGUAGE sql IMMUTABLE AS $$
    SELECT ROW(token, 3, 0, why, '', began, 0, NULL, false, -1)::tidemill.verdict
$$;

-- The verdict that retries a job which ended without a verdict; a negative delay means its policy's delay.
CREATE OR REPLACE FUNCTION tidemill.retry_of(token bigint, delay float8, why text, ended float8)
RETURNS tidemill.verdict
LANGUAGE sql IMMUTABLE AS $$
    SELECT ROW(token, 1, delay, why, '', 0, ended, NULL, false, -1)::tidemill.verdict
$$;

-- The number of the run to which the attempt after a trail belongs. A retry by hand begins a new run, whose
-- attempts count from 1 again.
CREATE OR REPLACE FUNCTION tidemill.run_of(trail jsonb, number int) RETURNS int
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN trail IS NULL THEN 1
           ELSE coalesce((trail -> -1 ->> 8)::int, 1) + (number <= (trail -> -1 ->> 0)::int)::int END
$$;

-- Count and record the attempt, and move the job on. Outcomes: 0 success, 1 retry, 2 fail, 3 release,
-- 4 snooze, 5 cancelled, 6 expired.
CREATE OR REPLACE FUNCTION tidemill.close_attempt(
    l tidemill.lease, worker text, v tidemill.verdict, t float8, p tidemill.prefs) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    j    record;
    does int := v.outcome;
BEGIN
    IF v.outcome NOT IN (3, 4) THEN
        UPDATE job SET
            attempt = attempt + 1,
            trail = (SELECT jsonb_agg(a ORDER BY n) FROM (
                SELECT a, n FROM jsonb_array_elements(coalesce(trail, '[]') || jsonb_build_array(
                    jsonb_build_array(attempt + 1, worker, l.leased, v.started, v.ended, v.outcome, v.error,
                                      v.traceback, run_of(trail, attempt + 1)))) WITH ORDINALITY AS x (a, n)
                ORDER BY n DESC LIMIT 20) AS latest)
        WHERE seq = l.seq;
    END IF;
    SELECT attempt, tries, cancelling, expires, line, backoff INTO STRICT j FROM job WHERE seq = l.seq;
    IF does = 1 AND j.tries > 0 AND j.attempt >= j.tries THEN
        does := 2;
    END IF;
    IF does IN (1, 3, 4) AND NOT j.cancelling AND NOT (j.expires > 0 AND j.expires <= t) THEN
        IF does = 1 THEN
            PERFORM count(j.line, 'retried');
            IF v.hold THEN
                UPDATE lease SET attempt = j.attempt + 1 WHERE seq = l.seq;
                PERFORM leave_gates(l, false, v.outcome, v.started);
                RETURN;
            END IF;
            IF v.delay < 0 OR (v.delay = 0 AND j.line & 3 = 1) THEN
                v.delay := backoff(j.backoff, j.line & 3 = 1, j.attempt);
            END IF;
        END IF;
        UPDATE job SET due = CASE WHEN v.delay > 0 THEN t + v.delay ELSE 0 END,
                       error = CASE WHEN does = 4 THEN v.error ELSE '' END,
                       returns = returns + 1
        WHERE seq = l.seq;
        DELETE FROM lease WHERE seq = l.seq;
        PERFORM leave_gates(l, true, v.outcome, v.started);
        PERFORM count(j.line, 'running', -1);
        PERFORM place(l.seq, t);
        RETURN;
    END IF;
    DELETE FROM lease WHERE seq = l.seq;
    PERFORM leave_gates(l, true, v.outcome, v.started);
    PERFORM count(j.line, 'running', -1);
    IF does = 0 THEN
        PERFORM finish(l.seq, 'succeeded', '', v.result, t, p);
    ELSIF does IN (2, 5, 6) THEN
        PERFORM finish(l.seq, CASE does WHEN 2 THEN 'failed' WHEN 5 THEN 'cancelled'
                                        ELSE 'expired' END, v.error, NULL, t, p);
    ELSIF j.cancelling THEN
        PERFORM finish(l.seq, 'cancelled', CASE WHEN does = 3 AND v.error <> '' THEN v.error
                                           ELSE 'cancelled while it was running' END, NULL, t, p);
    ELSE
        PERFORM finish(l.seq, 'expired', 'not started before it expired', NULL, t, p);
    END IF;
END $$;

-- Add a line to a job's log, which keeps the latest lines.
CREATE OR REPLACE FUNCTION tidemill.add_line(which bigint, line text, at float8) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO note (seq) VALUES (which) ON CONFLICT DO NOTHING;
    UPDATE note SET log = CASE WHEN jsonb_array_length(log) >= 100 THEN log - 0 ELSE log END
                          || jsonb_build_array(jsonb_build_array(at, line))
    WHERE seq = which;
END $$;

-- Keep the notes of running jobs: [token, done, total, line, time, text] each.
CREATE OR REPLACE FUNCTION tidemill.take_notes(me int, notes jsonb) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    n record;
BEGIN
    FOR n IN
        SELECT (x ->> 0)::bigint AS token, (x ->> 1)::float8 AS done, (x ->> 2)::float8 AS total,
               x ->> 3 AS line, (x ->> 4)::float8 AS at, coalesce(x ->> 5, '') AS text
        FROM jsonb_array_elements(notes) AS x
    LOOP
        PERFORM FROM lease WHERE seq = n.token >> 16 AND token = n.token AND owner = me;
        CONTINUE WHEN NOT FOUND;
        INSERT INTO note (seq) VALUES (n.token >> 16) ON CONFLICT DO NOTHING;
        IF n.done >= 0 THEN
            UPDATE note SET done = n.done, total = n.total, text = n.text WHERE seq = n.token >> 16;
        END IF;
        IF n.line <> '' THEN
            PERFORM add_line(n.token >> 16, n.line, n.at);
        END IF;
    END LOOP;
END $$;
