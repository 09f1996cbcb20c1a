-- Jobs that wait for other jobs, their parents. The transaction that ends a parent counts its children down.
--
-- "pending" and "failures" always count the parents of a job, even after the job itself has ended. So a
-- failed job that is made ready again gives its children another chance.
--
-- Two transactions may end parents of the same job. The transactions must lose no count, and
-- must not deadlock. So a transaction that may end jobs first locks the rows in "behind" of all jobs that it
-- may count down or end. The transaction locks all these rows in one statement, the highest number
-- first. Then the transaction finds the jobs that it ends, and counts.

-- Lock the children of these jobs; "bad" says of each job that it may end without success. Also
-- lock the jobs of these names and their children, in case they end. Of "jobs", returns those that
-- have children and have not ended: nobody else can end them now.
CREATE OR REPLACE FUNCTION tidemill.lock_flows(jobs bigint[], bad boolean[], names text[])
RETURNS bigint[]
LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM behind) THEN
        RETURN '{}';
    END IF;
    -- All parents of a barrier decide how it ends. So a barrier may fail even if these jobs
    -- succeed.
    PERFORM FROM behind WHERE seq = ANY (ARRAY (
        WITH RECURSIVE f (seq, waits, bad) AS (
            SELECT b.seq, b.waits, x.bad
            FROM (SELECT DISTINCT e.child, j.bad
                  FROM unnest(jobs, bad) AS j (seq, bad) CROSS JOIN LATERAL (
                      SELECT child FROM edge WHERE parent = j.seq OFFSET 0) AS e
                  UNION SELECT n, false FROM unnest(names) AS n) AS x
            CROSS JOIN LATERAL (
                SELECT * FROM behind WHERE behind.id = x.child OFFSET 0) AS b
            UNION
            SELECT b.seq, b.waits, true
            FROM f CROSS JOIN LATERAL (
                SELECT child FROM edge WHERE parent = f.seq OFFSET 0) AS e
            CROSS JOIN LATERAL (
                SELECT * FROM behind WHERE behind.id = e.child OFFSET 0) AS b
            WHERE f.waits IN ('barrier', 'failure') OR f.waits = 'success' AND f.bad)
        SELECT DISTINCT seq FROM f))
    ORDER BY seq DESC FOR UPDATE;
    RETURN ARRAY (
        SELECT DISTINCT j FROM unnest(jobs) AS j
        WHERE EXISTS (SELECT FROM edge WHERE parent = j) AND EXISTS (SELECT FROM job WHERE seq = j)
          AND NOT EXISTS (SELECT FROM done WHERE seq = j));
END $$;

-- The argument "bad" of lock_flows, if each of these jobs may end without success.
CREATE OR REPLACE FUNCTION tidemill.all_bad(jobs bigint[]) RETURNS boolean[]
LANGUAGE sql IMMUTABLE AS $$ SELECT array_fill(true, ARRAY[coalesce(cardinality(jobs), 0)]) $$;

-- Count down the children of the jobs that have ended since lock_flows locked them. An acked
-- message no longer has a row. True when this made any job ready, or ended any job.
CREATE OR REPLACE FUNCTION tidemill.flow(jobs bigint[], t float8, p tidemill.prefs) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    ended  bigint[];
    states int[];
    l      record;
    moved  boolean;
BEGIN
    IF coalesce(cardinality(jobs), 0) = 0 THEN
        RETURN false;
    END IF;
    SELECT array_agg(j), array_agg(coalesce(d.state, 4)) INTO ended, states
    FROM unnest(jobs) AS j LEFT JOIN done AS d ON d.seq = j
    WHERE d.seq IS NOT NULL OR NOT EXISTS (SELECT FROM job WHERE job.seq = j);
    l := less_behind(ended, states);
    moved := count_down(l.names, l.numbers, l.failed, l.whys, t, p);
    DELETE FROM edge WHERE parent = ANY (jobs)
        AND NOT EXISTS (SELECT FROM job WHERE job.seq = edge.parent);
    RETURN moved;
END $$;

-- How much to count down the children of these jobs: [names, numbers, failures, reasons]. The states are
-- the states in "done", or 0 for a deleted job.
CREATE OR REPLACE FUNCTION tidemill.less_behind(
    jobs bigint[], states int[],
    OUT names text[], OUT numbers int[], OUT failed int[], OUT whys text[])
