-- Leasing under limits. A ready job may start if the limiter of its queue admits the job. In a
-- partition, the limiter of the partition must admit the job, too, and the partition must stand in
-- the line. A claim passes over limiters that another transaction holds. If the claim gets no job,
-- look_again waits for these limiters.

CREATE OR REPLACE FUNCTION tidemill.claim_limited(
    lines int[], most int, me int, this bigint, consumes boolean, t float8, p tidemill.prefs,
    OUT got int, OUT leases bytea)
LANGUAGE plpgsql AS $$
DECLARE
    who   claimant := ROW(me, this, consumes);
    able  record;
    taken record;
BEGIN
    got := 0;
    leases := '';
    IF NOT may_read_terms() THEN
        RETURN;
    END IF;
    WHILE got < most LOOP
        able := open_lines(lines, most - got, t);
        EXIT WHEN cardinality(able.lines) = 0;
        IF able.plain THEN
            taken := claim(false, able.lines, least(most - got, able.rooms[1]), me, this, consumes, t, p);
            EXIT WHEN taken.got = 0;
            IF able.gates <> '{}' THEN
                PERFORM start_queues(able.gates, array_fill(able.lines[1], ARRAY[taken.got]), floor(t * 1e6));
                PERFORM renew_gates(able.gates, floor(t * 1e6));
            END IF;
            got := got + taken.got;
            leases := leases || taken.leases;
            CONTINUE;
        END IF;
        -- Several queues with limiters, and partitions: take one job at a time, which keeps the order simple.
        taken := claim_pass(able.lines, able.rooms, able.gates,
                            CASE WHEN able.mixed THEN 1 ELSE most - got END, who, t, p);
        EXIT WHEN NOT taken.moved;
        got := got + taken.got;
        leases := leases || coalesce(taken.leases, '');
    END LOOP;
END $$;

-- The wanted lines whose queue lets jobs start. "rooms" says how many jobs the queue of each line
-- lets start. "gates" are the limiters of queues that we hold now. "plain": no partition stands in
-- these lines, and one count limits the jobs that may start. "mixed": several queues with limiters,
-- and partitions.
CREATE OR REPLACE FUNCTION tidemill.open_lines(
    wanted int[], most int, t float8,
    OUT lines int[], OUT rooms int[], OUT gates text[], OUT plain boolean, OUT mixed boolean)
LANGUAGE plpgsql AS $$
DECLARE
    now    float8 := floor(t * 1e6);
    queues int := 0;
    room   int;
    q      record;
BEGIN
    lines := '{}';
    rooms := '{}';
    gates := try_gates(ARRAY (
        SELECT 'q' || number FROM queue
        WHERE gated AND number IN (SELECT l / 4 FROM unnest(wanted) AS l)));
    IF gates <> '{}' THEN
        PERFORM fold_gates(gates, now);
    END IF;
    FOR q IN
        SELECT number, gated FROM queue WHERE number IN (SELECT l / 4 FROM unnest(wanted) AS l)
        ORDER BY number
    LOOP
        room := most;
        IF q.gated THEN
            room := (SELECT gate_room(x.terms, g, running_for(x.terms, q.number), now, most)
                     FROM gate AS g JOIN terms AS x ON x.id = g.id
                     WHERE g.id = 'q' || q.number AND g.id = ANY (gates));
        END IF;
        CONTINUE WHEN coalesce(room, 0) <= 0;
        queues := queues + 1;
        lines := lines || ARRAY (SELECT l FROM unnest(wanted) AS l WHERE l / 4 = q.number);
        rooms := rooms || array_fill(room, ARRAY[cardinality(lines) - cardinality(rooms)]);
    END LOOP;
    plain := NOT EXISTS (SELECT FROM stand WHERE line = ANY (lines));
    mixed := queues > 1 AND gates <> '{}' AND NOT plain;
    plain := plain AND (queues = 1 OR gates = '{}');
END $$;

-- One pass over the lines. In lines with partitions, it takes only jobs of the first rank, since
-- each lease moves the partition to another place in its line. In a rank, keys take turns: the
-- first job of each partition, then the second jobs. "moved" says that another pass may find more.
CREATE OR REPLACE FUNCTION tidemill.claim_pass(
    lines int[], rooms int[], gates text[], most int, who tidemill.claimant, t float8, p tidemill.prefs,
    OUT moved boolean, OUT got int, OUT leases bytea)
