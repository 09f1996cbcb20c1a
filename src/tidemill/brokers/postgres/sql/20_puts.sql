-- Accepting jobs. They come as arrays: ids, envelopes, and for each the number of its shape, which is
-- all the rest; jobs of one call mostly have the same.

CREATE OR REPLACE FUNCTION tidemill.unpack(
    ids text[], envelopes bytea[], shape int[], shapes jsonb)
RETURNS SETOF tidemill.given
LANGUAGE sql STABLE ROWS 1000 AS $$
    SELECT g.ord, g.id, g.envelope, s.line, s.rank, s.delay, s.at, s.expires, s.timeout, s.ttr,
           s.result_ttl, s.tries, s.key, s.conflict, s.verdict,
           s.linked, s.next, s.waits, s.inputs, s.period, s.max_wait, s.lane, s.cost, s.terms, s.if_new
    FROM unnest(ids, envelopes, shape) WITH ORDINALITY AS g (id, envelope, shape, ord)
    JOIN jsonb_to_recordset(shapes) AS s (
        n int, line int, rank bigint, delay float8, at float8, expires float8, timeout float8,
        ttr float8, result_ttl float8, tries int, key text, conflict text, verdict int,
        linked boolean, next text[], waits text, inputs text[], period float8, max_wait float8,
        lane text, cost float8, terms float8[], if_new boolean)
    ON s.n = g.shape
$$;

-- Accept jobs, all or none, in order. The answer is NULL when all were created, else [how, id] each.
CREATE OR REPLACE FUNCTION tidemill.put_jobs(
    ids text[], envelopes bytea[], shape int[], shapes jsonb, hold text[], let_go text[],
    p tidemill.prefs) RETURNS jsonb
LANGUAGE plpgsql
SET search_path = tidemill, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    t      float8 := clock(p);
    answer jsonb;
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
    -- Whoever fills a bounded queue does so alone, or two would take the last place.
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
        PERFORM put_plain(ids, envelopes, shape, shapes, t);
        IF jsonb_path_exists(shapes, '$[*].lane') THEN
            PERFORM park_new(ids, shapes);
        END IF;
        IF linked THEN
            PERFORM link(NULL, ids, shape, shapes, hold, let_go, true, t, p);
        END IF;
        RETURN NULL;
    END IF;
    -- A job whose time has passed must not refuse another.
    PERFORM come_due(seen, t, p);
    answer := '[]';
    FOR g IN SELECT * FROM unpack(ids, envelopes, shape, shapes) ORDER BY ord LOOP
        answer := answer || jsonb_build_array(put_one(g, true, t, p));
    END LOOP;
    IF linked THEN
        PERFORM link(NULL, ids, shape, shapes, hold, let_go, true, t, p);
    END IF;
    RETURN answer;
END $$;

-- The hot path: jobs without keys, in queues without bounds. Those of lanes stand nowhere yet: park_new.
CREATE OR REPLACE FUNCTION tidemill.put_plain(
    ids text[], envelopes bytea[], shape int[], shapes jsonb, t float8) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    stored bigint;
    first  bigint;
