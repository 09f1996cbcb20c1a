-- Acting on jobs by their ids: each says whether it did anything. Whoever sleeps or waits looks again.

-- A call that changes something, on a line of a client: whether it is new, and else what it was told.
CREATE OR REPLACE FUNCTION tidemill.begin_call(
    client text, this bigint, p tidemill.prefs, OUT fresh boolean, OUT told jsonb)
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    UPDATE call SET serial = this, seen = clock(p), answer = NULL
    WHERE line = client AND serial < this;
    IF NOT FOUND THEN
        INSERT INTO call (line, serial, seen) VALUES (client, this, clock(p)) ON CONFLICT DO NOTHING;
    END IF;
    fresh := FOUND;
    IF NOT fresh THEN
        told := (SELECT answer FROM call WHERE line = client);
    END IF;
END $$;

-- What it came to, kept for when the reply is lost.
CREATE OR REPLACE FUNCTION tidemill.end_call(client text, said jsonb) RETURNS jsonb
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    UPDATE call SET answer = said WHERE line = client;
    RETURN said;
END $$;

CREATE OR REPLACE FUNCTION tidemill.cancel(ids text[], verb text, p tidemill.prefs) RETURNS boolean[]
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
DECLARE
    done   boolean[] := '{}';
    which  bigint;
    stood  text;
    t      float8 := clock(p);
    seqs   bigint[] := seqs_of(ids);
    seen   bigint[] := end_by_time(t);
    flows  bigint[];
BEGIN
    PERFORM check_here();
    flows := lock_acts(ids, seqs, seen);
    PERFORM come_due(seen, t, p);
    FOREACH which IN ARRAY seqs LOOP
        stood := unplace(which, false);
        IF stood = 'running' THEN
            UPDATE job SET cancelling = true WHERE seq = which;
            PERFORM add_line(which, CASE verb WHEN 'cancel' THEN 'cancel was asked for'
                                    ELSE 'cancel was asked for, at once' END, t);
            PERFORM send_command(owner.id, verb, lease.token)
            FROM lease JOIN owner ON owner.number = lease.owner WHERE lease.seq = which;
        ELSIF stood <> 'finished' THEN
            PERFORM finish(which, 'cancelled', 'cancelled before it started', NULL, t, p);
            IF which = ANY (flows) THEN
                PERFORM flow(ARRAY[which], t, p);
            END IF;
        END IF;
        done := done || coalesce(stood <> 'finished', false);
    END LOOP;
    PERFORM tell_all('all');
    RETURN done;
END $$;

-- Make failed, cancelled or expired jobs ready, as a new run, and scheduled ones; the trail stays. With
-- "how" = force also those that succeeded, or whose key a success holds.
CREATE OR REPLACE FUNCTION tidemill.kick(ids text[], how text, p tidemill.prefs) RETURNS boolean[]
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
DECLARE
    done  boolean[] := '{}';
    which bigint;
    t     float8 := clock(p);
    seqs  bigint[] := seqs_of(ids);
    seen  bigint[] := end_by_time(t);
BEGIN
    PERFORM check_here();
    PERFORM lock_acts(ids, seqs, seen);
    PERFORM come_due(seen, t, p);
    FOREACH which IN ARRAY seqs LOOP
        done := done || kick_one(which, how = 'force', t, p);
    END LOOP;
    PERFORM tell_all('all');
    RETURN done;
END $$;

CREATE OR REPLACE FUNCTION tidemill.kick_one(
    which bigint, force boolean, t float8, p tidemill.prefs) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    j     record;
    d     record;
    held  float8 := 0;