LANGUAGE plpgsql AS $$
BEGIN
    SELECT array_agg(child), array_agg(number), array_agg(bad), array_agg(why)
    INTO names, numbers, failed, whys
    FROM (
        SELECT e.child, count(*) AS number, count(*) FILTER (WHERE j.state <> 4) AS bad,
               (array_agg(format('not run, since job %s %s', job.id, CASE j.state
                    WHEN 5 THEN 'failed' WHEN 6 THEN 'was cancelled' WHEN 7 THEN 'expired'
                    ELSE 'was deleted' END) ORDER BY j.ord) FILTER (WHERE j.state <> 4))[1] AS why
        FROM unnest(jobs, states) WITH ORDINALITY AS j (seq, state, ord)
        CROSS JOIN LATERAL (SELECT child FROM edge WHERE parent = j.seq OFFSET 0) AS e
        LEFT JOIN LATERAL (
            SELECT id FROM job WHERE job.seq = j.seq AND j.state <> 4 OFFSET 0) AS job ON true
        GROUP BY e.child) AS x;
END $$;

-- Count down jobs, and the children of jobs that end thereby, level by level.
CREATE OR REPLACE FUNCTION tidemill.count_down(
    names text[], numbers int[], failed int[], whys text[], t float8, p tidemill.prefs)
RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    l        record;
    moved    boolean := false;
    drops    bigint[];
    reasons  text[];
    states   int[];
    barriers bigint[];
    bad      bigint[];
    needless bigint[];
    begins   bigint[];
BEGIN
    WHILE cardinality(names) > 0 LOOP
        WITH d AS MATERIALIZED (
            SELECT b.row, x.number, x.failed, x.why, x.ord
            FROM unnest(names, numbers, failed, whys) WITH ORDINALITY
                AS x (id, number, failed, why, ord)
            CROSS JOIN LATERAL (SELECT ctid AS row FROM behind WHERE behind.id = x.id OFFSET 0) AS b
        ), counted AS (
            UPDATE behind SET pending = greatest(0, pending - d.number),
                              failures = failures + d.failed
            FROM d WHERE behind.ctid = d.row
            RETURNING seq, waits, pending, failures, why, ord
        ), free AS (
            SELECT c.* FROM counted AS c CROSS JOIN LATERAL (
                SELECT FROM later WHERE later.seq = c.seq AND later.waiting OFFSET 0) AS l
        )
        SELECT array_agg(seq ORDER BY ord) FILTER (WHERE waits = 'success' AND failures > 0),
               array_agg(why ORDER BY ord) FILTER (WHERE waits = 'success' AND failures > 0),
               array_agg(seq ORDER BY ord) FILTER (WHERE waits = 'barrier' AND pending = 0),
               array_agg(failures ORDER BY ord) FILTER (WHERE waits = 'barrier' AND pending = 0),
               array_agg(seq) FILTER (WHERE waits = 'failure' AND pending = 0 AND failures = 0),
               array_agg(seq) FILTER (WHERE pending = 0 AND (waits = 'any'
                   OR waits = 'success' AND failures = 0 OR waits = 'failure' AND failures > 0))
        INTO drops, reasons, barriers, bad, needless, begins FROM free;
        moved := moved OR coalesce(drops, barriers, needless, begins) IS NOT NULL;
        IF begins IS NOT NULL THEN
            PERFORM begin_all(begins, t);
        END IF;
        states := array_fill(6, ARRAY[coalesce(cardinality(drops), 0)]) || ARRAY (
            SELECT CASE WHEN n > 0 THEN 5 ELSE 4 END FROM unnest(bad) WITH ORDINALITY AS b (n, ord)
            ORDER BY ord);
        reasons := coalesce(reasons, '{}') || ARRAY (
            SELECT CASE WHEN n > 0 THEN format('%s of its jobs did not succeed', n) ELSE '' END
            FROM unnest(bad) WITH ORDINALITY AS b (n, ord) ORDER BY ord);
        drops := coalesce(drops, '{}') || coalesce(barriers, '{}');
        needless := coalesce(needless, '{}');
        IF cardinality(drops) > 0 THEN
            PERFORM end_all(drops, states, reasons, t, p);
        END IF;
        l := less_behind(
            drops || needless, states || array_fill(0, ARRAY[cardinality(needless)]));
        IF cardinality(needless) > 0 THEN
            PERFORM vanish(needless);
        END IF;
        names := l.names;
        numbers := l.numbers;
        failed := l.failed;
        whys := l.whys;
    END LOOP;
    RETURN moved;
