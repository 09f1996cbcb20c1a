-- Jobs of unknown tasks, set aside in "later" until a worker comes that knows the task.

-- The task in an envelope.
CREATE OR REPLACE FUNCTION tidemill.task_in(envelope bytea) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    at   int := CASE get_byte(envelope, 0) WHEN 220 THEN 3 ELSE 1 END;
    ends int;
    code int;
BEGIN
    FOR field IN 1..2 LOOP  -- the fields before the task
        at := (read_value(envelope, at)).next;
    END LOOP;
    code := get_byte(envelope, at);
    ends := (read_value(envelope, at)).next;
    at := at + CASE WHEN code < 192 THEN 1 WHEN code = 217 THEN 2 WHEN code = 218 THEN 3 ELSE 5 END;
    RETURN convert_from(substring(envelope FROM at + 1 FOR ends - at), 'UTF8');
END $$;

-- Let only one step at a time name unknown tasks, and take this lock before any other. So numbers
-- are committed in order, and no owner misses a task.
CREATE OR REPLACE FUNCTION tidemill.lock_unknown(verdicts jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF verdicts IS NOT NULL AND jsonb_path_exists(verdicts, '$[*] ? (@.outcome == 8)') THEN
        PERFORM pg_advisory_xact_lock('unknown'::regclass::oid::int, 0);
    END IF;
END $$;

-- Set aside a job that stands nowhere; a "delay" above 0 is the seconds after which the job fails.
CREATE OR REPLACE FUNCTION tidemill.put_aside(which bigint, delay float8, t float8) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    j    record;
    name text;
BEGIN
    SELECT line, rank, envelope INTO STRICT j FROM job WHERE seq = which;
    name := task_in(j.envelope);
    IF NOT EXISTS (SELECT FROM later WHERE task = name) OR NOT EXISTS (SELECT FROM unknown WHERE task = name) THEN
        INSERT INTO unknown (task, number) VALUES (name, nextval('acceptance'))
        ON CONFLICT (task) DO UPDATE SET number = excluded.number;
    END IF;
    INSERT INTO later (seq, due, waiting, task, queue, rank)
    VALUES (which, CASE WHEN delay > 0 THEN t + delay ELSE 'infinity' END, false, name, j.line / 4, j.rank);
    PERFORM count(j.line, 'scheduled');
END $$;

-- Forget the names of tasks that no longer have jobs set aside.
CREATE OR REPLACE FUNCTION tidemill.sweep_unknown() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM unknown) AND pg_try_advisory_xact_lock('unknown'::regclass::oid::int, 0) THEN
        DELETE FROM unknown WHERE NOT EXISTS (SELECT FROM later WHERE later.task = unknown.task);
    END IF;
END $$;

-- Up to 1000 tasks with jobs set aside and a number above "since"; "told" is the number reached.
CREATE OR REPLACE FUNCTION tidemill.unknown_since(since bigint) RETURNS jsonb
LANGUAGE plpgsql AS $$
BEGIN
    RETURN (
        SELECT jsonb_build_object('unknown', coalesce(jsonb_agg(task ORDER BY number), '[]'),
                                  'told', coalesce(max(number), since))
        FROM (SELECT task, number FROM unknown
              WHERE number > since AND EXISTS (SELECT FROM later WHERE later.task = unknown.task)
              ORDER BY number LIMIT 1000) AS new);
END $$;

-- Whether jobs of some tasks may be brought back to some queues; NULL means all queues.
CREATE OR REPLACE FUNCTION tidemill.has_unknown(tasks text[], queues int[]) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM later WHERE task = ANY (tasks) AND (queues IS NULL OR queue = ANY (queues))
        AND NOT EXISTS (SELECT FROM queue AS q WHERE q.number = later.queue AND q.paused));
END $$;

-- The queues where a task has jobs set aside. From each queue, the index gives the next.
CREATE OR REPLACE FUNCTION tidemill.unknown_queues(name text) RETURNS int[]
LANGUAGE plpgsql AS $$
DECLARE
    here int   := -1;
    found_in int[] := '{}';
BEGIN
    LOOP
        SELECT queue INTO here FROM later WHERE task = name AND queue > here ORDER BY queue LIMIT 1;
        EXIT WHEN NOT FOUND;
        found_in := found_in || here;
    END LOOP;
    RETURN found_in;
END $$;

-- Make jobs ready that were set aside and whose tasks an owner knows: of each queue, the first
-- jobs, up to the count that the owner wants. Returns their rows of "later".
CREATE OR REPLACE FUNCTION tidemill.bring_back(w tidemill.want, t float8) RETURNS tidemill.later[]
LANGUAGE plpgsql AS $$
DECLARE
    back later[];