BEGIN
    SELECT seq, key, line, linked INTO j FROM job WHERE seq = which;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF j.key IS NOT NULL THEN
        PERFORM find_key(j.key, t);
    END IF;
    DELETE FROM later WHERE seq = j.seq AND NOT waiting;
    IF FOUND THEN
        PERFORM count(j.line, 'scheduled', -1);
        UPDATE job SET due = 0 WHERE seq = j.seq;
        PERFORM place(j.seq, t);
        RETURN true;
    END IF;
    SELECT * INTO d FROM done WHERE seq = j.seq FOR UPDATE;
    IF NOT FOUND OR d.state = 4 AND NOT (force AND NOT j.linked)
        OR EXISTS (SELECT FROM behind WHERE seq = j.seq AND waits = 'barrier') THEN  -- never run
        RETURN false;
    END IF;
    IF j.key IS NOT NULL THEN  -- at most one unfinished job per key
        IF force THEN
            DELETE FROM key WHERE key = j.key AND over IS NOT NULL RETURNING until INTO held;
        END IF;
        INSERT INTO key (key, holder, until) VALUES (j.key, j.seq, coalesce(held, 0))
        ON CONFLICT DO NOTHING;
        IF NOT FOUND THEN
            RETURN false;
        END IF;
    END IF;
    DELETE FROM done WHERE seq = j.seq;
    IF d.class < 2 THEN
        PERFORM count(j.line, 'kept', -1);
    END IF;
    UPDATE behind SET dropped = false WHERE seq = j.seq;
    PERFORM revive(j.seq, t);
    UPDATE job SET
        attempt = 0, tries = policy,
        losses = 0, line = CASE WHEN line & 3 = 2 THEN line - 2 ELSE line END, cancelling = false,
        error = '', expires = 0, due = 0, returns = returns + 1,
        trail = CASE WHEN d.attempt IS NULL THEN trail ELSE  -- its last attempt just succeeded
            coalesce(trail, '[]') || jsonb_build_array(jsonb_build_array(
                d.attempt, d.worker, d.leased, d.started, d.ended, 0, '', '', run_of(trail, d.attempt)))
            END
    WHERE seq = j.seq;
    PERFORM place(j.seq, t);
    RETURN true;
END $$;

-- Forget jobs in any state; a running one loses its lease.
CREATE OR REPLACE FUNCTION tidemill.delete(ids text[], p tidemill.prefs) RETURNS boolean[]
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
DECLARE
    done   boolean[] := '{}';
    which  bigint;
    seqs   bigint[] := seqs_of(ids);
    flows  bigint[];
    l      record;
BEGIN
    PERFORM check_here();
    flows := lock_acts(ids, seqs, '{}');
    FOREACH which IN ARRAY seqs LOOP
        IF which = ANY (flows) AND NOT EXISTS (SELECT FROM done WHERE seq = which) THEN
            l := less_behind(ARRAY[which], '{0}');
        END IF;
        done := done || CASE WHEN which IS NULL THEN false ELSE delete_one(which, clock(p)) END;
        IF l IS NOT NULL THEN
            PERFORM count_down(l.names, l.numbers, l.failed, l.whys, clock(p), p);
            l := NULL;
        END IF;
    END LOOP;
    PERFORM tell_all('all');
    RETURN done;
END $$;

CREATE OR REPLACE FUNCTION tidemill.delete_one(which bigint, t float8) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    stood text := unplace(which, true);
    j     record;
    class int;
BEGIN
    SELECT key, line, linked INTO j FROM job WHERE seq = which;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF stood = 'finished' THEN
        DELETE FROM done WHERE seq = which RETURNING done.class INTO class;
        DELETE FROM key WHERE key.key = j.key AND holder = which AND over IS NOT NULL;
        IF class < 2 THEN
            PERFORM count(j.line, 'kept', -1);
        END IF;
    ELSIF j.key IS NOT NULL THEN
        PERFORM give_up_key(j.key, which, t);
    END IF;
    IF j.linked THEN
        DELETE FROM edge WHERE parent = which;
    END IF;
    PERFORM forget(which);
    RETURN true;
END $$;

-- The jobs that a purge of a queue finds in its next piece, and the place of the piece after that; NULL at the
-- end. A piece looks at "most" jobs: first at those of all queues that are scheduled, or wait, then at those of all
-- queues that are under limits, then at those that are ready here. A job that comes due meanwhile is found in a
-- later piece. Jobs are deleted in the order of acceptance. A job that waits for other jobs was put before them: so
-- the purge deletes that job first, and does not cancel it.
CREATE OR REPLACE FUNCTION tidemill.purge_piece(
    q int, most int, place jsonb, OUT here bigint[], OUT next jsonb)