END $$;

-- Move waiting jobs to scheduled or ready.
CREATE OR REPLACE FUNCTION tidemill.begin_all(jobs bigint[], t float8) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    delayed bigint[];
BEGIN
    UPDATE job SET due = t + (SELECT delay FROM behind WHERE behind.seq = job.seq)
    WHERE seq = ANY (ARRAY (SELECT seq FROM behind WHERE seq = ANY (jobs) AND delay > 0));
    WITH held AS (
        UPDATE later SET waiting = false, due = (SELECT due FROM job WHERE job.seq = later.seq)
        WHERE seq = ANY (ARRAY (SELECT seq FROM job WHERE seq = ANY (jobs) AND due > t))
        RETURNING seq
    )
    SELECT coalesce(array_agg(seq), '{}') INTO delayed FROM held;
    DELETE FROM later WHERE seq = ANY (jobs) AND waiting;
    PERFORM park(ARRAY (SELECT seq FROM job
                        WHERE seq = ANY (jobs) AND seq <> ALL (delayed) AND lane IS NOT NULL));
    WITH placed AS (
        INSERT INTO ready (line, rank, seq)
        SELECT line, rank, seq FROM job
        WHERE seq = ANY (jobs) AND seq <> ALL (delayed) AND lane IS NULL
    )
    INSERT INTO tally (queue, waiting, ready, scheduled)
    SELECT line / 4, -count(*), count(*) FILTER (WHERE seq <> ALL (delayed)),
           count(*) FILTER (WHERE seq = ANY (delayed))
    FROM job WHERE seq = ANY (jobs) GROUP BY 1;
END $$;

-- End waiting jobs because of the ends of their parents.
CREATE OR REPLACE FUNCTION tidemill.end_all(
    jobs bigint[], states int[], whys text[], t float8, p tidemill.prefs) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM later WHERE seq = ANY (jobs);
    DELETE FROM expiry WHERE seq = ANY (jobs);
    UPDATE behind SET dropped = true
    WHERE seq = ANY (ARRAY (SELECT j FROM unnest(jobs, states) AS x (j, s) WHERE s <> 4));
    INSERT INTO done (seq, prune, finished, class, state, error)
    SELECT j, t + p.protect, t, 3, s, why FROM unnest(jobs, states, whys) AS x (j, s, why);
    INSERT INTO tally (queue, waiting, succeeded, failed, cancelled)
    SELECT j.line / 4, -count(*), count(*) FILTER (WHERE s = 4), count(*) FILTER (WHERE s = 5),
           count(*) FILTER (WHERE s = 6)
    FROM unnest(jobs, states) AS x (seq, s) CROSS JOIN LATERAL (
        SELECT line FROM job WHERE job.seq = x.seq OFFSET 0) AS j
    GROUP BY 1;
END $$;