LANGUAGE plpgsql AS $$
DECLARE
    now   float8 := floor(t * 1e6);
    lanes text[];
    heads record;
    near  text[];
    costs float8[];
    first bigint;
    plain tid[];
    c     chosen_jobs;
    fresh bigint[];
    lent  leased_jobs;
    ends  bigint[];
    which bigint;
BEGIN
    moved := false;
    got := 0;
    lanes := try_gates(ARRAY (
        SELECT DISTINCT s.lane FROM unnest(lines) AS l CROSS JOIN LATERAL (
            SELECT lane FROM stand WHERE line = l ORDER BY rank, number LIMIT most) AS s));
    IF lanes <> '{}' THEN
        PERFORM fold_gates(lanes, now);
        SELECT array_agg(s.lane) AS lanes, array_agg(s.rank) AS ranks, array_agg(s.cost) AS costs INTO heads
        FROM (SELECT DISTINCT ON (lane) lane, rank, cost FROM stand
              WHERE lane = ANY (lanes) AND line = ANY (lines) ORDER BY lane, rank, number) AS s;
        first := least(
            (SELECT min(rank) FROM unnest(heads.ranks) AS rank),
            (SELECT min(r.rank) FROM unnest(lines) AS l CROSS JOIN LATERAL (
                SELECT rank FROM ready WHERE line = l ORDER BY rank, seq LIMIT 1) AS r));
        SELECT array_agg(h.lane), array_agg(h.cost) INTO near, costs
        FROM unnest(heads.lanes, heads.ranks, heads.costs) AS h (lane, rank, cost) WHERE h.rank = first;
    END IF;
    plain := ARRAY (
        SELECT r.ctid FROM unnest(lines, rooms) AS o (line, room) CROSS JOIN LATERAL (
            SELECT ctid FROM ready
            WHERE line = o.line AND rank BETWEEN coalesce(first, 0) AND coalesce(first, 1::bigint << 62)
            ORDER BY rank, seq LIMIT least(most, room) FOR UPDATE SKIP LOCKED) AS r);
    c := choose(plain, near, costs, first, lines, rooms, most, now);
    IF cardinality(c.seqs) > 0 AND EXISTS (SELECT FROM key) THEN
        c.free := ARRAY (
            SELECT x.seq FROM unnest(c.seqs) AS x (seq)
            CROSS JOIN LATERAL (SELECT key, expires FROM job WHERE job.seq = x.seq OFFSET 0) AS j
            WHERE may_take(j.key, j.expires, t));
    END IF;
    IF cardinality(c.seqs) > 0 AND cardinality(c.free) > 0 THEN
        -- Each start in a partition with a key draws a number. This number is the partition's new
        -- place in its line.
        fresh := CASE WHEN 1 <= ANY (c.turns) THEN ARRAY (
            SELECT nextval('acceptance') FROM generate_series(1, cardinality(c.seqs))) END;
        lent := lease_chosen(c, fresh, who, t);
        got := lent.got;
        leases := lent.leases;
        moved := true;
        PERFORM start_lanes(lent.lanes, lent.costs, lent.fresh, now);
        PERFORM start_queues(gates, lent.lines, now);
        ends := lent.overdue;
        IF ends <> '{}' THEN
            ends := lock_flows(ends, all_bad(ends), '{}');
        END IF;
        FOREACH which IN ARRAY lent.overdue LOOP  -- more came due than one step moves
            PERFORM finish(which, 'expired', 'not started before it expired', NULL, t, p);
        END LOOP;
        PERFORM flow(ends, t, p);
    END IF;
    PERFORM renew_gates(lanes || gates, now);
    IF got = 0 AND lanes <> '{}' THEN  -- partitions that stood first may stand no more
        moved := moved OR NOT EXISTS (SELECT FROM stand WHERE lane = ANY (lanes) AND line = ANY (lines));
    END IF;
END $$;

-- Choose the next jobs, in order: from these rows of "ready", and from partitions that we hold
-- ("ours"). "costs" has the cost of each partition's first job. In the result, "turns" is 0 for
-- jobs in the order of acceptance. In a partition with a key, the first job has 1, the second job
-- 2, and so on.
CREATE OR REPLACE FUNCTION tidemill.choose(
    plain tid[], ours text[], costs float8[], first bigint, lines int[], rooms int[], most int, now float8)
RETURNS tidemill.chosen_jobs
LANGUAGE plpgsql AS $$
DECLARE
    c     chosen_jobs;
    share int := greatest(1, ceil(most::float8 / greatest(1, coalesce(cardinality(ours), 1))));  -- of each partition
