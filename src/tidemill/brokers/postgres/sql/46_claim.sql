-- Claims of owners: choosing lines, leasing from them, and packing leases.

-- Lines where a job may start, in order. From each line, the index gives the next. So a million jobs in a
-- line cost no more than one job.
CREATE OR REPLACE FUNCTION tidemill.ready_lines(t float8, limits boolean) RETURNS SETOF int
LANGUAGE plpgsql AS $$
DECLARE
    laned boolean := false;
    l     int := -1;
BEGIN
    IF limits THEN
        laned := EXISTS (SELECT FROM stand);
    END IF;
    LOOP
        IF laned THEN
            l := least((SELECT line FROM ready WHERE line > l ORDER BY line LIMIT 1),
                       (SELECT line FROM stand WHERE line > l ORDER BY line LIMIT 1));
        ELSE
            SELECT line INTO l FROM ready WHERE line > l ORDER BY line LIMIT 1;
        END IF;
        EXIT WHEN l IS NULL;
        IF NOT EXISTS (SELECT FROM queue WHERE number = l / 4 AND (paused OR gated AND is_shut(number, t))) THEN
            RETURN NEXT l;
        END IF;
    END LOOP;
END $$;

-- Whether a queue's limit lets nothing start, as far as its limiter is up to date.
CREATE OR REPLACE FUNCTION tidemill.is_shut(which int, t float8) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    RETURN EXISTS (SELECT FROM gate WHERE id = 'q' || which AND opens > floor(t * 1e6));
END $$;

-- Lines of these kinds where a job may start, in the order of the queues; paused queues are left out.
CREATE OR REPLACE FUNCTION tidemill.lines_for(queues int[], kinds int[], t float8, limits boolean)
RETURNS int[]
LANGUAGE plpgsql AS $$
BEGIN
    IF queues IS NULL THEN
        RETURN ARRAY (SELECT l FROM ready_lines(t, limits) AS l WHERE l & 3 = ANY (kinds));
    END IF;
    IF NOT limits THEN
        RETURN ARRAY (
            SELECT q.number * 4 + k
            FROM unnest(queues) WITH ORDINALITY AS q (number, ord) CROSS JOIN unnest(kinds) AS k
            WHERE EXISTS (SELECT FROM ready WHERE line = q.number * 4 + k)
              AND NOT EXISTS (SELECT FROM queue WHERE queue.number = q.number AND paused)
            ORDER BY q.ord, k);
    END IF;
    RETURN ARRAY (
        SELECT q.number * 4 + k
        FROM unnest(queues) WITH ORDINALITY AS q (number, ord) CROSS JOIN unnest(kinds) AS k
        WHERE (EXISTS (SELECT FROM ready WHERE line = q.number * 4 + k)
               OR EXISTS (SELECT FROM stand WHERE line = q.number * 4 + k))
          AND NOT EXISTS (SELECT FROM queue WHERE queue.number = q.number
                          AND (paused OR gated AND is_shut(q.number, t)))
        ORDER BY q.ord, k);
END $$;

-- The kinds of lines from which an owner may get jobs.
CREATE OR REPLACE FUNCTION tidemill.kinds_of(w tidemill.want) RETURNS int[]
LANGUAGE sql IMMUTABLE AS $$
    SELECT array_remove(ARRAY[CASE WHEN w.tasks THEN 0 END, CASE WHEN w.messages THEN 1 END,
                              CASE WHEN w.tasks AND w.alone THEN 2 END], NULL)
$$;

-- Whether a claim may take a job: not if the job has expired and another step has locked its key.
-- That step may wait for a row that the claim has locked, so the claim does not wait for the key.
-- The other step wakes us when it is done.
CREATE OR REPLACE FUNCTION tidemill.may_take(name text, expires float8, t float8) RETURNS boolean
LANGUAGE sql AS $$
    SELECT name IS NULL OR expires = 0 OR expires > t
        OR pg_try_advisory_xact_lock('key'::regclass::oid::int, hashtext(name))
$$;