-- Delete waiting jobs that are not needed.
CREATE OR REPLACE FUNCTION tidemill.vanish(jobs bigint[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM later WHERE seq = ANY (jobs);
    DELETE FROM edge WHERE parent = ANY (jobs);
    INSERT INTO tally (queue, waiting)
    SELECT line / 4, -count(*) FROM job WHERE seq = ANY (jobs) GROUP BY 1;
    PERFORM forget(j) FROM unnest(jobs) AS j;
END $$;

-- Count up the children of a job that is to run again after it did not succeed. Children that ended
-- because of this job wait again, and so do their own children.
CREATE OR REPLACE FUNCTION tidemill.revive(which bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    revived bigint[] := ARRAY[which];
    dropped bigint[];
BEGIN
    WHILE cardinality(revived) > 0 LOOP
        WITH d AS MATERIALIZED (
            SELECT b.row, count(*) AS number
            FROM unnest(revived) AS j (seq)
            CROSS JOIN LATERAL (SELECT child FROM edge WHERE parent = j.seq OFFSET 0) AS e
            CROSS JOIN LATERAL (
                SELECT ctid AS row FROM behind WHERE behind.id = e.child OFFSET 0) AS b
            GROUP BY 1
        ), counted AS (
            UPDATE behind SET pending = pending + d.number,
                              failures = greatest(0, failures - d.number)
            FROM d WHERE behind.ctid = d.row
            RETURNING seq, behind.dropped AND (failures = 0 OR waits = 'barrier') AS again
        )
        SELECT coalesce(array_agg(seq), '{}') INTO revived FROM counted WHERE again;
        PERFORM wait_again(revived);
    END LOOP;
END $$;

-- Move ended jobs back to waiting.
CREATE OR REPLACE FUNCTION tidemill.wait_again(jobs bigint[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE behind SET dropped = false WHERE seq = ANY (jobs);
    UPDATE job SET error = '' WHERE seq = ANY (jobs);
    WITH gone AS (
        DELETE FROM done WHERE seq = ANY (jobs) RETURNING seq, class
    ), back AS (
        SELECT gone.seq, gone.class, j.line, j.due, j.expires FROM gone CROSS JOIN LATERAL (
            SELECT line, due, expires FROM job WHERE job.seq = gone.seq OFFSET 0) AS j
    ), held AS (
        INSERT INTO later (seq, due, waiting) SELECT seq, due, true FROM back
    ), mortal AS (
        INSERT INTO expiry (seq, due) SELECT seq, expires FROM back WHERE expires > 0
    )
    INSERT INTO tally (queue, waiting, kept)
    SELECT line / 4, count(*), -count(*) FILTER (WHERE class < 2) FROM back GROUP BY 1;
END $$;

-- Link jobs that were put: each child waits for one more parent. New waiting jobs that are not in
-- "hold", and the jobs in "let_go", get no more parents afterwards. "created" has the ids of the
-- stored jobs, NULL for all. With "strict", a named job must be waiting, and must have been put
-- before the jobs that name it.
CREATE OR REPLACE FUNCTION tidemill.link(
    created text[], new_jobs tidemill.batch, hold text[], let_go text[], strict boolean, t float8, p tidemill.prefs) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    missing text := (SELECT n FROM unnest(let_go) AS n WHERE NOT is_waiting(n) LIMIT 1);
    parents bigint[];
    names   text[];
    begun   text[];
BEGIN
    INSERT INTO behind (seq, id, waits, pending, failures, delay, at)
    SELECT j.seq, g.id, g.waits, 1, 0, g.delay, g.at
    FROM unpack(new_jobs) AS g CROSS JOIN LATERAL (
        SELECT seq FROM job WHERE job.id = g.id OFFSET 0) AS j
    WHERE g.waits IS NOT NULL AND (created IS NULL OR g.id = ANY (created));
    WITH new AS (
        INSERT INTO edge (parent, child)
        SELECT j.seq, unnest(g.next)
        FROM unpack(new_jobs) AS g CROSS JOIN LATERAL (
            SELECT seq FROM job WHERE job.id = g.id OFFSET 0) AS j
        WHERE g.next IS NOT NULL AND (created IS NULL OR g.id = ANY (created))
        RETURNING parent, child
    )
    SELECT array_agg(parent), array_agg(child) INTO parents, names FROM new;
    WITH named AS MATERIALIZED (
        SELECT child, min(parent) AS first FROM unnest(parents, names) AS e (parent, child)
        GROUP BY 1
    ), waiting AS MATERIALIZED (
        SELECT b.row, b.seq, named.child, named.first
        FROM named CROSS JOIN LATERAL (
            SELECT ctid AS row, seq FROM behind WHERE id = named.child OFFSET 0) AS b
        WHERE is_waiting(named.child)
    ), counted AS (
        UPDATE behind SET pending = pending + x.number
        FROM (SELECT w.row, count(*) AS number
              FROM waiting AS w JOIN unnest(parents, names) AS e (parent, child) USING (child)
              WHERE e.parent > w.seq GROUP BY 1) AS x
        WHERE behind.ctid = x.row
    )
    SELECT coalesce(missing, min(child)) INTO missing FROM named
    WHERE NOT EXISTS (SELECT FROM waiting AS w WHERE w.child = named.child AND w.seq < w.first);
    IF strict AND missing IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'TM004', MESSAGE = 'not waiting', DETAIL = missing;
    END IF;
    begun := let_go || ARRAY (
        SELECT id FROM unpack(new_jobs)
        WHERE waits IS NOT NULL AND (created IS NULL OR id = ANY (created)) AND id <> ALL (hold));
    IF cardinality(begun) > 0 THEN
        PERFORM count_down(begun, array_fill(1, ARRAY[cardinality(begun)]),
                           array_fill(0, ARRAY[cardinality(begun)]),
                           array_fill(''::text, ARRAY[cardinality(begun)]), t, p);
    END IF;
END $$;

-- Whether a job waits for parents, and may get more parents.
CREATE OR REPLACE FUNCTION tidemill.is_waiting(name text) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    RETURN EXISTS (SELECT FROM later WHERE waiting
                   AND seq = (SELECT seq FROM behind WHERE id = name));
END $$;

-- Pack the ends of jobs whose results are another job's input; encoding.py reads the bytes.
CREATE OR REPLACE FUNCTION tidemill.pack_inputs(names text[]) RETURNS bytea
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN int4send(cardinality(names)) || coalesce((
        SELECT string_agg(pack_bytes(convert_to(n.id, 'UTF8')) || int4send(coalesce(s.state, -1))
                          || pack_bytes(coalesce(s.result, ''))
                          || pack_bytes(convert_to(coalesce(s.error, ''), 'UTF8')), '' ORDER BY ord)
        FROM unnest(names) WITH ORDINALITY AS n (id, ord) LEFT JOIN LATERAL (
            SELECT state::int, result, error FROM shown WHERE shown.id = n.id OFFSET 0) AS s ON true), '');
END $$;

CREATE OR REPLACE FUNCTION tidemill.pack_bytes(data bytea) RETURNS bytea
LANGUAGE sql IMMUTABLE AS $$ SELECT int4send(length(data)) || data $$;

-- Look at finished jobs of workflows, which have their own class. Once all their children have finished, they
-- are pruned like other jobs. The children of a barrier count as children of all its parents.
CREATE OR REPLACE FUNCTION tidemill.look_at_flows(most int, t float8, p tidemill.prefs) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    due    bigint[] := ARRAY (SELECT seq FROM done WHERE class = 3 AND prune <= t
                              ORDER BY prune LIMIT most FOR UPDATE SKIP LOCKED);
    needed bigint[];
BEGIN
    IF cardinality(due) = 0 THEN
        RETURN;
    END IF;
    needed := ARRAY (
        WITH RECURSIVE r (root, id) AS (
            SELECT d, e.child FROM unnest(due) AS d CROSS JOIN LATERAL (
                SELECT child FROM edge WHERE parent = d OFFSET 0) AS e
            UNION
            SELECT r.root, e.child FROM r CROSS JOIN LATERAL (
                SELECT behind.seq FROM behind WHERE behind.id = r.id AND waits = 'barrier' OFFSET 0) AS b
            CROSS JOIN LATERAL (SELECT child FROM edge WHERE parent = b.seq OFFSET 0) AS e
        )
        SELECT DISTINCT root FROM r CROSS JOIN LATERAL (
            SELECT FROM job WHERE job.id = r.id
            AND NOT EXISTS (SELECT FROM done WHERE done.seq = job.seq) OFFSET 0) AS unfinished);
    UPDATE done SET prune = t + p.protect WHERE seq = ANY (needed);
    WITH free AS (
        UPDATE done SET
            class = CASE WHEN state = 5 OR is_purged(error) THEN 2 WHEN state = 4 AND result IS NULL THEN 0 ELSE 1 END,
            prune = finished + keep_for(
                CASE WHEN state = 4 THEN 'succeeded' WHEN state = 5 OR is_purged(error) THEN 'failed' ELSE '' END,
                (SELECT result_ttl FROM job WHERE job.seq = done.seq), result IS NOT NULL, p)
        WHERE seq = ANY (due) AND seq <> ALL (needed)
        RETURNING seq, class
    )
    INSERT INTO tally (queue, kept)
    SELECT (SELECT line / 4 FROM job WHERE job.seq = free.seq), count(*)
    FROM free WHERE class < 2 GROUP BY 1;
END $$;