BEGIN
    WITH of_lanes AS MATERIALIZED (
        SELECT o.id AS lane, right(o.id, 1) <> chr(31) AS keyed, (y.g).turn,
               CASE WHEN o.cost = 1 THEN gate_room(x.terms, y.g, (y.g).running, now, most)
                    WHEN gate_opens(x.terms, y.g, (y.g).running, now, o.cost) = 0 THEN 1 ELSE 0 END AS room
        FROM unnest(ours, costs) AS o (id, cost)
        CROSS JOIN LATERAL (SELECT gate AS g FROM gate WHERE gate.id = o.id OFFSET 0) AS y
        CROSS JOIN LATERAL (SELECT terms FROM terms WHERE terms.id = (y.g).terms OFFSET 0) AS x
    ), near AS (
        SELECT o.lane, o.keyed, o.turn, o.room, p.*,
               row_number() OVER (PARTITION BY o.lane ORDER BY p.seq) AS k
        FROM of_lanes AS o CROSS JOIN LATERAL (
            SELECT q.* FROM unnest(choose.lines) AS l CROSS JOIN LATERAL (
                SELECT ctid AS row, line, rank, seq, cost FROM parked WHERE parked.lane = o.lane AND line = l AND rank = first
                ORDER BY seq LIMIT least(o.room, share) FOR UPDATE SKIP LOCKED) AS q
            ORDER BY q.seq LIMIT least(o.room, share)) AS p
    ), fits AS (
        -- A job with a cost other than 1 is chosen alone, as the first job of its partition. "cut"
        -- says that a partition may have more jobs to start. Then this pass ends after the last job
        -- chosen from it, or, if the partition has a key, after the turn of this job. The next pass
        -- goes on from there.
        SELECT *, bool_or(cost <> 1) OVER (PARTITION BY lane ORDER BY seq) AS other,
               bool_or(cost <> 1) OVER (PARTITION BY lane)
               OR NOT keyed AND room > share AND count(*) OVER (PARTITION BY lane) = share AS cut,
               CASE WHEN keyed THEN greatest(turn, first_value(seq) OVER (PARTITION BY lane ORDER BY seq))
               ELSE seq END AS number
        FROM near
    ), together AS (
        SELECT ctid AS row, line, rank, seq, NULL AS lane, seq AS number, 0::bigint AS turn, false AS cut
        FROM ready WHERE ctid = ANY (plain)
        UNION ALL
        SELECT fits.row, line, rank, seq, lane, number, CASE WHEN keyed THEN k ELSE 0 END, cut
        FROM fits WHERE k = 1 OR NOT other
    ), fitting AS (
        SELECT x.*, row_number() OVER (PARTITION BY line / 4 ORDER BY rank, greatest(turn, 1), number, seq)
                    <= rooms[array_position(choose.lines, line)] AS has_room
        FROM together AS x
    ), placed AS (
        SELECT f.*, row_number() OVER o AS place,
               cut AND lead(1) OVER (PARTITION BY lane ORDER BY rank, greatest(turn, 1), number, seq) IS NULL AS stops
        FROM fitting AS f WHERE has_room
        WINDOW o AS (ORDER BY rank, greatest(turn, 1), number, seq)
    )
    SELECT array_agg(x.seq ORDER BY place), array_agg(x.lane ORDER BY place),
           array_agg(x.number ORDER BY place), array_agg(x.turn ORDER BY place),
           array_agg(x.row ORDER BY place), array_agg(x.seq ORDER BY place)
    INTO c
    FROM placed AS x
    WHERE place <= least(most, (SELECT min(s.place) FROM placed AS s WHERE s.stops AND s.turn = 0))
      AND turn <= coalesce((SELECT min(s.turn) FROM placed AS s WHERE s.stops AND s.turn > 0), most);
    RETURN c;
END $$;

-- Lease the chosen jobs that are free. Returns the started jobs with their partitions and costs, and expired jobs.
CREATE OR REPLACE FUNCTION tidemill.lease_chosen(
    picked tidemill.chosen_jobs, drawn bigint[], who tidemill.claimant, t float8)
RETURNS tidemill.leased_jobs
LANGUAGE plpgsql AS $$
DECLARE
    leased leased_jobs;