LANGUAGE plpgsql AS $$
DECLARE
    seen int;
    last bigint;
BEGIN
    IF place ->> 'in' = 'later' THEN
        SELECT array_agg(x.seq) FILTER (WHERE j.line / 4 = q), count(*), max(x.seq) INTO here, seen, last
        FROM (SELECT seq FROM later WHERE seq > (place -> 'after')::bigint ORDER BY seq LIMIT most) AS x
        CROSS JOIN LATERAL (SELECT line FROM job WHERE job.seq = x.seq OFFSET 0) AS j;
        next := CASE WHEN seen < most THEN '{"in": "parked", "lane": "", "line": 0, "rank": 0, "seq": 0}'
                     ELSE jsonb_build_object('in', 'later', 'after', last) END;
    ELSIF place ->> 'in' = 'parked' THEN
        WITH piece AS MATERIALIZED (
            SELECT lane, line, rank, seq FROM parked
            WHERE (lane, line, rank, seq) > (place ->> 'lane', (place -> 'line')::int,
                                             (place -> 'rank')::bigint, (place -> 'seq')::bigint)
            ORDER BY lane, line, rank, seq LIMIT most
        )
        SELECT (SELECT array_agg(seq) FROM piece WHERE line / 4 = q), count(*),
               (SELECT to_jsonb(x) FROM piece AS x ORDER BY lane DESC, line DESC, rank DESC, seq DESC LIMIT 1)
        INTO here, seen, next FROM piece;
        next := CASE WHEN seen < most THEN '{"in": "ready"}' ELSE next || '{"in": "parked"}' END;
    ELSE
        here := ARRAY (
            SELECT seq FROM ready WHERE line BETWEEN q * 4 AND q * 4 + 3
            UNION ALL
            SELECT seq FROM lease WHERE owner = 0 AND line BETWEEN q * 4 AND q * 4 + 3
            LIMIT most);
        next := place;
    END IF;
    here := coalesce(here, '{}');
END $$;

-- Delete a piece of what waits in a queue, in whatever state: how many jobs that were, and the place of the next
-- piece, or null.
CREATE OR REPLACE FUNCTION tidemill.purge(name text, most int, place jsonb, p tidemill.prefs) RETURNS jsonb
LANGUAGE plpgsql
SET search_path = tidemill, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    q       int;
    here    bigint[];
    next    jsonb;
    flows   bigint[];
    which   bigint;
    removed bigint[] := '{}';
    l       record;
BEGIN
    PERFORM check_here();
    SELECT number INTO q FROM queue WHERE queue.name = purge.name;
    IF NOT FOUND THEN
        RETURN '[0, null]';
    END IF;
    SELECT * INTO here, next FROM purge_piece(q, most, place);
    IF here = '{}' THEN
        RETURN jsonb_build_array(0, CASE WHEN place ->> 'in' <> 'ready' THEN next END);
    END IF;
    PERFORM lock_keys(here, '{}');
    flows := lock_flows(here, all_bad(here), names_of(here));
    FOREACH which IN ARRAY here LOOP
        IF unplace(which, false) IN ('ready', 'scheduled', 'waiting') THEN
            PERFORM give_up_key(key, which, clock(p)) FROM job WHERE seq = which AND key IS NOT NULL;
            removed := removed || which;
        END IF;
    END LOOP;
    -- Not behind one that was leased meanwhile: that runs, and is still waited for.
    flows := ARRAY (SELECT f FROM unnest(flows) AS f WHERE f = ANY (removed));
    l := less_behind(flows, array_fill(0, ARRAY[cardinality(flows)]));
    FOREACH which IN ARRAY removed LOOP
        PERFORM forget(which);
    END LOOP;
    -- Not before all are gone: what is purged is not cancelled.
    DELETE FROM edge WHERE parent = ANY (flows);
    PERFORM count_down(l.names, l.numbers, l.failed, l.whys, clock(p), p);
    IF cardinality(removed) > 0 THEN
        INSERT INTO tally (queue, purged) VALUES (q, cardinality(removed));
    ELSIF place ->> 'in' = 'ready' THEN  -- they were leased meanwhile
        next := NULL;
    END IF;
    PERFORM tell_all('all');
    RETURN jsonb_build_array(cardinality(removed), next);
