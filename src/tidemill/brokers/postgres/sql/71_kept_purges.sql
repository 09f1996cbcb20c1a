-- Purges that keep their jobs as cancelled jobs, and the restoring of these jobs. The error of such a
-- job names its purge: see core/purge_mark.py.

-- Cancel a piece of a queue's unfinished jobs that do not run. Returns the number of cancelled
-- jobs, and the place of the next piece, or null.
CREATE OR REPLACE FUNCTION tidemill.purge_kept(
    name text, most int, place jsonb, purge_id text, p tidemill.prefs) RETURNS jsonb
LANGUAGE plpgsql
SET search_path = tidemill, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    q       int;
    here    bigint[];
    next    jsonb;
    flows   bigint[];
    which   bigint;
    stood   text;
    waited  boolean[] := '{}';
    purged  bigint[] := '{}';
    l       record;
    t       float8 := clock(p);
BEGIN
    PERFORM check_here();
    SELECT number INTO q FROM queue WHERE queue.name = purge_kept.name;
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
        stood := unplace(which, false);
        IF stood IN ('ready', 'scheduled', 'waiting') THEN
            PERFORM give_up_key(key, which, t) FROM job WHERE seq = which AND key IS NOT NULL;
            purged := purged || which;
            waited := waited || (stood = 'waiting');
        END IF;
    END LOOP;
    -- Leave out jobs that were leased meanwhile: they run, and their children still wait for them.
    flows := ARRAY (SELECT f FROM unnest(flows) AS f WHERE f = ANY (purged));
    DELETE FROM expiry WHERE seq = ANY (purged);
    INSERT INTO done (seq, prune, finished, class, state, error)
    SELECT x.seq, t + CASE WHEN j.linked THEN p.protect ELSE p.keep_failed END, t,
           CASE WHEN j.linked THEN 3 ELSE 2 END, 6,
           'purged, in purge ' || purge_id || CASE
               WHEN x.waited AND EXISTS (SELECT FROM behind WHERE behind.seq = x.seq)
               THEN '; it waited for jobs' ELSE '' END
    FROM unnest(purged, waited) AS x (seq, waited) CROSS JOIN LATERAL (
        SELECT linked FROM job WHERE job.seq = x.seq OFFSET 0) AS j;
    -- Count down only when all jobs stand in "done", so that no purged job is dropped.
    l := less_behind(flows, array_fill(6, ARRAY[cardinality(flows)]));
    PERFORM count_down(l.names, l.numbers, l.failed, l.whys, t, p);
    IF cardinality(purged) > 0 THEN
        INSERT INTO tally (queue, purged) VALUES (q, cardinality(purged));
    ELSIF place ->> 'in' = 'ready' THEN  -- the jobs were leased meanwhile
        next := NULL;
    END IF;
    PERFORM tell_all('all');
    RETURN jsonb_build_array(cardinality(purged), next);
END $$;

-- Bring jobs of a purge back to their state before the purge; false for a job that stays cancelled.
CREATE OR REPLACE FUNCTION tidemill.restore(ids text[], purge_id text, p tidemill.prefs) RETURNS boolean[]
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
        done := done || restore_one(which, purge_id, t, p);
    END LOOP;
    PERFORM tell_all('all');
    RETURN done;
END $$;

CREATE OR REPLACE FUNCTION tidemill.restore_one(
    which bigint, purge_id text, t float8, p tidemill.prefs) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    j     record;
    mark  text;
    waits boolean;
BEGIN
    SELECT id, key, line, expires INTO j FROM job WHERE seq = which;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    SELECT error INTO mark FROM done WHERE seq = which AND state = 6 AND is_purged(error) FOR UPDATE;
    IF NOT FOUND OR split_part(mark, ';', 1) <> 'purged, in purge ' || purge_id THEN
        RETURN false;
    END IF;
    waits := mark LIKE '%; it waited for jobs' AND EXISTS (SELECT FROM behind WHERE seq = which);
    IF waits AND NOT may_wait_anew(which) THEN
        RETURN false;
    END IF;
    IF j.key IS NOT NULL THEN  -- at most one unfinished job per key
        PERFORM find_key(j.key, t);
        INSERT INTO key (key, holder, until) VALUES (j.key, which, 0) ON CONFLICT DO NOTHING;
        IF NOT FOUND THEN
            RETURN false;
        END IF;
    END IF;
    DELETE FROM done WHERE seq = which;
    PERFORM revive(which, t);
    UPDATE job SET error = '' WHERE seq = which AND error <> '';
    IF j.expires > 0 THEN
        INSERT INTO expiry (seq, due) VALUES (which, j.expires);
    END IF;
    IF waits THEN
        PERFORM wait_anew(which, j.id, j.line, t, p);
    ELSE
        PERFORM place(which, t);
    END IF;
    RETURN true;
END $$;