BEGIN
    WITH chosen AS MATERIALIZED (
        SELECT c.seq, c.row, c.lane, drawn[c.place] AS fresh, c.place, CASE
                   WHEN c.turn > 1 THEN lag(drawn[c.place]) OVER (PARTITION BY c.lane ORDER BY c.place)
                   ELSE c.number END AS number
        FROM unnest(picked.seqs, picked.rows, picked.lanes, picked.numbers, picked.turns) WITH ORDINALITY
            AS c (seq, row, lane, number, turn, place)
        WHERE c.seq = ANY (picked.free)
    ), taken AS MATERIALIZED (
        SELECT c.seq, c.lane, c.fresh, c.place, c.number, j.line, j.rank, j.attempt + 1 AS attempt, j.losses,
               j.timeout, j.result_ttl, j.key IS NOT NULL AS keyed, j.linked, j.envelope, j.inputs, j.cost,
               (j.seq << 16) | (j.returns & 65535) AS token,
               CASE WHEN NOT who.consumes THEN 0 WHEN j.ttr > 0 THEN j.ttr ELSE 60 END AS ttr,
               j.expires > 0 AND j.expires <= t AS expired
        FROM chosen AS c CROSS JOIN LATERAL (SELECT * FROM job WHERE job.seq = c.seq OFFSET 0) AS j
    ), gone AS (
        DELETE FROM ready WHERE ctid = ANY (ARRAY (SELECT c.row FROM chosen AS c WHERE lane IS NULL))
    ), left_lane AS (
        DELETE FROM parked WHERE ctid = ANY (ARRAY (SELECT c.row FROM chosen AS c WHERE lane IS NOT NULL))
    ), lent AS (
        INSERT INTO lease (seq, token, serial, leased, deadline, result_ttl, owner, line, attempt,
                           keyed, linked, lane)
        SELECT seq, token, who.serial, t, CASE WHEN who.consumes THEN t + ttr END, result_ttl, who.me, line,
               attempt, keyed, linked, lane
        FROM taken WHERE NOT expired
    ), counted AS (
        INSERT INTO tally (queue, ready, running)
        SELECT line / 4, -count(*), count(*) FILTER (WHERE NOT expired)
        FROM taken GROUP BY 1
    )
    SELECT count(*) FILTER (WHERE NOT x.expired),
           coalesce(string_agg(pack(token, attempt, losses, rank, number, timeout, t,
                                    ttr, envelope, inputs), ''
                               ORDER BY place) FILTER (WHERE NOT x.expired), ''),
           array_agg(lane) FILTER (WHERE NOT x.expired),
           array_agg(cost) FILTER (WHERE NOT x.expired), array_agg(x.fresh) FILTER (WHERE NOT x.expired),
           array_agg(line) FILTER (WHERE NOT x.expired),
           coalesce(array_agg(seq) FILTER (WHERE x.expired), '{}')
    INTO leased FROM taken AS x;
    RETURN leased;
END $$;

-- Take the tokens of jobs that have started in partitions.
CREATE OR REPLACE FUNCTION tidemill.start_lanes(
    lanes text[], costs float8[], fresh bigint[], now float8) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE gate SET
        running = gate.running + s.runs, turn = greatest(gate.turn, s.turn),
        filled = filled_with(x.terms, gate.filled, now, s.cost),
        slots = slots_with(x.terms, gate.slots, now, s.cost)
    FROM (SELECT lane, count(*) AS runs, sum(u.cost) AS cost, max(u.turn) AS turn
          FROM unnest(lanes, costs, fresh) AS u (lane, cost, turn)
          WHERE lane IS NOT NULL GROUP BY lane) AS s
    CROSS JOIN LATERAL (SELECT ctid AS row, gate.terms FROM gate WHERE id = s.lane OFFSET 0) AS y
    CROSS JOIN LATERAL (SELECT terms.terms FROM terms WHERE id = y.terms OFFSET 0) AS x
    WHERE gate.ctid = y.row;
END $$;

-- Take the tokens of jobs that have started in these lines, from the limiters of queues.
CREATE OR REPLACE FUNCTION tidemill.start_queues(gates text[], lines int[], now float8) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF gates <> '{}' THEN
        UPDATE gate SET
            filled = filled_with(x.terms, gate.filled, now, s.cost),
            slots = slots_with(x.terms, gate.slots, now, s.cost)
        FROM (SELECT 'q' || line / 4 AS id, count(*)::float8 AS cost
              FROM unnest(lines) AS line GROUP BY 1) AS s
        JOIN terms AS x ON x.id = s.id
        WHERE gate.id = s.id AND gate.id = ANY (gates);
    END IF;
END $$;
