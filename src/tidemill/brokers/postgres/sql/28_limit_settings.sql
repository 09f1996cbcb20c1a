-- Limit settings, declared by code or set by people; and the figures of limits.

-- Apply declared or set settings, as "apply_settings" in limits/arithmetic.py does, to a limit and to all
-- of its keys. Nobody else holds a limiter meanwhile.
CREATE OR REPLACE FUNCTION tidemill.take_terms(s tidemill.said, now float8) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    k   terms;
    old float8[];
    ids text[];
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
    INSERT INTO terms (id, terms, declared, by_hand)
    VALUES (s.id, k.terms, k.declared, coalesce(k.by_hand, false))
    ON CONFLICT (id) DO UPDATE SET terms = excluded.terms, declared = excluded.declared, by_hand = excluded.by_hand;
    IF k.id IS NOT NULL AND k.terms = old THEN
        RETURN;
    END IF;
    IF starts_with(s.id, 'q') THEN
        UPDATE queue SET gated = true, listed = true WHERE number = queue_of(s.id) AND NOT gated;
        INSERT INTO gate (id, terms) VALUES (s.id, s.id) ON CONFLICT DO NOTHING;
    END IF;
    UPDATE gate SET filled = filled_anew(old, k.terms, filled, now),
                    slots = CASE WHEN k.terms[4] IS NULL THEN '{}' ELSE slots END,
                    failures = CASE WHEN k.terms[7] IS NULL THEN 0 ELSE failures END
    WHERE gate.terms = s.id;
    FOR ids IN  -- in groups: some plans take far longer for thousands of ids
        SELECT array_agg(id) FROM (
            SELECT id, row_number() OVER () / 500 AS n FROM gate WHERE gate.terms = s.id) AS g
        GROUP BY n
    LOOP
        PERFORM fold_gates(ids, now);
        PERFORM renew_gates(ids, now);
    END LOOP;
    -- A step that ends the last running job may miss the new limit, and we may miss the step: look once more.
    IF k.terms[6] > 0 THEN
        UPDATE gate SET due = now + 1e6
        WHERE id = s.id AND starts_with(id, 'q') AND opens = 'infinity' AND due IS NULL;
    END IF;
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
-- The writer of an event may look for such jobs too early, and then wakes nobody.
CREATE OR REPLACE PROCEDURE tidemill.empty_inbox(p tidemill.prefs)
LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM tidemill.inbox) OR EXISTS (SELECT FROM tidemill.said) THEN
        CALL tidemill.open_gates(p);
        PERFORM set_config('synchronous_commit', 'off', true);
        PERFORM tidemill.ring(0, false, '{}', p);
    END IF;
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
