-- Transitions of single jobs; other functions make transitions in bulk. Functions called from
-- outside set the search path. The functions that they call rely on that path.
--
-- A job stands in one of the tables "ready", "parked", "later", "lease" and "done": it has a row
-- there. In the middle of a transition, a job stands nowhere.

CREATE OR REPLACE FUNCTION tidemill.clock(p tidemill.prefs) RETURNS float8
LANGUAGE sql AS $$ SELECT extract(epoch FROM clock_timestamp())::float8 + p.shift $$;

-- Count one change of a queue.
CREATE OR REPLACE FUNCTION tidemill.count(line int, what text, change int DEFAULT 1) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO tally (queue, waiting, scheduled, ready, running, accepted, succeeded, failed,
                       retried, cancelled, expired, purged, kept)
    VALUES (line / 4,
            CASE what WHEN 'waiting' THEN change ELSE 0 END,
            CASE what WHEN 'scheduled' THEN change ELSE 0 END,
            CASE what WHEN 'ready' THEN change ELSE 0 END,
            CASE what WHEN 'running' THEN change ELSE 0 END,
            CASE what WHEN 'accepted' THEN change ELSE 0 END,
            CASE what WHEN 'succeeded' THEN change ELSE 0 END,
            CASE what WHEN 'failed' THEN change ELSE 0 END,
            CASE what WHEN 'retried' THEN change ELSE 0 END,
            CASE what WHEN 'cancelled' THEN change ELSE 0 END,
            CASE what WHEN 'expired' THEN change ELSE 0 END,
            CASE what WHEN 'purged' THEN change ELSE 0 END,
            CASE what WHEN 'kept' THEN change ELSE 0 END);
END $$;

-- Place a job that stands nowhere: as ready or as scheduled, by its due time.
CREATE OR REPLACE FUNCTION tidemill.place(job_seq bigint, t float8) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    j record;
BEGIN
    SELECT line, rank, due, lane INTO STRICT j FROM job WHERE seq = job_seq;
    IF j.due > t THEN
        INSERT INTO later (seq, due, waiting) VALUES (job_seq, j.due, false);
        PERFORM count(j.line, 'scheduled');
    ELSE
        IF j.lane IS NULL THEN
            INSERT INTO ready (line, rank, seq) VALUES (j.line, j.rank, job_seq);
        ELSE
            PERFORM park(ARRAY[job_seq]);
        END IF;
        PERFORM count(j.line, 'ready');
    END IF;
END $$;

-- Take a job from its place, and return the name of the place; NULL when there is no such job. A
-- finished job stays; with runs = false a running job stays, too. If another transaction moves the job
-- meanwhile, we find nothing and look again.
CREATE OR REPLACE FUNCTION tidemill.unplace(job_seq bigint, runs boolean) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    j     record;
    l     lease;
    waits boolean;
BEGIN
    FOR pass IN 1..1000 LOOP
        SELECT line, rank, lane INTO j FROM job WHERE seq = job_seq;
        IF NOT FOUND THEN
            RETURN NULL;
        END IF;
        DELETE FROM ready WHERE line = j.line AND rank = j.rank AND seq = job_seq;
        IF FOUND OR j.lane IS NOT NULL AND unpark(j.lane, j.line, j.rank, job_seq) THEN
            PERFORM count(j.line, 'ready', -1);
            RETURN 'ready';
        END IF;
        DELETE FROM later WHERE seq = job_seq RETURNING waiting INTO waits;
        IF FOUND THEN
            PERFORM count(j.line, CASE WHEN waits THEN 'waiting' ELSE 'scheduled' END, -1);
            RETURN CASE WHEN waits THEN 'waiting' ELSE 'scheduled' END;
        END IF;
        IF runs THEN
            DELETE FROM lease WHERE seq = job_seq RETURNING * INTO l;
        ELSE
            PERFORM FROM lease WHERE seq = job_seq FOR UPDATE;
        END IF;
        IF FOUND THEN
            IF runs THEN
                PERFORM count(j.line, 'running', -1);
                PERFORM leave_gates(l, true, NULL, 0);
            END IF;
            RETURN 'running';
        END IF;
        PERFORM FROM done WHERE seq = job_seq;
        IF FOUND THEN
            RETURN 'finished';
        END IF;
    END LOOP;
    RAISE EXCEPTION 'job % stands nowhere', job_seq;
END $$;

-- Forget a job that no longer stands anywhere.
CREATE OR REPLACE FUNCTION tidemill.forget(job_seq bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM expiry WHERE seq = job_seq;
    DELETE FROM note WHERE seq = job_seq;
    DELETE FROM behind WHERE seq = job_seq;
    DELETE FROM job WHERE seq = job_seq;
END $$;

-- Whether an error is that of a purged job, which is kept as long as a failed job.
CREATE OR REPLACE FUNCTION tidemill.is_purged(error text) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$ SELECT coalesce(starts_with(error, 'purged, in purge '), false) $$;

-- Seconds that a finished job is kept.
CREATE OR REPLACE FUNCTION tidemill.keep_for(
    state text, result_ttl float8, has_result boolean, p tidemill.prefs) RETURNS float8
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN state = 'failed' THEN p.keep_failed
        WHEN state <> 'succeeded' THEN greatest(p.keep, p.protect)
        WHEN result_ttl >= 0 THEN result_ttl
        WHEN has_result THEN greatest(p.keep, p.protect)
        ELSE p.keep
    END
$$;

-- Seconds from the end of a job of a workflow to the first look whether it is needed.
CREATE OR REPLACE FUNCTION tidemill.first_look(state text, result_ttl float8, p tidemill.prefs) RETURNS float8
LANGUAGE sql IMMUTABLE AS $$
    SELECT least(p.protect, CASE WHEN state = 'succeeded' AND result_ttl >= 0 THEN result_ttl END)
$$;

-- End a job that stands nowhere. It is kept for a while; an acked message is forgotten.
CREATE OR REPLACE FUNCTION tidemill.finish(
    job_seq bigint, ending text, why text, answer bytea, t float8, p tidemill.prefs) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    j      record;
    purged boolean := ending = 'cancelled' AND is_purged(why);
BEGIN
    SELECT line, key, result_ttl, linked, id INTO STRICT j FROM job WHERE seq = job_seq;
    PERFORM count(j.line, CASE WHEN purged THEN 'purged' ELSE ending END);
    IF j.key IS NOT NULL AND NOT (ending = 'succeeded' AND hold_key(j.key, job_seq, j.id, t)) THEN
        PERFORM give_up_key(j.key, job_seq, t);
    END IF;
    IF j.line & 3 = 1 AND ending = 'succeeded' THEN
        PERFORM forget(job_seq);
        RETURN;
    END IF;
    DELETE FROM expiry WHERE seq = job_seq;
    INSERT INTO done (seq, prune, finished, class, state, error, result)
    VALUES (job_seq, t + CASE WHEN j.linked THEN first_look(ending, j.result_ttl, p)
                              ELSE keep_for(CASE WHEN purged THEN 'failed' ELSE ending END, j.result_ttl, answer IS NOT NULL, p) END, t,
            CASE WHEN j.linked THEN 3
                 WHEN ending = 'failed' OR purged THEN 2
                 WHEN ending = 'succeeded' AND answer IS NULL THEN 0 ELSE 1 END,
            array_position('{succeeded,failed,cancelled,expired}', ending) + 3, why, answer);
    IF ending <> 'failed' AND NOT purged AND NOT j.linked THEN
        PERFORM count(j.line, 'kept');
    END IF;
END $$;
