-- Accepting jobs. They come as arrays: ids, envelopes, and the number of each job's shape. The
-- shape is all other data of a job; most jobs of a call have the same shape.

CREATE OR REPLACE FUNCTION tidemill.unpack(new_jobs tidemill.batch) RETURNS SETOF tidemill.given
LANGUAGE sql STABLE ROWS 1000 AS $$
    SELECT g.ord, g.id, g.envelope, s.line, s.rank, s.delay, s.at, s.expires, s.timeout, s.ttr,
           s.result_ttl, s.tries, s.key, s.conflict, s.verdict,
           s.linked, s.next, s.waits, s.inputs, s.period, s.max_wait, s.lane, s.cost, s.terms, s.if_new,
           s.backoff, s.body
    FROM unnest(new_jobs.ids, new_jobs.envelopes, new_jobs.shape) WITH ORDINALITY AS g (id, envelope, shape, ord)
    JOIN jsonb_to_recordset(new_jobs.shapes) AS s (
        n int, line int, rank bigint, delay float8, at float8, expires float8, timeout float8,
        ttr float8, result_ttl float8, tries int, key text, conflict text, verdict int,
        linked boolean, next text[], waits text, inputs text[], period float8, max_wait float8,
        lane text, cost float8, terms float8[], if_new boolean, backoff float8[], body int[])
    ON s.n = g.shape
$$;

-- Accept jobs, all or none, in order. The answer is NULL when all were created, else [how, id] for each job.
CREATE OR REPLACE FUNCTION tidemill.put_jobs(
    new_jobs tidemill.batch, hold text[], let_go text[], p tidemill.prefs) RETURNS jsonb
LANGUAGE plpgsql SET search_path = tidemill, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    t      float8 := clock(p);
    answer jsonb;
    shapes jsonb := new_jobs.shapes;
    one    record;
    g      given;
    bound  int[];
    seen   bigint[];
    linked boolean := jsonb_path_exists(shapes, '$[*].linked') OR cardinality(let_go) > 0;
BEGIN
    PERFORM check_here();
    IF jsonb_path_exists(shapes, '$[*].key') THEN
        bound := '{}';
    END IF;
    -- Only one transaction fills a bounded queue at a time, or two would take the last place.
    FOR one IN
        SELECT number FROM queue
        WHERE number IN (SELECT (s ->> 'line')::int / 4 FROM jsonb_array_elements(shapes) AS s)
          AND max_size > 0
        ORDER BY number
    LOOP
        PERFORM pg_advisory_xact_lock('queue'::regclass::oid::int, one.number);
        bound := bound || one.number;
    END LOOP;
    IF bound IS NOT NULL THEN
        seen := end_by_time(t);
        PERFORM lock_keys(seen, keys_of(shapes));
    END IF;
    IF linked THEN
        PERFORM lock_flows(coalesce(seen, '{}'), all_bad(seen), names_of(seen) || let_go || ARRAY (
            SELECT DISTINCT n FROM jsonb_array_elements(shapes) AS s
            CROSS JOIN LATERAL jsonb_array_elements_text(s -> 'next') AS n));
    END IF;
    IF bound IS NULL THEN
        PERFORM put_plain(new_jobs, t);
        IF jsonb_path_exists(shapes, '$[*].lane') THEN
            PERFORM park_new(new_jobs.ids, shapes);
        END IF;
        IF linked THEN
            PERFORM link(NULL, new_jobs, hold, let_go, true, t, p);
        END IF;
        RETURN NULL;
    END IF;
    -- An expired job must not keep another job out.
    PERFORM come_due(seen, t, p);
    answer := '[]';
    FOR g IN SELECT * FROM unpack(new_jobs) ORDER BY ord LOOP
        answer := answer || jsonb_build_array(put_one(g, true, t, p));
    END LOOP;
    IF linked THEN
        PERFORM link(NULL, new_jobs, hold, let_go, true, t, p);
    END IF;
    RETURN answer;
END $$;

-- The hot path: jobs without keys, in queues without bounds. park_new places the jobs of partitions afterwards.
CREATE OR REPLACE FUNCTION tidemill.put_plain(new_jobs tidemill.batch, t float8) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    stored bigint;
    first  bigint;