BEGIN
    WITH given AS MATERIALIZED (
        SELECT nextval('acceptance') AS seq, g.*,
               CASE WHEN g.delay > 0 THEN t + g.delay ELSE g.at END AS due,
               CASE WHEN g.expires > 0 THEN t + g.expires ELSE 0 END AS until
        FROM (SELECT * FROM unpack(ids, envelopes, shape, shapes) ORDER BY ord) AS g
    ), new AS (
        INSERT INTO job (seq, rank, due, expires, timeout, ttr, result_ttl, line, policy, tries, id,
                         envelope, linked, inputs, lane, cost)
        SELECT seq, rank, due, until, timeout, ttr, result_ttl, line, tries, tries, id, envelope,
               coalesce(linked, false), inputs, lane, cost
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
    IF stored < cardinality(ids) THEN
        PERFORM refuse_id(g.id)
        FROM unnest(ids) WITH ORDINALITY AS g (id, ord)
        WHERE array_position(ids, g.id) < g.ord
           OR EXISTS (SELECT FROM job WHERE job.id = g.id AND job.seq < first)
        ORDER BY ord;
        PERFORM refuse_id(ids[1]);  -- it was there a moment ago
    END IF;
END $$;

CREATE OR REPLACE FUNCTION tidemill.refuse_id(taken text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'TM001', MESSAGE = 'id', DETAIL = taken;
END $$;

-- One job, whose key another may have, in a queue that may be full. A follower is not limited.
CREATE OR REPLACE FUNCTION tidemill.put_one(
    g tidemill.given, limited boolean, t float8, p tidemill.prefs) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
    k       record;
    held    boolean := false;
    stood   text;
    how     text := 'created';
    start   float8 := CASE WHEN g.delay > 0 THEN t + g.delay ELSE g.at END;
    ends    float8 := CASE WHEN g.period > 0 THEN t + g.period ELSE 0 END;
    began   float8 := 0;
    most    bigint;
    new_seq bigint;
BEGIN
    IF g.key IS NOT NULL THEN
        SELECT * INTO k FROM find_key(g.key, t);
        held := FOUND;
    END IF;
    IF held AND g.conflict = 'reject' THEN
        RAISE EXCEPTION USING ERRCODE = 'TM001', MESSAGE = 'key', DETAIL = g.key, HINT = g.id;
    END IF;
    IF EXISTS (SELECT FROM job WHERE id = g.id) THEN
        PERFORM refuse_id(g.id);
    END IF;
    IF held THEN
        IF k.over IS NOT NULL THEN
            RETURN jsonb_build_array('kept', k.over);
        END IF;
    END IF;
    IF held AND g.conflict = 'merge' THEN
        stood := unplace(k.holder, false);
        IF stood <> 'running' THEN
            PERFORM merge(k.holder, stood, g.rank, start, t);
            RETURN jsonb_build_array('merged', (SELECT id FROM job WHERE seq = k.holder));
        END IF;
    END IF;
    IF held AND g.conflict <> 'replace' THEN
        RETURN jsonb_build_array('kept', (SELECT id FROM job WHERE seq = k.holder));
    END IF;
    IF held THEN
        stood := unplace(k.holder, false);
        IF k.successor IS NOT NULL THEN  -- first: it must not be promoted
            PERFORM unplace(k.successor, false);
            PERFORM finish(k.successor, 'cancelled', 'replaced by ' || g.id, NULL, t, p);
        END IF;
        IF stood <> 'running' THEN
            PERFORM finish(k.holder, 'cancelled', 'replaced by ' || g.id, NULL, t, p);
        END IF;
        how := CASE WHEN stood = 'running' THEN 'successor' ELSE 'replaced' END;
    END IF;
    IF g.key IS NOT NULL AND g.max_wait > 0 THEN
        IF held AND (k.successor IS NOT NULL OR stood <> 'running') THEN
            began := k.since;
        END IF;
        began := CASE WHEN began > 0 THEN began ELSE t END;
        IF start > greatest(t, began + g.max_wait) THEN
            start := CASE WHEN began + g.max_wait > t THEN began + g.max_wait ELSE 0 END;
        END IF;
    END IF;
    IF limited AND g.waits IS NULL THEN
        SELECT max_size INTO most FROM queue WHERE number = g.line / 4;
        IF most > 0 AND size_of(g.line / 4) >= most THEN
            RAISE EXCEPTION USING ERRCODE = 'TM002', MESSAGE = most::text,
                DETAIL = (SELECT name FROM queue WHERE number = g.line / 4);
        END IF;
    END IF;
    INSERT INTO job (seq, rank, due, expires, timeout, ttr, result_ttl, line, policy, tries, id, key,
                     envelope, linked, inputs, lane, cost)
    VALUES (nextval('acceptance'), g.rank, start,
            CASE WHEN g.expires > 0 THEN t + g.expires ELSE 0 END, g.timeout, g.ttr, g.result_ttl,
            g.line, g.tries, g.tries, g.id, g.key, g.envelope, coalesce(g.linked, false), g.inputs,
            g.lane, g.cost)
    ON CONFLICT (id) DO NOTHING
    RETURNING seq INTO new_seq;
    IF NOT FOUND THEN
        PERFORM refuse_id(g.id);
    END IF;
    PERFORM count(g.line, 'accepted');
    IF g.lane IS NOT NULL THEN
        PERFORM declare(g.lane, g.terms, g.if_new);
    END IF;
    IF g.expires > 0 THEN
        INSERT INTO expiry (seq, due) VALUES (new_seq, t + g.expires);
    END IF;
    IF how = 'successor' THEN
        UPDATE key SET successor = new_seq, until = ends, since = began
        WHERE key.key = g.key;
        INSERT INTO later (seq, due, waiting) VALUES (new_seq, start, true);
        PERFORM count(g.line, 'waiting');
    ELSIF g.waits IS NOT NULL THEN
        INSERT INTO later (seq, due, waiting) VALUES (new_seq, start, true);
        PERFORM count(g.line, 'waiting');
    ELSE
        IF g.key IS NOT NULL THEN
            INSERT INTO key (key, holder, until, since) VALUES (g.key, new_seq, ends, began);
        END IF;
        PERFORM place(new_seq, t);
    END IF;
    RETURN jsonb_build_array(how, g.id);
END $$;

-- pyspider's rule: the higher priority and the earlier time win, the data stay.
CREATE OR REPLACE FUNCTION tidemill.merge(
    holder bigint, stood text, new_rank bigint, new_due float8, t float8) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE job SET rank = least(rank, new_rank),
                   due = CASE WHEN stood = 'scheduled' THEN least(due, new_due) ELSE due END
    WHERE seq = holder;
    PERFORM place(holder, t);
END $$;

-- Unfinished jobs of a queue, now.
CREATE OR REPLACE FUNCTION tidemill.size_of(which int) RETURNS bigint
LANGUAGE plpgsql AS $$
BEGIN
    RETURN (SELECT coalesce(sum(waiting + scheduled + ready + running), 0)
            FROM tally WHERE queue = which);
END $$;

-- A put that must not fail, since settling must not: no limit holds, a taken id is kept.
CREATE OR REPLACE FUNCTION tidemill.follow(
    after int, ids text[], envelopes bytea[], shape int[], shapes jsonb, t float8,
    p tidemill.prefs) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    g      given;
    linked text[];
BEGIN
    FOR g IN
        SELECT * FROM unpack(ids, envelopes, shape, shapes) WHERE verdict = after ORDER BY ord
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
        PERFORM link(linked, ids, shape, shapes, '{}', '{}', false, t, p);
    END IF;
END $$;

-- The numbers of queues, made if they are new.
CREATE OR REPLACE FUNCTION tidemill.queue_numbers(names text[])
RETURNS TABLE (name text, number int)
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    INSERT INTO queue (name) SELECT n FROM unnest(names) AS n ORDER BY n
    ON CONFLICT ON CONSTRAINT queue_name_key DO NOTHING;
    RETURN QUERY SELECT queue.name, queue.number FROM queue WHERE queue.name = ANY (names);
END $$;

-- One call of a producer, committed. Then, in a transaction of its own, those who sleep are told: a
-- sleeper that marked itself before that one looks is seen by it, and one that marks itself later
-- looks once more itself (see 50_exchange.sql). The second commit need not reach the disk, so that
-- NOTIFY, under whose lock no two transactions commit, holds nobody up.
CREATE OR REPLACE PROCEDURE tidemill.put(
    client text, this bigint, ids text[], envelopes bytea[], shape int[], shapes jsonb,
    hold text[], let_go text[], p tidemill.prefs, chores int, INOUT answer jsonb)
LANGUAGE plpgsql AS $$
DECLARE
    stored boolean;
    place  text;
    word   text;
BEGIN
    UPDATE tidemill.call AS c SET serial = this, seen = tidemill.clock(p), answer = NULL
    WHERE c.line = client AND c.serial < this;
    IF NOT FOUND THEN
        INSERT INTO tidemill.call (line, serial, seen, once)
        VALUES (client, this, tidemill.clock(p), CASE WHEN client LIKE 'once %' THEN tidemill.clock(p) END)
        ON CONFLICT DO NOTHING;
        IF NOT FOUND THEN  -- it was done before
            SELECT c.answer INTO answer FROM tidemill.call AS c WHERE c.line = client;
            PERFORM tidemill.flush();
            COMMIT;
            PERFORM tidemill.ring_again(p);
            RETURN;
        END IF;
    END IF;
    IF cardinality(ids) = 1 THEN
        SELECT * INTO stored, place, word FROM tidemill.put_single(ids, envelopes, shapes, p);
    END IF;
    IF stored IS NULL THEN
        answer := tidemill.put_jobs(ids, envelopes, shape, shapes, hold, let_go, p);
        IF answer IS NOT NULL THEN
            UPDATE tidemill.call AS c SET answer = put.answer WHERE c.line = client;
        END IF;
    END IF;
    IF place IS NOT NULL THEN
        PERFORM set_config('synchronous_commit', 'off', true);
        COMMIT;
        PERFORM set_config('synchronous_commit', 'off', true);
        BEGIN
            PERFORM pg_notify(place, word);
        EXCEPTION WHEN OTHERS THEN  -- it is accepted, and found with the next step
            RAISE WARNING 'nobody was told of a job: %', SQLERRM;
        END;
        COMMIT;
        PERFORM tidemill.flush();
        COMMIT;
    ELSE
        COMMIT;
        IF stored IS NULL THEN  -- put_single stores nothing that is limited
            IF EXISTS (SELECT FROM tidemill.inbox) OR EXISTS (SELECT FROM tidemill.said) THEN
                CALL tidemill.open_gates(p);
            END IF;
        END IF;
    END IF;
    PERFORM set_config('synchronous_commit', 'off', true);
    IF place IS NULL THEN
        PERFORM tidemill.ring(0, answer IS NOT NULL OR jsonb_path_exists(shapes, '$[*].linked'),
                              '{}', p);
    END IF;
    IF chores > 0 THEN
        COMMIT;
        PERFORM set_config('synchronous_commit', 'off', true);
        PERFORM tidemill.do_chores(chores, p);
    END IF;
END $$;

-- The same inside a transaction of the caller's own. When that commits we cannot say, so everybody
-- hears of it then and looks.
CREATE OR REPLACE FUNCTION tidemill.put_inside(
    ids text[], envelopes bytea[], shape int[], shapes jsonb, hold text[], let_go text[],
    p tidemill.prefs) RETURNS jsonb
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    PERFORM tell_all('all');
    RETURN put_jobs(ids, envelopes, shape, shapes, hold, let_go, p);
END $$;
