-- Acting on jobs by their ids: each says whether it did anything. Whoever sleeps or waits looks again.

CREATE OR REPLACE FUNCTION tidemill.cancel(ids text[], verb text, p tidemill.prefs) RETURNS boolean[]
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
DECLARE
    done   boolean[] := '{}';
    job_id text;
    which  bigint;
    stood  text;
    t      float8 := clock(p);
BEGIN
    PERFORM check_here();
    PERFORM come_due(t, p);
    FOREACH job_id IN ARRAY ids LOOP
        SELECT seq INTO which FROM job WHERE id = job_id;
        stood := CASE WHEN FOUND THEN unplace(which, false) END;
        IF stood = 'running' THEN
            UPDATE job SET cancelling = true WHERE seq = which;
            PERFORM add_line(which, CASE verb WHEN 'cancel' THEN 'cancel was asked for'
                                    ELSE 'cancel was asked for, at once' END, t);
            PERFORM send_command(owner.id, verb, lease.token)
            FROM lease JOIN owner ON owner.number = lease.owner WHERE lease.seq = which;
        ELSIF stood <> 'finished' THEN
            PERFORM finish(which, 'cancelled', 'cancelled before it started', NULL, t, p);
        END IF;
        done := done || coalesce(stood <> 'finished', false);
    END LOOP;
    PERFORM tell_all('all');
    RETURN done;
END $$;

-- Make failed, cancelled, expired or scheduled jobs ready, with fresh attempts; the trail stays.
CREATE OR REPLACE FUNCTION tidemill.kick(ids text[], p tidemill.prefs) RETURNS boolean[]
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
DECLARE
    done   boolean[] := '{}';
    job_id text;
    t      float8 := clock(p);
BEGIN
    PERFORM check_here();
    PERFORM come_due(t, p);
    FOREACH job_id IN ARRAY ids LOOP
        done := done || kick_one(job_id, t, p);
    END LOOP;
    PERFORM tell_all('all');
    RETURN done;
END $$;

CREATE OR REPLACE FUNCTION tidemill.kick_one(job_id text, t float8, p tidemill.prefs) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    j record;
    d record;
BEGIN
    SELECT seq, key, line INTO j FROM job WHERE id = job_id;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF j.key IS NOT NULL THEN
        PERFORM lock_key(j.key);
    END IF;
    DELETE FROM later WHERE seq = j.seq AND NOT waiting;
    IF FOUND THEN
        PERFORM count(j.line, 'scheduled', -1);
        UPDATE job SET due = 0 WHERE seq = j.seq;
        PERFORM place(j.seq, t);
        RETURN true;
    END IF;
    SELECT state INTO d FROM done WHERE seq = j.seq FOR UPDATE;
    IF NOT FOUND OR d.state = 4 THEN
        RETURN false;
    END IF;
    IF j.key IS NOT NULL THEN  -- at most one unfinished job per key
        INSERT INTO key (key, holder) VALUES (j.key, j.seq) ON CONFLICT DO NOTHING;
        IF NOT FOUND THEN
            RETURN false;
        END IF;
    END IF;
    DELETE FROM done WHERE seq = j.seq;
    IF d.state <> 5 THEN
        PERFORM count(j.line, 'kept', -1);
    END IF;
    UPDATE job SET
        tries = CASE WHEN policy > 0 THEN attempt + policy ELSE 0 END,
        losses = 0, line = CASE WHEN line & 3 = 2 THEN line - 2 ELSE line END, cancelling = false,
        error = '', expires = 0, due = 0, returns = returns + 1
    WHERE seq = j.seq;
    PERFORM place(j.seq, t);
    RETURN true;
END $$;

-- Forget jobs in any state; a running one loses its lease.
CREATE OR REPLACE FUNCTION tidemill.delete(ids text[], p tidemill.prefs) RETURNS boolean[]
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
DECLARE
    done   boolean[] := '{}';
    job_id text;
    which  bigint;
BEGIN
    PERFORM check_here();
    FOREACH job_id IN ARRAY ids LOOP
        SELECT seq INTO which FROM job WHERE id = job_id;
        done := done || CASE WHEN FOUND THEN delete_one(which, clock(p)) ELSE false END;
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
    SELECT key, line INTO j FROM job WHERE seq = which;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF stood = 'finished' THEN
        DELETE FROM done WHERE seq = which RETURNING done.class INTO class;
        IF class < 2 THEN
            PERFORM count(j.line, 'kept', -1);
        END IF;
    ELSIF j.key IS NOT NULL THEN
        PERFORM give_up_key(j.key, which, t);
    END IF;
    PERFORM forget(which);
    RETURN true;
END $$;

-- Delete what waits in a queue, in whatever state, up to "most"; how many that were.
CREATE OR REPLACE FUNCTION tidemill.purge(name text, most int, p tidemill.prefs) RETURNS int
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
DECLARE
    q       int;
    which   bigint;
    removed int := 0;
BEGIN
    PERFORM check_here();
    SELECT number INTO q FROM queue WHERE queue.name = purge.name;
    FOR which IN
        SELECT seq FROM ready WHERE line BETWEEN q * 4 AND q * 4 + 3
        UNION ALL
        SELECT job.seq FROM later JOIN job USING (seq) WHERE job.line / 4 = q
        LIMIT most
    LOOP
        IF unplace(which, false) IN ('ready', 'scheduled', 'waiting') THEN
            PERFORM give_up_key(key, which, clock(p)) FROM job WHERE seq = which AND key IS NOT NULL;
            PERFORM forget(which);
            removed := removed + 1;
        END IF;
    END LOOP;
    PERFORM tell_all('all');
    RETURN removed;
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