END $$;

-- Forget the counters and settings of a queue without unfinished jobs; false when it has some. The number
-- stays: producers know it, and finished jobs and limits have it. Jobs that others put meanwhile are counted.
CREATE OR REPLACE FUNCTION tidemill.forget_queue(which text) RETURNS boolean
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
DECLARE
    q int;
BEGIN
    PERFORM check_here();
    PERFORM pg_advisory_xact_lock('tally'::regclass::oid::int, 0);  -- nobody folds the counters now
    SELECT number INTO q FROM queue WHERE name = which FOR UPDATE;
    IF (SELECT sum(waiting + scheduled + ready + running) FROM tally WHERE queue = q) > 0 THEN
        RETURN false;
    END IF;
    WITH gone AS (DELETE FROM tally WHERE queue = q RETURNING *)
    INSERT INTO tally (queue, waiting, scheduled, ready, running, kept, carried)
    SELECT queue, sum(waiting), sum(scheduled), sum(ready), sum(running), sum(kept), sum(carried)
    FROM gone GROUP BY queue;
    UPDATE queue SET listed = false, paused = false, max_size = 0 WHERE number = q;
    RETURN true;
END $$;

-- The numbers of these jobs, NULL where there is none. Acts on jobs look once, before they lock: of one
-- that comes later nothing would be locked.
CREATE OR REPLACE FUNCTION tidemill.seqs_of(ids text[]) RETURNS bigint[]
LANGUAGE plpgsql AS $$
BEGIN
    RETURN ARRAY (SELECT (SELECT seq FROM job WHERE id = n)
                  FROM unnest(ids) WITH ORDINALITY AS x (n, ord) ORDER BY ord);
END $$;

-- Lock what acts on these jobs may end, in the order in which all lock; those that have any behind them.
CREATE OR REPLACE FUNCTION tidemill.lock_acts(ids text[], seqs bigint[], seen bigint[])
RETURNS bigint[]
LANGUAGE plpgsql AS $$
DECLARE
    these bigint[] := array_remove(seqs, NULL);
    jobs  bigint[] := these || seen;
    flows bigint[];
BEGIN
    PERFORM lock_keys(jobs, '{}');
    flows := lock_flows(jobs, all_bad(jobs), ids || names_of(seen));
    -- What is ready stays so, or it would be leased and ended by somebody who waits for us.
    PERFORM FROM (SELECT * FROM job WHERE seq = ANY (these)) AS j CROSS JOIN LATERAL (
        SELECT FROM ready AS r WHERE r.line = j.line AND r.rank = j.rank AND r.seq = j.seq
        FOR UPDATE OFFSET 0) AS locked;
    PERFORM FROM (SELECT * FROM job WHERE seq = ANY (these) AND lane IS NOT NULL) AS j
    CROSS JOIN LATERAL (
        SELECT FROM parked AS r
        WHERE r.lane = j.lane AND r.line = j.line AND r.rank = j.rank AND r.seq = j.seq
        FOR UPDATE OFFSET 0) AS locked;
    PERFORM FROM lease WHERE seq = ANY (these) ORDER BY seq FOR UPDATE;
    RETURN flows;
END $$;

-- The ids of those of some jobs that wait for others, or did.
CREATE OR REPLACE FUNCTION tidemill.names_of(jobs bigint[]) RETURNS text[]
LANGUAGE plpgsql AS $$
BEGIN
    RETURN ARRAY (SELECT id FROM behind WHERE seq = ANY (jobs));
END $$;

CREATE OR REPLACE FUNCTION tidemill.set_queue(which int, pause boolean, bound bigint) RETURNS void
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    PERFORM check_here();
    UPDATE queue SET listed = true, paused = coalesce(pause, paused),
                     max_size = coalesce(bound, max_size)
    WHERE number = which;
    PERFORM tell_all('all');
END $$;
