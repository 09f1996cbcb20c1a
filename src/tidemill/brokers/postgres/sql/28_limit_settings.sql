-- Limit settings, declared by code or set by people; and the figures of limits.

-- A limit with keys has one limiter for each key. New settings hold at once: each user of a limiter
-- first brings it to the new settings (try_gates). The other limiters follow in pieces of a few
-- hundred (update_some). Until then the counters of a limiter follow the settings of its version.

-- Apply declared or set settings, as "apply_settings" in limits/arithmetic.py does. Nobody else
-- holds a limiter meanwhile.
CREATE OR REPLACE FUNCTION tidemill.take_terms(s tidemill.said, now float8) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    k   terms;
    old float8[];
BEGIN
    SELECT * INTO k FROM terms WHERE id = s.id;
    IF s.if_new AND FOUND THEN
        RETURN;
    END IF;
    old := coalesce(k.terms, no_terms());
    IF s.by_code THEN
        k.declared := s.terms;
    ELSE
        k.by_hand := s.terms IS NOT NULL;
    END IF;
    IF NOT (s.by_code AND coalesce(k.by_hand, false)) THEN
        k.terms := coalesce(s.terms, k.declared, no_terms());
    END IF;
    IF k.id IS NOT NULL AND k.terms <> old THEN
        INSERT INTO outdated (id, version, terms) VALUES (k.id, k.version, old);
        k.version := k.version + 1;
    END IF;
    INSERT INTO terms (id, terms, declared, by_hand, version)
    VALUES (s.id, k.terms, k.declared, coalesce(k.by_hand, false), coalesce(k.version, 0))
    ON CONFLICT (id) DO UPDATE SET terms = excluded.terms, declared = excluded.declared,
                                   by_hand = excluded.by_hand, version = excluded.version;
    IF k.id IS NOT NULL AND k.terms = old OR NOT starts_with(s.id, 'q') THEN
        RETURN;
    END IF;
    UPDATE queue SET gated = true, listed = true WHERE number = queue_of(s.id) AND NOT gated;
    INSERT INTO gate (id, terms) VALUES (s.id, s.id) ON CONFLICT DO NOTHING;
    PERFORM update_gates(ARRAY[s.id], now);
    PERFORM fold_gates(ARRAY[s.id], now);
    PERFORM renew_gates(ARRAY[s.id], now);
    -- A step that ends the last running job may miss the new limit, and we may miss the step: look once more.
    IF k.terms[6] > 0 THEN
        UPDATE gate SET due = now + 1e6
        WHERE id = s.id AND starts_with(id, 'q') AND opens = 'infinity' AND due IS NULL;
    END IF;
END $$;

-- Bring limiters that we hold to the current settings, and renew them.
CREATE OR REPLACE FUNCTION tidemill.update_gates(ids text[], now float8) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    changed text[];
BEGIN
    WITH changed AS (
        UPDATE gate SET
            version = x.version,
            filled = filled_anew(x.old, x.terms, filled, now),
            slots = CASE WHEN x.terms[4] IS NULL THEN '{}' ELSE slots END,
            failures = CASE WHEN x.terms[7] IS NULL THEN 0 ELSE failures END
        FROM (SELECT g.row, t.version, t.terms, o.terms AS old
              FROM unnest(ids) AS x (id) CROSS JOIN LATERAL (
                  SELECT ctid AS row, gate.terms AS id, version FROM gate WHERE gate.id = x.id OFFSET 0) AS g
              CROSS JOIN LATERAL (
                  SELECT outdated.terms FROM outdated
                  WHERE outdated.id = g.id AND outdated.version = g.version OFFSET 0) AS o
              CROSS JOIN LATERAL (
                  SELECT terms.version, terms.terms FROM terms WHERE terms.id = g.id OFFSET 0) AS t) AS x
        WHERE gate.ctid = x.row
        RETURNING gate.id
    )
    SELECT array_agg(id) INTO changed FROM changed;
    IF changed IS NOT NULL THEN
        PERFORM fold_gates(changed, now);
        PERFORM renew_gates(changed, now);
    END IF;
END $$;

-- Bring some limiters that nobody holds to the current settings; true when more may be left.
CREATE OR REPLACE FUNCTION tidemill.update_some(most int, t float8) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    ids  text[];
    done int;
BEGIN
    IF NOT EXISTS (SELECT FROM outdated) OR is_sealed() OR NOT may_read_terms() THEN
        RETURN false;
    END IF;
    ids := ARRAY (
        SELECT g.id FROM outdated AS o CROSS JOIN LATERAL (
            SELECT id FROM gate WHERE gate.terms = o.id AND gate.version = o.version
            LIMIT most FOR UPDATE SKIP LOCKED) AS g
        LIMIT most);
    IF cardinality(ids) > 0 THEN
        PERFORM update_gates(ids, floor(t * 1e6));
        RETURN true;
    END IF;
    DELETE FROM outdated AS o WHERE ctid = ANY (ARRAY (
        SELECT ctid FROM outdated FOR UPDATE SKIP LOCKED))
    AND NOT EXISTS (SELECT FROM gate WHERE gate.terms = o.id AND gate.version = o.version);
    GET DIAGNOSTICS done = ROW_COUNT;
    RETURN done > 0;
END $$;

-- Apply all pending settings of limits; false when there are none.
CREATE OR REPLACE FUNCTION tidemill.take_said(t float8) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    s     said;
    heard said[];
