-- Acts on jobs by their ids: each act says whether it did anything. Sleeping owners and waiters look again.

-- Begin a call that changes something, on a connection of a client. "told" is the kept answer of a repeated call.
CREATE OR REPLACE FUNCTION tidemill.begin_call(
    client text, this bigint, p tidemill.prefs, OUT fresh boolean, OUT told jsonb)
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    UPDATE call SET serial = this, seen = clock(p), answer = NULL
    WHERE line = client AND serial < this;
    IF NOT FOUND THEN
        INSERT INTO call (line, serial, seen, once)
        VALUES (client, this, clock(p), CASE WHEN client LIKE 'once %' THEN clock(p) END)
        ON CONFLICT DO NOTHING;
    END IF;
    fresh := FOUND;
    IF NOT fresh THEN
        told := (SELECT answer FROM call WHERE line = client);
    END IF;
END $$;

-- Keep the answer of a call, in case the reply is lost.
CREATE OR REPLACE FUNCTION tidemill.end_call(client text, said jsonb) RETURNS jsonb
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    UPDATE call SET answer = said WHERE line = client;
    RETURN said;
END $$;

-- Cancel jobs. The verb is "cancel", "terminate", or the error of a purge, which leaves the jobs that run.
CREATE OR REPLACE FUNCTION tidemill.cancel(ids text[], verb text, p tidemill.prefs) RETURNS boolean[]
LANGUAGE plpgsql SET search_path = tidemill, pg_temp SET enable_seqscan = off AS $$
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
        IF stood = 'running' AND is_purged(verb) THEN
            done := done || false;
            CONTINUE;
        ELSIF stood = 'running' THEN
            UPDATE job SET cancelling = true WHERE seq = which;
            PERFORM add_line(which, CASE verb WHEN 'cancel' THEN 'cancel was asked for'
                                    ELSE 'cancel was asked for, at once' END, t);
            PERFORM send_command(owner.id, verb, lease.token)
            FROM lease JOIN owner ON owner.number = lease.owner WHERE lease.seq = which;
        ELSIF stood <> 'finished' THEN
            PERFORM finish(which, 'cancelled', CASE WHEN is_purged(verb) THEN verb
                           ELSE 'cancelled before it started' END, NULL, t, p);
            IF which = ANY (flows) THEN
                PERFORM flow(ARRAY[which], t, p);
            END IF;
        END IF;
        done := done || coalesce(stood <> 'finished', false);
    END LOOP;
    PERFORM tell_all('all');
    RETURN done;
END $$;

-- Make jobs ready, or scheduled for the time "start": scheduled jobs, and failed, cancelled or expired jobs. An ended job begins a new
-- run, and keeps its trail. With "how" = force, also jobs that succeeded, and jobs whose key
-- belongs to a succeeded job.
CREATE OR REPLACE FUNCTION tidemill.retry(ids text[], how text, start text, p tidemill.prefs) RETURNS boolean[]
LANGUAGE plpgsql SET search_path = tidemill, pg_temp SET enable_seqscan = off AS $$
DECLARE
    done  boolean[] := '{}';
    which bigint;
    t     float8 := clock(p);
    seqs  bigint[] := seqs_of(ids);
    seen  bigint[] := end_by_time(t);
    did   boolean;
BEGIN
    PERFORM check_here();
    PERFORM lock_acts(ids, seqs, seen);
    PERFORM come_due(seen, t, p);
    FOREACH which IN ARRAY seqs LOOP
        did := CASE WHEN how = 'scheduled' AND NOT EXISTS (SELECT FROM later WHERE seq = which AND NOT waiting)
               THEN false ELSE retry_one(which, how = 'force', start::float8, t, p) END;
        IF did AND how <> 'scheduled' THEN
            PERFORM add_line(which, 'retry was asked for', t);
        END IF;
        done := done || did;
    END LOOP;
    PERFORM tell_all('all');
    RETURN done;
END $$;

CREATE OR REPLACE FUNCTION tidemill.retry_one(
    which bigint, force boolean, start float8, t float8, p tidemill.prefs) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    j     record;
    d     record;
    b     record;
    held  float8 := 0;
