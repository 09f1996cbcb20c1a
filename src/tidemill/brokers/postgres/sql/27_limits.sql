-- Limits of queues, and of partitions ("lanes"): each key of each named limit. The arithmetic is in
-- 26_limiter.sql, leasing under a limit in 47_partition_claim.sql. A partition stands in a line (a
-- row of "stand") when its first job there may start.
--
-- A limiter is a row of "gate". Only the holder of its lock changes it. Only look_again waits for that
-- lock, and holds no other lock of a row meanwhile. Puts, verdicts and acts write events into "inbox", and the holder of the lock takes
-- them over. A transaction that does not get the lock leaves its events to the holder. Both look
-- into the inbox once more after their commits (open_gates). So the later of the two finds the
-- events.
--
-- Readers of "terms", the limit settings, hold the lock of "terms" shared. A writer holds this lock
-- alone, so nobody else holds a limiter meanwhile.

CREATE OR REPLACE FUNCTION tidemill.is_limited() RETURNS boolean
LANGUAGE plpgsql AS $$ BEGIN RETURN EXISTS (SELECT FROM terms); END $$;

-- False while somebody changes settings. A claim then leases nothing; the writer wakes owners
-- afterwards.
CREATE OR REPLACE FUNCTION tidemill.may_read_terms() RETURNS boolean
LANGUAGE plpgsql AS $$ BEGIN RETURN pg_try_advisory_xact_lock_shared('terms'::regclass::oid::int, 0); END $$;