BEGIN
    WITH given AS MATERIALIZED (
        SELECT nextval('acceptance') AS seq, g.*,
               CASE WHEN g.delay > 0 THEN t + g.delay ELSE g.at END AS due,
               CASE WHEN g.expires > 0 THEN t + g.expires ELSE 0 END AS until
        FROM (SELECT * FROM unpack(new_jobs) ORDER BY ord) AS g
    ), new AS (
        INSERT INTO job (seq, rank, due, expires, timeout, ttr, result_ttl, line, policy, tries, id,
                         envelope, linked, inputs, lane, cost, backoff, body)
        SELECT seq, rank, due, until, timeout, ttr, result_ttl, line, tries, tries, id, envelope,
               coalesce(linked, false), inputs, lane, cost, backoff, body
        FROM given
        ON CONFLICT (id) DO NOTHING
        RETURNING seq
    ), placed AS MATERIALIZED (
        SELECT seq, line, rank, due, until AS expires,
               CASE WHEN waits IS NOT NULL THEN 0 WHEN due > t THEN 1
                    WHEN lane IS NULL THEN 2 ELSE 3 END AS state
        FROM new JOIN given USING (seq)
    ), prompt AS (
        INSERT INTO ready (line, rank, seq) SELECT line, rank, seq FROM placed WHERE state = 2
    ), delayed AS (
        INSERT INTO later (seq, due, waiting) SELECT seq, due, state = 0 FROM placed WHERE state < 2
    ), mortal AS (
        INSERT INTO expiry (seq, due) SELECT seq, expires FROM placed WHERE expires > 0
    ), counted AS (
        INSERT INTO tally (queue, accepted, ready, scheduled, waiting)
        SELECT line / 4, count(*), count(*) FILTER (WHERE state >= 2),
               count(*) FILTER (WHERE state = 1), count(*) FILTER (WHERE state = 0)
        FROM placed GROUP BY 1
    )
    SELECT (SELECT count(*) FROM new), (SELECT min(seq) FROM given) INTO stored, first;
    IF stored < cardinality(new_jobs.ids) THEN
        PERFORM refuse_id(g.id)
        FROM unnest(new_jobs.ids) WITH ORDINALITY AS g (id, ord)
        WHERE array_position(new_jobs.ids, g.id) < g.ord
           OR EXISTS (SELECT FROM job WHERE job.id = g.id AND job.seq < first)
        ORDER BY ord;
        PERFORM refuse_id(new_jobs.ids[1]);  -- the job that had this id a moment ago is gone
    END IF;
END $$;

CREATE OR REPLACE FUNCTION tidemill.refuse_id(taken text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'TM001', MESSAGE = 'id', DETAIL = taken;
END $$;

-- Count the unfinished jobs of a queue.
CREATE OR REPLACE FUNCTION tidemill.size_of(which int) RETURNS bigint
LANGUAGE plpgsql AS $$
BEGIN
    RETURN (SELECT coalesce(sum(waiting + scheduled + ready + running), 0)
            FROM tally WHERE queue = which);
END $$;

-- Put followers. Settling must not fail, so this function must not fail: no bound applies, and a
-- job is left out if its id is taken.
CREATE OR REPLACE FUNCTION tidemill.follow(
    after int, new_jobs tidemill.batch, t float8, p tidemill.prefs) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    g      given;
    linked text[];
BEGIN
    FOR g IN
        SELECT * FROM unpack(new_jobs) WHERE verdict = after ORDER BY ord
    LOOP
        IF g.key IS NOT NULL THEN
            CONTINUE WHEN EXISTS (SELECT FROM find_key(g.key, t)) AND g.conflict = 'reject';
        END IF;
        CONTINUE WHEN EXISTS (SELECT FROM job WHERE id = g.id);
        PERFORM put_one(g, false, t, p);
        IF g.linked THEN
            linked := linked || g.id;
        END IF;
    END LOOP;
    IF linked IS NOT NULL THEN
        PERFORM link(linked, new_jobs, '{}', '{}', false, t, p);
    END IF;
END $$;

-- The numbers of queues; new queues get a number.
CREATE OR REPLACE FUNCTION tidemill.queue_numbers(names text[])
RETURNS TABLE (name text, number int)
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    INSERT INTO queue (name) SELECT n FROM unnest(names) AS n ORDER BY n
    ON CONFLICT ON CONSTRAINT queue_name_key DO NOTHING;
    RETURN QUERY SELECT queue.name, queue.number FROM queue WHERE queue.name = ANY (names);
END $$;

-- One put: commit the jobs, then wake sleeping owners in a second transaction. That transaction
-- sees each owner that has marked itself asleep before. An owner that marks itself later looks once
-- more (see 50_exchange.sql). Transactions with NOTIFY commit one after the other. So the second
-- commit does not wait for the disk, and delays no other transaction.
CREATE OR REPLACE PROCEDURE tidemill.put(
    client text, this bigint, new_jobs tidemill.batch, hold text[], let_go text[], p tidemill.prefs, chores int, INOUT answer jsonb)
LANGUAGE plpgsql AS $$
DECLARE
    first record := tidemill.begin_call(client, this, p);
BEGIN
    IF NOT first.fresh THEN  -- this put was done before
        answer := first.told;
        PERFORM tidemill.flush();
        COMMIT;
        PERFORM tidemill.ring_again(p);
        RETURN;
    END IF;
    answer := tidemill.put_jobs(new_jobs, hold, let_go, p);
    IF answer IS NOT NULL THEN
        PERFORM tidemill.end_call(client, answer);
    END IF;
    COMMIT;
    IF EXISTS (SELECT FROM tidemill.inbox) OR EXISTS (SELECT FROM tidemill.said) THEN
        CALL tidemill.open_gates(p);
    END IF;
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM tidemill.ring(0, answer IS NOT NULL OR jsonb_path_exists(new_jobs.shapes, '$[*].linked'), '{}', p);
    IF chores > 0 THEN
        COMMIT;
        PERFORM set_config('synchronous_commit', 'off', true);
        PERFORM tidemill.do_chores(chores, p);
    END IF;
END $$;

-- Put jobs inside a transaction of the caller. Nothing can be done after its commit. So the commit
-- notifies all owners, and each owner looks for jobs.
CREATE OR REPLACE FUNCTION tidemill.put_inside(
    new_jobs tidemill.batch, hold text[], let_go text[], p tidemill.prefs) RETURNS jsonb
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    PERFORM tell_all('all');
    RETURN put_jobs(new_jobs, hold, let_go, p);
END $$;