BEGIN
    SELECT seq, id, key, line, linked INTO j FROM job WHERE seq = which;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF j.key IS NOT NULL THEN
        PERFORM find_key(j.key, t);
    END IF;
    DELETE FROM later WHERE seq = j.seq AND NOT waiting;
    IF FOUND THEN
        PERFORM count(j.line, 'scheduled', -1);
        UPDATE job SET due = start WHERE seq = j.seq;
        PERFORM place(j.seq, t);
        RETURN true;
    END IF;
    SELECT * INTO d FROM done WHERE seq = j.seq FOR UPDATE;
    IF NOT FOUND OR d.state = 4 AND NOT (force AND NOT j.linked) OR NOT may_wait_anew(j.seq) THEN
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
    PERFORM revive(j.seq);
    UPDATE job SET
        attempt = 0, tries = policy,
        losses = 0, line = CASE WHEN line & 3 = 2 THEN line - 2 ELSE line END, cancelling = false,
        error = '', expires = 0, due = start, returns = returns + 1,
        trail = CASE WHEN d.attempt IS NULL THEN trail ELSE  -- add its last attempt, a success
            coalesce(trail, '[]') || jsonb_build_array(jsonb_build_array(
                d.attempt, d.worker, d.leased, d.started, d.ended, 0, '', '', run_of(trail, d.attempt)))
            END
    WHERE seq = j.seq;
    SELECT waits, pending INTO b FROM behind WHERE seq = j.seq;
    IF b.pending > 0 OR b.waits = 'barrier' THEN
        PERFORM wait_anew(j.seq, j.id, j.line, t, p);
    ELSE
        PERFORM place(j.seq, t);
    END IF;
    RETURN true;
END $$;

-- Whether a job may end otherwise than before, for how its parents ended.
CREATE OR REPLACE FUNCTION tidemill.may_wait_anew(which bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    RETURN NOT EXISTS (SELECT FROM behind WHERE seq = which
                       AND (waits = 'success' AND failures > 0 OR waits = 'barrier' AND dropped));
END $$;

-- Make a job, which no table holds, wait for its parents again. It may begin at once.
CREATE OR REPLACE FUNCTION tidemill.wait_anew(
    which bigint, name text, line int, t float8, p tidemill.prefs) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO later (seq, due, waiting) SELECT seq, due, true FROM job WHERE seq = which;
    PERFORM count(line, 'waiting');
    PERFORM count_down(ARRAY[name], ARRAY[0], ARRAY[0], ARRAY[''], t, p);
END $$;

-- Forget jobs in any state; a running job loses its lease.
CREATE OR REPLACE FUNCTION tidemill.delete(ids text[], p tidemill.prefs) RETURNS boolean[]
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
DECLARE
    done   boolean[] := '{}';
    which  bigint;
    seqs   bigint[] := seqs_of(ids);
    flows  bigint[];
    l      record;
BEGIN
    IF is_sealed() THEN
        PERFORM check_here();
    END IF;
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

-- Forget the counters and settings of a queue without unfinished jobs; false when it has some. The number
-- stays, since producers, finished jobs and limits use it. Jobs that others put meanwhile are counted.
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
    INSERT INTO tally (queue, waiting, scheduled, ready, running, kept)
    SELECT queue, sum(waiting), sum(scheduled), sum(ready), sum(running), sum(kept)
    FROM gone GROUP BY queue;
    UPDATE queue SET listed = false, paused = false, max_size = 0 WHERE number = q;
    RETURN true;
END $$;

-- The numbers of these jobs, NULL where there is no such job. An act on jobs looks once, before it
-- locks. A job that is put later is not locked, so the act leaves this job alone.
CREATE OR REPLACE FUNCTION tidemill.seqs_of(ids text[]) RETURNS bigint[]
LANGUAGE plpgsql AS $$
BEGIN
    RETURN ARRAY (SELECT (SELECT seq FROM job WHERE id = n)
                  FROM unnest(ids) WITH ORDINALITY AS x (n, ord) ORDER BY ord);
END $$;

-- Lock rows that acts on these jobs may change, in the order that all use. Returns the jobs that have children.
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
    -- Keep ready jobs ready: another step could lease and end them, and wait for our locks.
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

-- Of these jobs, the ids of those that wait, or have waited, for other jobs.
CREATE OR REPLACE FUNCTION tidemill.names_of(jobs bigint[]) RETURNS text[]
LANGUAGE plpgsql AS $$ BEGIN RETURN ARRAY (SELECT id FROM behind WHERE seq = ANY (jobs)); END $$;

CREATE OR REPLACE FUNCTION tidemill.set_queue(which int, pause boolean, bound bigint) RETURNS void
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    PERFORM check_here();
    UPDATE queue SET listed = true, paused = coalesce(pause, paused),
                     max_size = coalesce(bound, max_size)
    WHERE number = which;
    PERFORM tell_all('all');
END $$;