BEGIN
    IF NOT has_unknown(w.knows, w.queues) THEN
        RETURN '{}';
    END IF;
    back := ARRAY (
        SELECT ROW(x.*)::later FROM (
            SELECT f.*, row_number() OVER (PARTITION BY f.queue ORDER BY f.rank, f.seq) AS place
            FROM unnest(w.knows) AS k
            CROSS JOIN LATERAL unnest(coalesce(w.queues, unknown_queues(k))) AS q
            CROSS JOIN LATERAL (
                SELECT * FROM later WHERE task = k AND queue = q
                ORDER BY rank, seq LIMIT w.count FOR UPDATE SKIP LOCKED) AS f
            WHERE NOT EXISTS (SELECT FROM queue WHERE number = q AND paused)) AS y
        CROSS JOIN LATERAL (SELECT y.seq, y.due, y.waiting, y.task, y.queue, y.rank) AS x
        WHERE y.place <= w.count);
    DELETE FROM later WHERE seq = ANY (ARRAY (SELECT b.seq FROM unnest(back) AS b));
    IF make_ready(ARRAY (SELECT b.seq FROM unnest(back) AS b)) THEN
        PERFORM sync_gates(false, t);
    END IF;
    RETURN back;
END $$;

-- Of the jobs that bring_back made ready, those that are still ready and under no limit.
CREATE OR REPLACE FUNCTION tidemill.still_back(back tidemill.later[]) RETURNS TABLE (r tid, seq bigint, line int)
LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY
    SELECT x.r, b.seq, j.line FROM unnest(back) AS b
    CROSS JOIN LATERAL (
        SELECT job.line, job.rank FROM job WHERE job.seq = b.seq AND job.lane IS NULL OFFSET 0) AS j
    CROSS JOIN LATERAL (
        SELECT ready.ctid AS r FROM ready
        WHERE ready.line = j.line AND ready.rank = j.rank AND ready.seq = b.seq OFFSET 0) AS x
    WHERE NOT EXISTS (SELECT FROM queue WHERE number = b.queue AND gated)
    ORDER BY b.rank, b.seq;
END $$;

-- Set aside again the jobs that were not leased. Jobs under a limit stay ready. With suspects =
-- false, suspects stay ready, too: only other owners take them.
CREATE OR REPLACE FUNCTION tidemill.undo_back(back tidemill.later[], suspects boolean) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    rest bigint[] := ARRAY (
        SELECT s.seq FROM still_back(back) AS s WHERE s.line & 3 <> 2 OR suspects);
BEGIN
    IF rest = '{}' THEN
        RETURN;
    END IF;
    DELETE FROM ready WHERE ctid = ANY (ARRAY (
        SELECT s.r FROM still_back(back) AS s WHERE s.seq = ANY (rest)));
    INSERT INTO later SELECT (b).* FROM unnest(back) AS b WHERE (b).seq = ANY (rest);
    INSERT INTO tally (queue, ready, scheduled)
    SELECT b.queue, -count(*), count(*) FROM unnest(back) AS b WHERE b.seq = ANY (rest) GROUP BY 1;
END $$;

-- Lease the jobs that an owner wants, and return what take_ready returns. First bring back the jobs
-- that were set aside and whose tasks the owner knows.
CREATE OR REPLACE FUNCTION tidemill.take(
    w tidemill.want, limits boolean, me int, this bigint, consumes boolean, t float8, p tidemill.prefs,
    INOUT last_queue int, OUT got int, OUT leases bytea)
LANGUAGE plpgsql AS $$
DECLARE
    back  later[] := '{}';
    first record;
    rest  record;
BEGIN
    got := 0;
    leases := '';
    IF cardinality(w.knows) > 0 THEN
        back := bring_back(w, t);
        IF cardinality(back) > 0 AND NOT w.tasks THEN
            first := claim_rows(ARRAY (
                SELECT s.r FROM still_back(back) AS s WHERE s.line & 3 = 0 LIMIT w.count), me, this, consumes, t, p);
            got := first.got;
            leases := coalesce(first.leases, '');
            w.count := w.count - got;
        END IF;
    END IF;
    IF w.count > 0 THEN
        rest := take_ready(w, limits, me, this, consumes, t, p, last_queue);
        last_queue := rest.last_queue;
        got := got + rest.got;
        leases := leases || rest.leases;
    END IF;
    IF cardinality(back) > 0 THEN
        PERFORM undo_back(back, w.tasks);
    END IF;
END $$;
