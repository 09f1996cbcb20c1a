-- Leases at the carrier. Their owner is 0, which is no real owner. Their jobs are shown as ready. Tallies and
-- limits count them as running; "carried" counts how many of the running jobs are at the carrier.

-- Hand leases over to the carrier, in bulk. Returns the places of the leases that could be handed over.
CREATE OR REPLACE FUNCTION tidemill.carry(me int, tokens bigint[], t float8) RETURNS int[]
LANGUAGE plpgsql AS $$
DECLARE
    carried int[];
BEGIN
    IF EXISTS (SELECT FROM departure) THEN
        RETURN '{}';
    END IF;
    WITH v AS MATERIALIZED (
        SELECT DISTINCT ON (v.token) l.row, v.ord
        FROM (SELECT * FROM unnest(tokens) WITH ORDINALITY AS x (token, ord) ORDER BY token) AS v
        CROSS JOIN LATERAL (
            SELECT lease.ctid AS row FROM lease
            WHERE lease.seq = v.token >> 16 AND lease.token = v.token AND lease.owner = me
            FOR UPDATE OFFSET 0) AS l
        CROSS JOIN LATERAL (
            SELECT FROM job WHERE job.seq = v.token >> 16 AND NOT cancelling
                              AND NOT (expires > 0 AND expires <= t) OFFSET 0) AS j
        ORDER BY v.token, v.ord
    ), gone AS (
        UPDATE lease SET owner = 0, serial = 0, deadline = NULL
        WHERE ctid = ANY (ARRAY (SELECT row FROM v)) RETURNING line, seq, lane, leased
    ), counted AS (
        INSERT INTO tally (queue, carried) SELECT line / 4, count(*) FROM gone GROUP BY 1
    ), aside AS (  -- the limiter takes a job's tokens back, and holds them until the job starts
        INSERT INTO inbox (gate, back, cost, held)
        SELECT x.gate, floor(leased * 1e6), x.cost, x.held FROM gone CROSS JOIN LATERAL (
            SELECT gone.lane, job.cost, job.cost FROM job WHERE job.seq = gone.seq AND gone.lane IS NOT NULL
            UNION ALL SELECT 'q' || number, 1, 0 FROM queue WHERE number = gone.line / 4 AND gated
        ) AS x (gate, cost, held) WHERE is_limited()
    )
    SELECT array_agg(ord) INTO carried FROM v;
    RETURN coalesce(carried, '{}');
END $$;

-- Give leases of the carrier, named by token and id, to an owner. Returns the places of the leases
-- that it gets. A lease goes back if its queue is paused, its job has expired, or the store
-- departs. First hand over leases that a relay has published but not handed over yet. The relay
-- itself settles jobs that must not run any more.
CREATE OR REPLACE FUNCTION tidemill.take_carried(
    me int, tokens bigint[], ids text[], consumes boolean, t float8) RETURNS int[]
LANGUAGE plpgsql AS $$
DECLARE
    departs boolean := EXISTS (SELECT FROM departure);
    taken   int[];
    back    bigint[];
BEGIN
    PERFORM carry(number, tokens, t) FROM owner WHERE kind = 'relay';
    WITH v AS MATERIALIZED (
        SELECT DISTINCT ON (v.token, v.id) v.ord, l.*, j.cost, q.gated,
               departs OR q.paused OR j.expires > 0 AND j.expires <= t AS stays
        FROM (SELECT * FROM unnest(tokens, ids) WITH ORDINALITY AS x (token, id, ord)
              ORDER BY token) AS v
        CROSS JOIN LATERAL (
            SELECT lease.ctid AS row, lease.seq, lease.line, lease.lane, lease.leased FROM lease
            WHERE lease.seq = v.token >> 16 AND lease.token = v.token AND lease.owner = 0
            FOR UPDATE OFFSET 0) AS l
        CROSS JOIN LATERAL (
            SELECT cost, expires FROM job WHERE job.seq = l.seq AND job.id = v.id OFFSET 0) AS j
        CROSS JOIN LATERAL (
            SELECT gated, paused FROM queue WHERE number = l.line / 4 OFFSET 0) AS q
        ORDER BY v.token, v.id, v.ord
    ), mine AS (
        UPDATE lease SET owner = me, leased = t, deadline = CASE WHEN consumes THEN t + (
            SELECT CASE WHEN ttr > 0 THEN ttr ELSE 60 END FROM job WHERE job.seq = lease.seq) END
        WHERE ctid = ANY (ARRAY (SELECT row FROM v WHERE NOT stays)) RETURNING line
    ), counted AS (
        INSERT INTO tally (queue, carried) SELECT line / 4, -count(*) FROM mine GROUP BY 1
    ), started AS (
        INSERT INTO inbox (gate, again, cost, held)
        SELECT gate, floor(t * 1e6), x.cost, x.held FROM v CROSS JOIN LATERAL (
            SELECT lane, v.cost, -v.cost WHERE lane IS NOT NULL
            UNION ALL SELECT 'q' || line / 4, 1, 0 WHERE gated) AS x (gate, cost, held)
        WHERE NOT stays
    )
    SELECT array_agg(ord) FILTER (WHERE NOT stays), array_agg(seq) FILTER (WHERE stays)
    INTO taken, back FROM v;
    IF back IS NOT NULL THEN
        PERFORM bring_back(seq, t) FROM unnest(back) AS seq;
    END IF;
    RETURN coalesce(taken, '{}');
END $$;

-- Take a job from the carrier, as if it had never been leased; false when it is not there. Its token becomes
-- invalid.
CREATE OR REPLACE FUNCTION tidemill.leave_carrier(job_seq bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    l lease;
BEGIN
    DELETE FROM lease WHERE seq = job_seq AND owner = 0 RETURNING * INTO l;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE job SET returns = returns + 1 WHERE seq = job_seq;
    INSERT INTO tally (queue, running, carried) VALUES (l.line / 4, -1, -1);
    IF is_limited() THEN
        INSERT INTO inbox (gate, ran, cost, held)
        SELECT l.lane, -1, cost, -cost FROM job WHERE seq = job_seq AND l.lane IS NOT NULL
        UNION ALL SELECT 'q' || number, 0, 1, 0 FROM queue WHERE number = l.line / 4 AND gated;
    END IF;
    RETURN true;
END $$;

-- Bring a job back to its line, if the carrier has it.
CREATE OR REPLACE FUNCTION tidemill.bring_back(job_seq bigint, t float8) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF leave_carrier(job_seq) THEN
        UPDATE job SET due = 0 WHERE seq = job_seq;
        PERFORM place(job_seq, t);
    END IF;
END $$;

-- Bring back some jobs of the carrier, up to "most"; return how many.
CREATE OR REPLACE FUNCTION tidemill.recall(most int, p tidemill.prefs) RETURNS int
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
DECLARE
    t    float8 := clock(p);
    here bigint[];
BEGIN
    PERFORM check_here();
    here := ARRAY (SELECT seq FROM lease WHERE owner = 0 ORDER BY line, seq LIMIT most);
    PERFORM FROM lease WHERE seq = ANY (here) ORDER BY seq FOR UPDATE;
    PERFORM bring_back(seq, t) FROM unnest(here) AS seq;
    PERFORM tell_all('all');
    RETURN cardinality(here);
END $$;

-- The places of an array, without some places.
CREATE OR REPLACE FUNCTION tidemill.without(places int[], whole bigint[]) RETURNS int[]
LANGUAGE sql IMMUTABLE AS $$
    SELECT ARRAY (SELECT generate_series(1, cardinality(whole)) EXCEPT SELECT unnest(places) ORDER BY 1)
$$;