-- Lease up to "most" jobs of some lines, as if these lines were one line. Returns how many, and the
-- packed leases. Where there are limits, claim_limited does this.
CREATE OR REPLACE FUNCTION tidemill.claim(
    limits boolean, lines int[], most int, me int, this bigint, consumes boolean, t float8,
    p tidemill.prefs, OUT got int, OUT leases bytea)
LANGUAGE plpgsql AS $$
DECLARE
    rows tid[];
BEGIN
    IF limits THEN
        SELECT * INTO got, leases FROM claim_limited(lines, most, me, this, consumes, t, p);
        RETURN;
    END IF;
    got := 0;
    IF cardinality(lines) = 1 THEN
        rows := ARRAY (SELECT ctid FROM ready WHERE line = lines[1]
                       ORDER BY rank, seq LIMIT most FOR UPDATE SKIP LOCKED);
    ELSE
        rows := ARRAY (
            SELECT first.ctid FROM unnest(lines) AS l CROSS JOIN LATERAL (
                SELECT ctid, rank, seq FROM ready WHERE line = l
                ORDER BY rank, seq LIMIT most FOR UPDATE SKIP LOCKED) AS first
            ORDER BY first.rank, first.seq LIMIT most);
    END IF;
    SELECT * INTO got, leases FROM claim_rows(rows, me, this, consumes, t, p);
END $$;

-- Lease rows of "ready" that this transaction has locked or inserted.
CREATE OR REPLACE FUNCTION tidemill.claim_rows(
    rows tid[], me int, this bigint, consumes boolean, t float8, p tidemill.prefs,
    OUT got int, OUT leases bytea)
LANGUAGE plpgsql AS $$
DECLARE
    overdue bigint[];
    which   bigint;
    ends    bigint[];
BEGIN
    got := 0;
    IF cardinality(rows) > 0 AND EXISTS (SELECT FROM key) THEN
        rows := ARRAY (
            SELECT r.row FROM (SELECT ctid AS row, seq FROM ready WHERE ctid = ANY (rows)) AS r
            CROSS JOIN LATERAL (SELECT key, expires FROM job WHERE job.seq = r.seq OFFSET 0) AS j
            WHERE may_take(j.key, j.expires, t));
    END IF;
    IF cardinality(rows) = 0 THEN
        RETURN;
    END IF;
    WITH gone AS (
        DELETE FROM ready WHERE ctid = ANY (rows) RETURNING line, rank, seq
    ), taken AS MATERIALIZED (
        SELECT gone.line, gone.rank, gone.seq, j.attempt + 1 AS attempt, j.losses, j.timeout,
               j.result_ttl, j.key IS NOT NULL AS keyed, j.linked, j.envelope,
               j.inputs,
               (j.seq << 16) | (j.returns & 65535) AS token,
               CASE WHEN NOT consumes THEN 0 WHEN j.ttr > 0 THEN j.ttr ELSE 60 END AS ttr,
               j.expires > 0 AND j.expires <= t AS expired
        FROM gone CROSS JOIN LATERAL (
            SELECT * FROM job WHERE job.seq = gone.seq OFFSET 0) AS j
    ), lent AS (
        INSERT INTO lease (seq, token, serial, leased, deadline, result_ttl, owner, line, attempt,
                           keyed, linked)
        SELECT seq, token, this, t, CASE WHEN consumes THEN t + ttr END, result_ttl, me, line,
               attempt, keyed, linked
        FROM taken WHERE NOT expired
    ), counted AS (
        INSERT INTO tally (queue, ready, running)
        SELECT line / 4, -count(*), count(*) FILTER (WHERE NOT expired)
        FROM taken GROUP BY 1
    )
    SELECT count(*) FILTER (WHERE NOT taken.expired),
           string_agg(pack(token, attempt, losses, rank, seq, timeout, t, ttr, envelope, inputs), ''
                      ORDER BY rank, seq) FILTER (WHERE NOT taken.expired),
           array_agg(seq) FILTER (WHERE taken.expired)
    INTO got, leases, overdue FROM taken;
    IF overdue IS NOT NULL THEN  -- more came due than one step moves
        ends := lock_flows(overdue, all_bad(overdue), '{}');
        FOREACH which IN ARRAY overdue LOOP
            PERFORM finish(which, 'expired', 'not started before it expired', NULL, t, p);
        END LOOP;
    END IF;
    PERFORM flow(ends, t, p);
