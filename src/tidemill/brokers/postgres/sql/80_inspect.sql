-- Inspection. This view joins a job with its rows in other tables. It has all columns that a query may use;
-- inspect.py reads it.

CREATE OR REPLACE VIEW tidemill.shown AS
SELECT job.seq, job.id, job.line, job.key, job.rank, job.tries, job.losses,
       job.due, job.expires, job.cancelling, job.trail, job.envelope, job.body,
       coalesce(done.state, CASE WHEN ready.seq IS NOT NULL THEN 2 WHEN lease.seq IS NOT NULL THEN 3
                                 WHEN later.waiting THEN 0 WHEN later.seq IS NOT NULL THEN 1
                                 ELSE 2 END) AS state,  -- else the job is parked
       coalesce(done.attempt, job.attempt) AS attempt,
       coalesce(done.error, job.error) AS error,
       done.finished, done.result, done.attempt AS last, done.leased AS last_leased, done.started,
       done.ended, done.worker AS last_worker,
       lease.leased, owner.name AS worker, note.done AS progress, note.total, note.log,
       coalesce(behind.pending, 0) AS pending, coalesce(behind.failures, 0) AS failures,
       note.text AS progress_text
FROM tidemill.job
LEFT JOIN tidemill.ready ON ready.line = job.line AND ready.rank = job.rank AND ready.seq = job.seq
LEFT JOIN tidemill.later ON later.seq = job.seq
LEFT JOIN tidemill.lease ON lease.seq = job.seq
LEFT JOIN tidemill.owner ON owner.number = lease.owner
LEFT JOIN tidemill.done ON done.seq = job.seq
LEFT JOIN tidemill.note ON note.seq = job.seq
LEFT JOIN tidemill.behind ON behind.seq = job.seq;

-- The number of the ready job that a queue accepted first. This looks at the first jobs of up to 256
-- ranks, and at the first jobs of all ranks in up to 1000 partitions.
CREATE OR REPLACE FUNCTION tidemill.oldest_of(which int) RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
DECLARE
    r      record;
    oldest bigint := (
        SELECT min(p.seq) FROM (
            SELECT id, lines FROM gate WHERE lines <> '{}' LIMIT 1000) AS g
        CROSS JOIN LATERAL unnest(g.lines) AS l CROSS JOIN LATERAL (
            WITH RECURSIVE head AS (
                (SELECT rank, seq FROM parked WHERE lane = g.id AND line = l
                 ORDER BY rank, seq LIMIT 1)
                UNION ALL
                SELECT n.rank, n.seq FROM head CROSS JOIN LATERAL (
                    SELECT rank, seq FROM parked WHERE lane = g.id AND line = l AND rank > head.rank
                    ORDER BY rank, seq LIMIT 1) AS n)
            SELECT min(seq) AS seq FROM head) AS p
        WHERE l / 4 = which);
BEGIN
    FOR k IN which * 4..which * 4 + 2 LOOP
        SELECT -1::bigint AS rank INTO r;
        FOR n IN 1..256 LOOP
            SELECT rank, seq INTO r FROM ready WHERE line = k AND rank > r.rank
            ORDER BY rank, seq LIMIT 1;
            EXIT WHEN NOT FOUND;
            oldest := least(oldest, r.seq);
        END LOOP;
    END LOOP;
    RETURN oldest;
END $$;

-- The figures of all queues that were ever used.
CREATE OR REPLACE FUNCTION tidemill.queue_stats()
RETURNS TABLE (name text, paused boolean, max_size bigint, counts bigint[], oldest bytea)
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    RETURN QUERY
    SELECT q.name, q.paused, q.max_size,
           ARRAY[sum(t.waiting), sum(t.scheduled), sum(t.ready), sum(t.running), sum(t.accepted),
                 sum(t.succeeded), sum(t.failed), sum(t.retried), sum(t.cancelled), sum(t.expired),
                 sum(t.purged)]::bigint[],
           (SELECT envelope FROM job WHERE seq = oldest_of(q.number))
    FROM queue AS q LEFT JOIN tally AS t ON t.queue = q.number
    GROUP BY q.number
    HAVING q.listed OR sum(t.accepted) > 0 OR sum(t.waiting + t.scheduled + t.ready) > 0
        OR sum(t.succeeded + t.failed + t.cancelled + t.expired) > 0
    ORDER BY q.name;
END $$;

-- The things that a waiter still waits for: the numbers of unfinished jobs with these ids, and minus the number
-- of a queue without space. Due jobs move first.
CREATE OR REPLACE FUNCTION tidemill.unfinished(
    ids text[], full_queue text, p tidemill.prefs, OUT refs bigint[], OUT due float8)
LANGUAGE plpgsql SET search_path = tidemill, pg_temp SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    t float8 := clock(p);
BEGIN
    IF move_due(t, p) THEN
        PERFORM tell_all('all');
    END IF;
    refs := ARRAY (SELECT job.seq FROM unnest(ids) AS i (id) JOIN job USING (id)
                   WHERE NOT EXISTS (SELECT FROM done WHERE done.seq = job.seq));
    IF full_queue IS NOT NULL THEN
        refs := refs || ARRAY (SELECT -number FROM queue WHERE name = full_queue AND max_size > 0
                               AND size_of(number) >= max_size)::bigint[];
    END IF;
    due := next_due(true, t) - t;
END $$;

-- Look on behalf of a waiter that listens on a channel. The rows of the waiter are committed before
-- the last look, since a transaction that ends a job looks for waiters after its commit. A NULL
-- channel means: only look.
CREATE OR REPLACE PROCEDURE tidemill.look_out(
    ids text[], full_queue text, who text, where_to text, p tidemill.prefs,
    INOUT refs bigint[], INOUT due float8)
LANGUAGE plpgsql AS $$
DECLARE
    u   record;
    new int;
BEGIN
    u := tidemill.unfinished(ids, full_queue, p);
    IF where_to IS NOT NULL AND cardinality(u.refs) > 0 THEN
        INSERT INTO tidemill.await AS a (ref, waiter, channel, until)
        SELECT r, who, where_to, tidemill.clock(p) + 60 FROM unnest(u.refs) AS r
        ON CONFLICT (waiter, ref) DO UPDATE SET until = excluded.until
        WHERE a.until < excluded.until - 20;
        GET DIAGNOSTICS new = ROW_COUNT;
        PERFORM set_config('synchronous_commit', 'off', true);
        COMMIT;
        IF new > 0 THEN
            u := tidemill.unfinished(ids, full_queue, p);
        END IF;
    END IF;
    IF where_to IS NOT NULL AND cardinality(u.refs) = 0 THEN
        DELETE FROM tidemill.await WHERE waiter = who;
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    refs := u.refs;
    due := u.due;
END $$;
