-- What becomes of a lease: settled, renewed, noted, given back, timed out or lost.

-- The hot path: jobs that succeeded, with nothing else to do. Those with a key go the long way.
-- Places of the verdicts that found their lease, and the jobs that ended.
CREATE OR REPLACE FUNCTION tidemill.settle_plain(
    me int, my_name text, tokens bigint[], starts float8[], ends float8[], results bytea[],
    limits boolean, t float8, p tidemill.prefs, OUT settled int[], OUT ended bigint[])
LANGUAGE plpgsql AS $$
DECLARE
    one   record;
    lines int[];
    lanes text[];
BEGIN
    -- Leases are locked in the order of their numbers, by whoever locks several. Each is looked up
    -- by itself, in the index: a join the planner may turn around, and walk
    -- through a table that has grown since.
    WITH v AS MATERIALIZED (
        SELECT DISTINCT ON (v.token) v.*, l.row
        FROM (SELECT * FROM unnest(tokens, starts, ends, results) WITH ORDINALITY
                  AS v (token, started, ended, result, ord) ORDER BY token) AS v
        CROSS JOIN LATERAL (
            SELECT lease.ctid AS row FROM lease
            WHERE lease.seq = v.token >> 16 AND lease.token = v.token AND lease.owner = me
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
        SELECT seq, t + CASE WHEN linked THEN p.protect
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
    IF cardinality(settled) < cardinality(tokens) THEN
        FOR one IN
            SELECT * FROM unnest(tokens, starts, ends, results) WITH ORDINALITY
                AS v (token, started, ended, result, ord)
            WHERE NOT ord = ANY (settled) ORDER BY ord
        LOOP
            IF settle(me, my_name, one.token, 0, 0, '', '', one.started, one.ended,
                      nullif(one.result, ''), false, t, p) THEN
                settled := settled || one.ord::int;
                ended := ended || (one.token >> 16);
            END IF;
        END LOOP;
    END IF;
END $$;

-- Close a lease. False: it was lost, and nothing changed.
CREATE OR REPLACE FUNCTION tidemill.settle(
    me int, my_name text, which bigint, outcome int, delay float8, why text, stack text,
    started float8, ended float8, answer bytea, hold boolean, t float8, p tidemill.prefs)
RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    l lease;
BEGIN
    IF outcome = 7 THEN
        IF carry(me, ARRAY[which], t) <> '{}' THEN
            RETURN true;
        END IF;
        outcome := 3;
        why := 'cancelled before it started';
        started := 0;
    END IF;
    SELECT * INTO l FROM lease
    WHERE seq = which >> 16 AND token = which AND owner = me FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM close_attempt(l, my_name, outcome, delay, why, stack, started, ended, answer, hold, t, p);
    RETURN true;
END $$;

-- The run that an attempt belongs to, when it follows those of a trail.
CREATE OR REPLACE FUNCTION tidemill.run_of(trail jsonb, number int) RETURNS int
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN trail IS NULL THEN 1
           ELSE coalesce((trail -> -1 ->> 8)::int, 1) + (number <= (trail -> -1 ->> 0)::int)::int END
$$;

-- Count and write down the attempt, and move the job on. Outcomes: 0 success, 1 retry, 2 fail,
-- 3 release, 4 snooze, 5 cancelled, 6 expired, 8 unknown; 7 is not one, see 48_carrier.sql.
CREATE OR REPLACE FUNCTION tidemill.close_attempt(
    l tidemill.lease, worker text, outcome int, delay float8, why text, stack text, started float8,
    ended float8, answer bytea, hold boolean, t float8, p tidemill.prefs) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    j    record;
    does int := outcome;
BEGIN
    IF outcome NOT IN (3, 4, 8) THEN
        UPDATE job SET
            attempt = attempt + 1,
            trail = (SELECT jsonb_agg(a ORDER BY n) FROM (
                SELECT a, n FROM jsonb_array_elements(coalesce(trail, '[]') || jsonb_build_array(
                    jsonb_build_array(attempt + 1, worker, l.leased, started, ended, outcome, why,
                                      stack, run_of(trail, attempt + 1)))) WITH ORDINALITY AS x (a, n)
                ORDER BY n DESC LIMIT 20) AS latest)
        WHERE seq = l.seq;
    END IF;
    SELECT attempt, tries, cancelling, expires, line, envelope INTO STRICT j FROM job WHERE seq = l.seq;
    IF does = 1 AND j.tries > 0 AND j.attempt >= j.tries THEN
        does := 2;
    END IF;
    IF does IN (1, 3, 4, 8) AND NOT j.cancelling AND NOT (j.expires > 0 AND j.expires <= t) THEN
        IF does = 1 THEN
            PERFORM count(j.line, 'retried');
            IF hold THEN
                UPDATE lease SET attempt = j.attempt + 1 WHERE seq = l.seq;
                PERFORM leave_gates(l, false, outcome, started);
                RETURN;
            END IF;
            IF delay < 0 OR (delay = 0 AND j.line & 3 = 1) THEN
                delay := backoff(j.envelope, j.attempt);
            END IF;
        END IF;
        UPDATE job SET due = CASE WHEN delay > 0 AND does <> 8 THEN t + delay ELSE 0 END,
                       error = CASE WHEN does IN (4, 8) THEN why ELSE '' END,
                       returns = returns + 1
        WHERE seq = l.seq;
        DELETE FROM lease WHERE seq = l.seq;
        PERFORM leave_gates(l, true, outcome, started);
        PERFORM count(j.line, 'running', -1);
        IF does = 8 THEN
            PERFORM put_aside(l.seq, delay, t);
        ELSE
            PERFORM place(l.seq, t);
        END IF;
        RETURN;
    END IF;
    DELETE FROM lease WHERE seq = l.seq;
    PERFORM leave_gates(l, true, outcome, started);
    PERFORM count(j.line, 'running', -1);
    IF does = 0 THEN
        PERFORM finish(l.seq, 'succeeded', '', answer, t, p);
    ELSIF does IN (2, 5, 6) THEN
        PERFORM finish(l.seq, CASE does WHEN 2 THEN 'failed' WHEN 5 THEN 'cancelled'
                                        ELSE 'expired' END, why, NULL, t, p);
    ELSIF j.cancelling THEN
        PERFORM finish(l.seq, 'cancelled', CASE WHEN does = 3 AND why <> '' THEN why
                                           WHEN does = 8 THEN 'cancelled before it started'
                                           ELSE 'cancelled while it was running' END, NULL, t, p);
    ELSE
        PERFORM finish(l.seq, 'expired', 'not started before it expired', NULL, t, p);
    END IF;
END $$;

-- Start a lease's ttr anew. False: it was lost.
CREATE OR REPLACE FUNCTION tidemill.touch(me int, which bigint, seconds float8, t float8)
RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE lease SET deadline = CASE WHEN deadline IS NOT NULL THEN t + CASE
        WHEN seconds > 0 THEN seconds
        ELSE (SELECT CASE WHEN ttr > 0 THEN ttr ELSE 60 END FROM job WHERE job.seq = lease.seq)
    END END
    WHERE seq = which >> 16 AND token = which AND owner = me;
    RETURN FOUND;
END $$;

-- Add a line to a job's log, which keeps the latest.
CREATE OR REPLACE FUNCTION tidemill.add_line(which bigint, line text, at float8) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO note (seq) VALUES (which) ON CONFLICT DO NOTHING;
    UPDATE note SET log = CASE WHEN jsonb_array_length(log) >= 100 THEN log - 0 ELSE log END
                          || jsonb_build_array(jsonb_build_array(at, line))
    WHERE seq = which;
END $$;

-- Keep what running jobs said: [token, done, total, line, time] each.
CREATE OR REPLACE FUNCTION tidemill.take_notes(me int, notes jsonb) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    n record;
BEGIN
    FOR n IN
        SELECT (x ->> 0)::bigint AS token, (x ->> 1)::float8 AS done, (x ->> 2)::float8 AS total,
               x ->> 3 AS line, (x ->> 4)::float8 AS at
        FROM jsonb_array_elements(notes) AS x
    LOOP
        PERFORM FROM lease WHERE seq = n.token >> 16 AND token = n.token AND owner = me;
        CONTINUE WHEN NOT FOUND;
        INSERT INTO note (seq) VALUES (n.token >> 16) ON CONFLICT DO NOTHING;
        IF n.done >= 0 THEN
            UPDATE note SET done = n.done, total = n.total WHERE seq = n.token >> 16;
        END IF;
        IF n.line <> '' THEN
            PERFORM add_line(n.token >> 16, n.line, n.at);
        END IF;
    END LOOP;
END $$;

-- Give back all that an owner held: by the witness's account, or, without one, with a loss each.
CREATE OR REPLACE FUNCTION tidemill.give_back(
    who int, worker text, witness boolean, ran bigint[], causes text[], t float8,
    p tidemill.prefs) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
    l    lease;
    at   int;
    held int := 0;
    j    record;
    mine bigint[] := ARRAY (SELECT seq FROM lease WHERE owner = who);
BEGIN
    PERFORM lock_keys(mine, '{}');
    mine := lock_flows(mine, all_bad(mine), '{}');
    FOR l IN SELECT * FROM lease WHERE owner = who ORDER BY seq FOR UPDATE LOOP
        held := held + 1;
        at := array_position(ran, l.token);
        IF NOT witness AND l.line & 3 = 1 THEN
            PERFORM close_attempt(l, worker, 1, 0, 'its consumer died', '', 0, t, NULL, false, t, p);
            CONTINUE;
        END IF;
        IF NOT witness THEN
            UPDATE job SET losses = losses + 1, line = line - (line & 3) + CASE line & 3
                WHEN 1 THEN 1 ELSE 2 END
            WHERE seq = l.seq RETURNING losses, tries, line INTO j;
            -- its tallies go by the queue, which is the same
            IF j.tries > 0 AND j.losses >= j.tries THEN
                DELETE FROM lease WHERE seq = l.seq;
                PERFORM leave_gates(l, true, NULL, 0);
                PERFORM count(j.line, 'running', -1);
                PERFORM finish(l.seq, 'failed', format('lost %s times with its worker', j.losses),
                               NULL, t, p);
                CONTINUE;
            END IF;
        END IF;
        IF witness AND at IS NOT NULL THEN
            PERFORM close_attempt(l, worker, 1, 0, causes[at], '', 0, t, NULL, false, t, p);
        ELSE
            PERFORM close_attempt(l, worker, 3, 0, CASE WHEN witness THEN 'cancelled before it started'
                                  ELSE '' END, '', CASE WHEN witness THEN 0 ELSE l.leased END,  -- it may have run
                                  0, NULL, false, t, p);
        END IF;
    END LOOP;
    PERFORM flow(mine, t, p);
    RETURN held;
END $$;