CREATE OR REPLACE FUNCTION tidemill.terms_of(gate text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$ SELECT split_part(gate, chr(31), 1) $$;

-- -- events ---------------------------------------------------------------------------------------

-- Park the jobs of partitions among these jobs, which are ready and stand nowhere.
CREATE OR REPLACE FUNCTION tidemill.park(jobs bigint[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    WITH aside AS (
        INSERT INTO parked (lane, line, rank, seq, cost)
        SELECT j.lane, j.line, j.rank, j.seq, j.cost
        FROM unnest(jobs) AS x (seq) CROSS JOIN LATERAL (
            SELECT * FROM job WHERE job.seq = x.seq AND lane IS NOT NULL OFFSET 0) AS j
        RETURNING lane, line
    )
    INSERT INTO inbox (gate, line) SELECT DISTINCT lane, line FROM aside;
END $$;

-- Make scheduled jobs ready; true when some of them are under limits.
CREATE OR REPLACE FUNCTION tidemill.make_ready(jobs bigint[]) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    laned bigint[];
BEGIN
    WITH placed AS MATERIALIZED (
        SELECT j.line, j.rank, x.seq, j.lane FROM unnest(jobs) AS x (seq)
        CROSS JOIN LATERAL (SELECT line, rank, lane FROM job WHERE job.seq = x.seq OFFSET 0) AS j
    ), prompt AS (
        INSERT INTO ready (line, rank, seq) SELECT line, rank, seq FROM placed WHERE lane IS NULL
    ), counted AS (
        INSERT INTO tally (queue, ready, scheduled)
        SELECT line / 4, count(*), -count(*) FROM placed GROUP BY 1
    )
    SELECT array_agg(seq) FILTER (WHERE lane IS NOT NULL) INTO laned FROM placed;
    IF laned IS NOT NULL THEN
        PERFORM park(laned);
    END IF;
    RETURN laned IS NOT NULL;
END $$;

-- Park jobs that put_plain has stored, and declare their limits.
CREATE OR REPLACE FUNCTION tidemill.park_new(ids text[], shapes jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM declare_all(shapes);
    PERFORM park(ARRAY (
        SELECT j.seq FROM unnest(ids) AS x (id) CROSS JOIN LATERAL (
            SELECT seq FROM job WHERE job.id = x.id AND lane IS NOT NULL OFFSET 0) AS j
        WHERE NOT EXISTS (SELECT FROM later WHERE later.seq = j.seq)));
END $$;

-- Take a ready job from its partition; false when the job is not there.
CREATE OR REPLACE FUNCTION tidemill.unpark(which text, l int, r bigint, job_seq bigint)
RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM parked WHERE lane = which AND line = l AND rank = r AND seq = job_seq;
    IF FOUND THEN
        INSERT INTO inbox (gate) VALUES (which);
        RETURN true;
    END IF;
    RETURN false;
END $$;

-- Record the settings that a job declares for its limit.
CREATE OR REPLACE FUNCTION tidemill.declare(lane text, new float8[], only_new boolean) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    -- Without "only_new", pending settings in "said" count, too.
    IF NOT EXISTS (SELECT FROM terms WHERE id = terms_of(lane) AND (only_new
                   OR declared IS NOT DISTINCT FROM new AND NOT EXISTS (SELECT FROM said WHERE said.id = terms.id))) THEN
        INSERT INTO said (id, terms, by_code, if_new) VALUES (terms_of(lane), new, true, only_new);
    END IF;
END $$;

-- Record the settings that jobs of these shapes declare for their limits.
CREATE OR REPLACE FUNCTION tidemill.declare_all(shapes jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM declare(id, new, only_new) FROM (
        SELECT terms_of(lane) AS id, terms AS new, if_new AS only_new
        FROM jsonb_to_recordset(shapes) AS s (n int, lane text, terms float8[], if_new boolean)
        WHERE lane IS NOT NULL GROUP BY 1, 2, 3 ORDER BY min(n)) AS x;
END $$;

-- Tell limiters that a lease has ended, or that an attempt has ended and the lease stays. "outcome"
-- is NULL without a verdict. A job that goes back without a run returns its tokens. A job has run
-- if it has a start, or an earlier attempt under the same lease.
CREATE OR REPLACE FUNCTION tidemill.leave_gates(l tidemill.lease, over boolean, outcome int, started float8)
RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    taken float8;
BEGIN
    IF NOT is_limited() THEN
        RETURN;
    END IF;
    IF outcome IN (3, 4) AND started = 0 AND NOT EXISTS (
        SELECT FROM job WHERE seq = l.seq AND (trail -> -1 ->> 2)::float8 = l.leased)
    THEN
        taken := floor(l.leased * 1e6);
    END IF;
    IF l.lane IS NOT NULL AND over THEN
        INSERT INTO inbox (gate, ran, back, cost)
        VALUES (l.lane, -1, taken, (SELECT cost FROM job WHERE seq = l.seq));
    END IF;
    INSERT INTO inbox (gate, well, back, cost)
    SELECT 'q' || number, CASE WHEN outcome < 3 THEN outcome = 0 END, taken, 1
    FROM queue WHERE number = l.line / 4 AND gated;
END $$;

-- Tell limiters that leases have ended with success.
CREATE OR REPLACE FUNCTION tidemill.leave_all(lines int[], lanes text[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO inbox (gate, ran)
    SELECT lane, -count(*) FROM unnest(lanes) AS lane WHERE lane IS NOT NULL GROUP BY 1;
    INSERT INTO inbox (gate, well)
    SELECT 'q' || number, true FROM queue
    WHERE gated AND number IN (SELECT DISTINCT line / 4 FROM unnest(lines) AS line);
END $$;

-- -- taking events over ----------------------------------------------------------------------------

-- Of these limiters, lock those that nobody else holds, and return their ids.
CREATE OR REPLACE FUNCTION tidemill.try_gates(ids text[]) RETURNS text[]
LANGUAGE plpgsql AS $$ BEGIN RETURN ARRAY (SELECT id FROM gate WHERE id = ANY (ids) FOR UPDATE SKIP LOCKED); END $$;

-- Take over the events of limiters that we hold. Returns the limiters to renew. If only running
-- jobs have ended, a partition that stands in each of its lines needs no renewal.
CREATE OR REPLACE FUNCTION tidemill.fold_gates(ids text[], now float8) RETURNS text[]
LANGUAGE plpgsql AS $$
DECLARE
    events inbox[];
    e      record;
    same   text[];
BEGIN
    WITH gone AS (
        -- With this wording the planner hashes the ids, however many they are.
        DELETE FROM inbox WHERE CASE WHEN inbox.gate IN (SELECT unnest(ids)) THEN true END
        RETURNING inbox.*, inbox AS event
    ), sums AS (
        SELECT g.gate AS id, sum(ran) AS ran, array_agg(DISTINCT line) FILTER (WHERE line IS NOT NULL) AS lines,
               bool_and(ran < 0 AND back IS NULL) AS less
        FROM gone AS g GROUP BY 1
    ), counted AS (
        UPDATE gate SET
            running = greatest(0, running + s.ran),
            lines = CASE WHEN gate.lines @> s.lines THEN gate.lines
                    ELSE ARRAY (SELECT DISTINCT unnest(gate.lines || s.lines)) END
        FROM sums AS s CROSS JOIN LATERAL (
            SELECT ctid AS row FROM gate WHERE gate.id = s.id OFFSET 0) AS y
        WHERE gate.ctid = y.row AND (s.ran <> 0 OR NOT gate.lines @> s.lines)
    )
    SELECT (SELECT array_agg(event ORDER BY n) FILTER (WHERE well IS NOT NULL OR back IS NOT NULL) FROM gone),
           (SELECT array_agg(s.id) FROM sums AS s WHERE s.less)
    INTO events, same;
    FOR e IN
        SELECT i.*, t.terms AS x FROM unnest(events) AS i
        JOIN terms AS t ON t.id = terms_of(i.gate)
        WHERE i.back IS NOT NULL OR t.terms[7] IS NOT NULL ORDER BY n
    LOOP
        UPDATE gate SET
            failures = CASE WHEN e.well IS NULL OR e.x[7] IS NULL THEN failures
                            WHEN e.well THEN 0 ELSE failures + 1 END,
            until = CASE WHEN NOT e.well AND failures + 1 >= e.x[7] THEN now + floor(e.x[8] * 1e6)
                    ELSE until END,
            filled = CASE WHEN e.back IS NULL THEN filled ELSE filled - e.cost * every(e.x) END,
            slots = CASE WHEN e.back IS NULL THEN slots ELSE slots_without(e.x, slots, e.back, e.cost) END
        WHERE id = e.gate;
    END LOOP;
    IF same IS NULL THEN
        RETURN ids;
    END IF;
    same := ARRAY (
        SELECT id FROM gate WHERE id = ANY (same) AND due IS NULL AND lines <> '{}' AND cardinality(lines) = (
            SELECT count(*) FROM stand WHERE lane = gate.id));
    RETURN ARRAY (SELECT unnest(ids) EXCEPT SELECT unnest(same));
END $$;

-- How many jobs of a queue run.
CREATE OR REPLACE FUNCTION tidemill.running_in(which int) RETURNS bigint
LANGUAGE plpgsql AS $$ BEGIN RETURN (SELECT coalesce(sum(running), 0) FROM tally WHERE queue = which); END $$;

-- How many jobs of a queue run, or 0 when the settings do not depend on this number.
CREATE OR REPLACE FUNCTION tidemill.running_for(x float8[], which int) RETURNS bigint
LANGUAGE plpgsql AS $$ BEGIN RETURN CASE WHEN x[6] IS NULL AND x[7] IS NULL THEN 0 ELSE running_in(which) END; END $$;

-- The number of a limiter's queue; NULL for a partition.
CREATE OR REPLACE FUNCTION tidemill.queue_of(id text) RETURNS int
LANGUAGE sql IMMUTABLE AS $$ SELECT CASE WHEN starts_with(id, 'q') THEN substr(id, 2)::int END $$;

-- Renew limiters that we hold: the times when they open, and the rows of partitions in "stand".
CREATE OR REPLACE FUNCTION tidemill.renew_gates(ids text[], now float8) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE gate SET opens = o.at, due = CASE WHEN o.at BETWEEN 1 AND 1e18 THEN o.at END
    FROM (SELECT g.id, gate_opens(t.terms, g, running_for(t.terms, queue_of(g.id)), now, 1) AS at
          FROM gate AS g JOIN terms AS t ON t.id = g.terms
          WHERE g.id = ANY (ids) AND starts_with(g.id, 'q')) AS o
    WHERE gate.id = o.id AND (gate.opens <> o.at OR gate.due <= now);
    ids := ARRAY (SELECT id FROM unnest(ids) AS id WHERE starts_with(id, 'n'));
    IF cardinality(ids) = 0 THEN
        RETURN;
    END IF;
    WITH lanes AS MATERIALIZED (
        SELECT g, g.ctid AS row, t.terms AS x, gate_opens(t.terms, g, g.running, now, 1) AS at
        FROM gate AS g CROSS JOIN LATERAL (
            SELECT terms.terms FROM terms WHERE terms.id = g.terms OFFSET 0) AS t
        WHERE g.id = ANY (ids)
    ), heads AS MATERIALIZED (
        SELECT y.row, (y.g).id AS lane, p.line, p.rank, p.seq, p.cost,
               CASE WHEN right((y.g).id, 1) = chr(31) THEN p.seq ELSE greatest(p.seq, (y.g).turn) END AS number,
               CASE WHEN p.cost = 1 THEN y.at WHEN p.cost IS NOT NULL THEN
                    gate_opens(y.x, y.g, (y.g).running, now, p.cost) END AS at,
               CASE WHEN p.line IS NULL AND (y.g).running = 0 THEN clear_at(y.x, y.g) END AS clear
        FROM lanes AS y LEFT JOIN LATERAL (
            SELECT l AS line, f.* FROM unnest((y.g).lines) AS l CROSS JOIN LATERAL (
                SELECT rank, seq, cost FROM parked WHERE lane = (y.g).id AND line = l
                ORDER BY rank, seq LIMIT 1) AS f) AS p ON true
    ), gone AS (
        DELETE FROM stand WHERE lane = ANY (ids) AND (line, rank, number, lane, cost) NOT IN (
            SELECT line, rank, number, heads.lane, cost FROM heads WHERE at = 0)
    ), stands AS (
        INSERT INTO stand (line, rank, number, lane, cost)
        SELECT line, rank, number, lane, cost FROM heads WHERE at = 0 ON CONFLICT DO NOTHING
    ), seen AS (
        SELECT row, coalesce(array_agg(line) FILTER (WHERE line IS NOT NULL), '{}') AS lines,
               min(at) FILTER (WHERE at BETWEEN 1 AND 1e18) AS due, max(clear) AS clear
        FROM heads GROUP BY row
    )
    UPDATE gate SET lines = s.lines, due = s.due, clear = s.clear
    FROM seen AS s
    WHERE gate.ctid = s.row AND (gate.lines <> s.lines OR gate.due IS DISTINCT FROM s.due
                              OR gate.clear IS DISTINCT FROM s.clear);
    DELETE FROM gate WHERE id = ANY (ids) AND clear <= now;
END $$;

-- Take over the events of limiters, and open the limiters whose time has come; true when there were
-- any. "fresh" also makes limiters of new partitions. This may wait for another transaction that
-- makes the same limiters, so the caller then holds no other lock.
CREATE OR REPLACE FUNCTION tidemill.sync_gates(fresh boolean, t float8) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    now float8 := floor(t * 1e6);
    ids text[];
BEGIN
    IF NOT is_limited() OR is_sealed() OR NOT may_read_terms() THEN
        RETURN false;
    END IF;
    ids := ARRAY (SELECT gate FROM inbox UNION SELECT id FROM gate WHERE due <= now);
    IF cardinality(ids) = 0 THEN
        RETURN false;
    END IF;
    IF fresh THEN
        INSERT INTO gate (id, terms)
        SELECT x.id, t.id FROM unnest(ids) AS x (id) CROSS JOIN LATERAL (
            SELECT terms.id FROM terms WHERE terms.id = terms_of(x.id) OFFSET 0) AS t
        WHERE starts_with(x.id, 'n') AND NOT EXISTS (SELECT FROM gate WHERE gate.id = x.id)
        ORDER BY x.id ON CONFLICT DO NOTHING;
    END IF;
    ids := try_gates(ids);
    IF cardinality(ids) = 0 THEN
        RETURN false;
    END IF;
    PERFORM renew_gates(fold_gates(ids, now), now);
    RETURN true;
END $$;

-- -- after a commit --------------------------------------------------------------------------------

CREATE OR REPLACE FUNCTION tidemill.open_once(p tidemill.prefs) RETURNS boolean
LANGUAGE plpgsql SET search_path = tidemill, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    IF take_said(clock(p)) THEN  -- nobody else gets a limiter before this commits
        RETURN true;
    END IF;
    RETURN sync_gates(true, clock(p));
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'limits are put off: %', SQLERRM;
    RETURN false;
END $$;

-- Empty the inbox after a commit that may have written to it, except for limiters that others hold.
CREATE OR REPLACE PROCEDURE tidemill.open_gates(p tidemill.prefs)
LANGUAGE plpgsql AS $$
DECLARE
    again boolean := true;
BEGIN
    WHILE again LOOP
        PERFORM set_config('synchronous_commit', 'off', true);
        again := EXISTS (SELECT FROM tidemill.inbox) OR EXISTS (SELECT FROM tidemill.said);
        IF again THEN
            again := tidemill.open_once(p);
        END IF;
        COMMIT;
    END LOOP;
END $$;

-- Forget partitions that have been unused for long enough; return how many.
CREATE OR REPLACE FUNCTION tidemill.sweep_gates(most int, t float8) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
    swept int;
BEGIN
    IF NOT is_limited() OR is_sealed() OR NOT may_read_terms() THEN
        RETURN 0;
    END IF;
    DELETE FROM gate WHERE id = ANY (ARRAY (
        SELECT id FROM gate WHERE clear <= floor(t * 1e6)
        ORDER BY clear LIMIT most FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS swept = ROW_COUNT;
    RETURN swept;
END $$;