BEGIN
    IF NOT EXISTS (SELECT FROM said) THEN
        RETURN false;
    END IF;
    PERFORM pg_advisory_xact_lock('terms'::regclass::oid::int, 0);
    WITH gone AS (DELETE FROM said RETURNING n, said AS one)
    SELECT array_agg(one ORDER BY n) INTO heard FROM gone;
    FOREACH s IN ARRAY coalesce(heard, '{}') LOOP
        PERFORM take_terms(s, floor(t * 1e6));
    END LOOP;
    RETURN true;
END $$;

CREATE OR REPLACE FUNCTION tidemill.set_limit(which text, new float8[], by_code boolean, p tidemill.prefs)
RETURNS void
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    PERFORM check_here();
    INSERT INTO said (id, terms, by_code, if_new) VALUES (which, new, by_code, false);
    PERFORM take_said(clock(p));
    PERFORM tell_all('all');
END $$;

-- -- inspection ------------------------------------------------------------------------------------

-- Seconds until a time; infinity stays.
CREATE OR REPLACE FUNCTION tidemill.seconds_until(at float8, now float8) RETURNS float8
LANGUAGE sql IMMUTABLE AS $$ SELECT CASE WHEN at > 0 THEN (at - now) / 1e6 ELSE 0 END $$;

-- Empty the inbox before somebody looks at limits, and wake owners for the jobs that may start now.
-- The writer of an event may look for such jobs too early, and then wakes nobody. "more" says that
-- some limiters do not have new settings yet.
CREATE OR REPLACE PROCEDURE tidemill.empty_inbox(p tidemill.prefs, INOUT more boolean)
LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM tidemill.inbox) OR EXISTS (SELECT FROM tidemill.said)
        OR EXISTS (SELECT FROM tidemill.outdated)
    THEN
        CALL tidemill.open_gates(p);
        PERFORM set_config('synchronous_commit', 'off', true);
        PERFORM tidemill.ring(0, false, '{}', p);
    END IF;
    more := EXISTS (SELECT FROM tidemill.outdated) AND NOT EXISTS (SELECT FROM tidemill.departure WHERE sealed);
END $$;

-- The figures of every limit.
CREATE OR REPLACE FUNCTION tidemill.limits_shown(p tidemill.prefs)
RETURNS TABLE (name text, of_queue boolean, terms float8[], declared float8[], by_hand boolean,
               running bigint, failures int, until float8, keys bigint)
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
DECLARE
    t   float8 := clock(p);
    now float8 := floor(t * 1e6);
BEGIN
    RETURN QUERY
    SELECT q.name, true, x.terms, x.declared, x.by_hand, running_in(q.number), g.failures,
           seconds_until(gate_opens(x.terms, g, running_in(q.number), now, 1), now), 0::bigint
    FROM terms AS x JOIN gate AS g ON g.id = x.id JOIN queue AS q ON q.number = queue_of(x.id)
    WHERE starts_with(x.id, 'q')
    UNION ALL
    SELECT substr(x.id, 2), false, x.terms, x.declared, x.by_hand, coalesce(sum(g.running), 0)::bigint, 0,
           0::float8, count(g.id) FILTER (WHERE g.clear IS NULL OR g.clear > now)
    FROM terms AS x LEFT JOIN gate AS g ON g.terms = x.id
    WHERE starts_with(x.id, 'n') GROUP BY x.id;
END $$;

-- The limit that keeps a ready job waiting; no row when no limit does.
CREATE OR REPLACE FUNCTION tidemill.held(job_id text, p tidemill.prefs)
RETURNS TABLE (name text, key text, of_queue boolean, until float8, running bigint, terms float8[],
               broken boolean)
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
DECLARE
    t   float8 := clock(p);
    now float8 := floor(t * 1e6);
    j   record;
BEGIN
    SELECT lane, cost, line INTO j FROM job WHERE id = job_id AND CASE
        WHEN lane IS NULL THEN EXISTS (
            SELECT FROM ready AS r WHERE r.line = job.line AND r.rank = job.rank AND r.seq = job.seq)
        ELSE EXISTS (
            SELECT FROM parked AS r WHERE r.lane = job.lane AND r.line = job.line AND r.rank = job.rank
                                      AND r.seq = job.seq) END;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    RETURN QUERY SELECT * FROM (
        SELECT substr(x.id, 2), split_part(g.id, chr(31), 2), false AS of_queue,
               seconds_until(o.at, now) AS seconds, g.running, x.terms, false
        FROM gate AS g JOIN terms AS x ON x.id = g.terms CROSS JOIN LATERAL (
            SELECT gate_opens(x.terms, g, g.running, now, j.cost) AS at) AS o
        WHERE g.id = j.lane
        UNION ALL
        SELECT q.name, '', true, seconds_until(o.at, now), o.running, x.terms,
               coalesce(g.failures >= x.terms[7], false)
        FROM queue AS q JOIN gate AS g ON g.id = 'q' || q.number JOIN terms AS x ON x.id = g.id
        CROSS JOIN LATERAL (
            SELECT gate_opens(x.terms, g, running_in(q.number), now, 1) AS at,
                   running_in(q.number) AS running) AS o
        WHERE q.number = j.line / 4) AS every
    ORDER BY every.seconds = 0, every.of_queue LIMIT 1;
END $$;