END $$;

-- Pack a lease; encoding.py reads the bytes.
CREATE OR REPLACE FUNCTION tidemill.pack(
    token bigint, attempt int, losses int, rank bigint, seq bigint, timeout float8, leased float8,
    ttr float8, envelope bytea, inputs text[]) RETURNS bytea
LANGUAGE sql STABLE AS $$
    SELECT int8send(token) || int4send(attempt) || int4send(losses) || int8send(rank)
        || int8send(seq) || float8send(timeout) || float8send(leased) || float8send(ttr)
        || int4send(length(envelope)) || envelope
        || CASE WHEN inputs IS NULL THEN E'\\x00000000' ELSE tidemill.pack_inputs(inputs) END
$$;

-- Lease the ready jobs that an owner wants: by count, queues (NULL means all) and mode.
CREATE OR REPLACE FUNCTION tidemill.take_ready(
    w tidemill.want, limits boolean, me int, this bigint, consumes boolean, t float8, p tidemill.prefs,
    INOUT last_queue int, OUT got int, OUT leases bytea)
LANGUAGE plpgsql AS $$
DECLARE
    lines  int[] := lines_for(w.queues, kinds_of(w), t, limits);
    lost   int[];
    turns  int[];
    q      int;
    share  int;
    c      record;
BEGIN
    got := 0;
    leases := '';
    -- Suspects, which were lost with their worker, come first, and only one at a time.
    IF w.alone AND w.tasks THEN
        lost := ARRAY (SELECT l FROM unnest(lines) AS l WHERE l & 3 = 2);
        IF cardinality(lost) > 0 THEN
            lines := ARRAY (SELECT l FROM unnest(lines) AS l WHERE l & 3 <> 2);
            c := claim(limits, lost, 1, me, this, consumes, t, p);
            got := got + c.got;
            leases := leases || coalesce(c.leases, '');
        END IF;
    END IF;
    IF w.mode = 'merged' OR cardinality(lines) = 1 THEN
        WHILE got < w.count AND cardinality(lines) > 0 LOOP
            c := claim(limits, lines, w.count - got, me, this, consumes, t, p);
            EXIT WHEN c.got = 0;
            got := got + c.got;
            leases := leases || c.leases;
        END LOOP;
        IF cardinality(lines) = 1 THEN
            last_queue := lines[1] / 4;
        END IF;
        RETURN;
    END IF;
    IF w.mode = 'strict' THEN
        IF w.queues IS NULL THEN  -- by name
            turns := ARRAY (SELECT number FROM queue WHERE number IN (
                SELECT l / 4 FROM unnest(lines) AS l) ORDER BY name);
        ELSE
            turns := w.queues;
        END IF;
    ELSE
        turns := ARRAY (SELECT DISTINCT l / 4 FROM unnest(lines) AS l);
        turns := ARRAY (SELECT n FROM unnest(turns) AS n ORDER BY n <= take_ready.last_queue, n);
    END IF;
    -- Strict: take from each queue until it is empty. Fair: take a share from every queue, and repeat until
    -- the want is full or nothing is left.
    WHILE got < w.count AND cardinality(turns) > 0 LOOP
        share := CASE WHEN w.mode = 'strict' THEN w.count
                      ELSE greatest(1, (w.count - got) / cardinality(turns)) END;
        FOREACH q IN ARRAY turns LOOP
            EXIT WHEN got >= w.count;
            c := claim(limits, ARRAY (SELECT l FROM unnest(lines) AS l WHERE l / 4 = q),
                       least(share, w.count - got), me, this, consumes, t, p);
            IF c.got > 0 THEN
                got := got + c.got;
                leases := leases || c.leases;
                last_queue := q;
            END IF;
            IF c.got < share THEN
                turns := array_remove(turns, q);
            END IF;
        END LOOP;
    END LOOP;
END $$;
