-- One step of an owner: what it hands in and takes.

-- Lock what a step may change, or wait for, in the order in which all lock: keys, what is behind the
-- jobs that it may end or that its followers name, leases. Returns what lock_flows does.
CREATE OR REPLACE FUNCTION tidemill.lock_step(
    tokens bigint[], verdicts jsonb, shapes jsonb, others bigint[], seen bigint[], over bigint[],
    takes bigint[])
RETURNS bigint[]
LANGUAGE plpgsql AS $$
DECLARE
    jobs  bigint[];
    bad   boolean[];
    flows bigint[] := '{}';
    held  bigint[];
    keyed boolean := shapes IS NOT NULL OR EXISTS (SELECT FROM key);
    many  boolean := verdicts IS NOT NULL OR cardinality(others) > 1 OR over <> '{}' OR takes <> '{}';
BEGIN
    others := others || over || takes;
    IF keyed OR many THEN
        held := ARRAY (
            SELECT x >> 16 FROM unnest(tokens || others) AS x UNION ALL
            SELECT (v ->> 'token')::bigint >> 16 FROM jsonb_array_elements(verdicts) AS v);
    END IF;
    IF keyed THEN
        PERFORM lock_keys(held || seen, keys_of(shapes));
    END IF;
    IF EXISTS (SELECT FROM behind) THEN
        SELECT coalesce(array_agg(x.seq), '{}'), coalesce(array_agg(x.bad), '{}') INTO jobs, bad FROM (
            SELECT token >> 16 AS seq, false AS bad FROM unnest(tokens) AS token
            UNION ALL SELECT token >> 16, true FROM unnest(over) AS token
            UNION ALL
            SELECT (v ->> 'token')::bigint >> 16, (v ->> 'outcome')::int <> 0
            FROM jsonb_array_elements(verdicts) AS v
            UNION ALL SELECT seq, true FROM unnest(seen) AS seq) AS x;
        flows := lock_flows(jobs, bad, names_of(seen) || ARRAY (
            SELECT DISTINCT n FROM jsonb_array_elements(shapes) AS s
            CROSS JOIN LATERAL jsonb_array_elements_text(s -> 'next') AS n));
    END IF;
    IF many THEN
        PERFORM FROM lease WHERE seq = ANY (held) ORDER BY seq FOR UPDATE;
    END IF;
    RETURN flows;
END $$;

-- The first transaction of a step: note, settle, touch, take, lease, in that order. A step that is repeated
-- is answered from what was kept of it. One with the serial 0 is said on behalf of an owner elsewhere: what it
-- hands in counts, and the owner's own steps go on as if there had been none.
CREATE OR REPLACE FUNCTION tidemill.step(
    me int, this bigint, tokens bigint[], starts float8[], ends float8[], results bytea[],
    verdicts jsonb, f_ids text[], f_envelopes bytea[], f_shape int[], f_shapes jsonb,
    touch_tokens bigint[], touch_seconds float8[], notes jsonb, w tidemill.want, heard bigint[],
    over bigint[], take_tokens bigint[], take_ids text[], held bigint[],
    p tidemill.prefs, OUT answer jsonb, OUT leases bytea, OUT turn bigint, OUT ended bigint[], OUT moved boolean,
    OUT hungry int, OUT idle boolean, OUT limited boolean)
LANGUAGE plpgsql
SET search_path = tidemill, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    t        float8;
    mine     pulse;
    who      record;
    plain    record;
    v        record;
    taken    record;
    missed   int[] := '{}';
    lost     int[] := '{}';
    late     int[] := '{}';
    kept     int[] := '{}';
    stale    int[] := '{}';
    leaves   text;
    commands jsonb;
    unheard  bigint[];
    handed   bytea := '';
    flows    bigint[];
    seen     bigint[];
    d        float8;
    again    boolean;
    behind   boolean;
    strays   bigint[];
BEGIN
    ended := '{}';
    moved := false;
    idle := false;
    hungry := 0;
    leases := '';
    SELECT * INTO mine FROM pulse WHERE owner = me FOR UPDATE;
    IF NOT FOUND THEN
        answer := '{"gone": true}';
        RETURN;
    END IF;
    again := mine.serial = this AND this > 0;
    IF this < mine.serial AND this > 0 THEN  -- it was stuck on its way, and nobody waits for it any more
        answer := jsonb_build_object('last', mine.serial);
        RETURN;
    END IF;
    behind := again OR mine.serial < this - 1;
    IF held IS NOT NULL THEN
        strays := ARRAY (SELECT token FROM lease WHERE owner = me EXCEPT SELECT unnest(held || mine.handed));
    END IF;
    t := clock(p);
    turn := mine.turn + 1;
    SELECT name, kind = 'consumer' AS consumes, EXISTS (SELECT FROM uptime) AS up,
           EXISTS (SELECT FROM terms) OR EXISTS (SELECT FROM said) AS limited
    INTO who
    FROM owner WHERE number = me;
    limited := who.limited OR coalesce(jsonb_path_exists(f_shapes, '$[*].lane'), false);
    IF NOT who.up THEN
        PERFORM come_back();
        moved := true;  -- and is to be on disk
    END IF;
    -- Handed to us while we slept, and never heard of.
    unheard := ARRAY (SELECT x FROM unnest(mine.handed) AS x WHERE NOT x = ANY (heard));
    IF NOT again THEN
        PERFORM lock_unknown(verdicts);
        seen := end_by_time(t);
        flows := lock_step(tokens, verdicts, f_shapes, touch_tokens || unheard, seen,
                           over, take_tokens);
    END IF;
    IF w.mode IS NOT NULL THEN
        mine.handed := '{}';
        IF cardinality(unheard) > 0 THEN
            moved := true;
            taken := fetch_handed(me, who.name, this, unheard, CASE
                WHEN w.tasks AND w.queues IS NOT DISTINCT FROM mine.queues THEN w.count ELSE 0
                END, t, p);
            w.count := w.count - taken.got;
            handed := taken.leases;
        END IF;
    ELSE  -- they wait for a step that wants any
        mine.handed := unheard;
    END IF;
    IF again THEN
        moved := true;
        answer := mine.missed || jsonb_build_object('commands', (
            SELECT coalesce(jsonb_agg(jsonb_build_array(verb, token) ORDER BY number), '[]')
            FROM command WHERE owner = me AND serial = this));
        SELECT coalesce(string_agg(pack(l.token, l.attempt, j.losses, j.rank, l.seq, j.timeout,
                   l.leased, coalesce(l.deadline - l.leased, 0), j.envelope, j.inputs), '' ORDER BY l.seq), '')
        INTO leases
        FROM lease AS l JOIN job AS j USING (seq) WHERE l.owner = me AND l.serial = this;
        hungry := CASE WHEN leases = '' THEN w.count ELSE 0 END;
    ELSE
        IF come_due(seen, t, p) THEN  -- and what ended for that is counted down
            moved := true;
            flows := ARRAY (SELECT f FROM unnest(flows) AS f
                            WHERE EXISTS (SELECT FROM job WHERE seq = f)
                              AND NOT EXISTS (SELECT FROM done WHERE seq = f));
        END IF;
        IF notes IS NOT NULL THEN
            PERFORM take_notes(me, notes);
        END IF;
        IF cardinality(tokens) > 0 THEN
            plain := settle_plain(me, who.name, tokens, starts, ends, results, limited, t, p);
            ended := plain.ended;
            IF cardinality(plain.settled) < cardinality(tokens) THEN
                missed := ARRAY (SELECT n FROM generate_series(1, cardinality(tokens)) AS n
                                 WHERE NOT n = ANY (plain.settled));
            END IF;
        END IF;
        IF verdicts IS NOT NULL THEN
            moved := true;
            FOR v IN
                SELECT x.*, n FROM jsonb_array_elements(verdicts) WITH ORDINALITY AS e (item, n),
                    jsonb_to_record(item) AS x (
                        token bigint, outcome int, delay float8, error text, traceback text,
                        started float8, ended float8, result text, hold boolean, rank bigint)
                ORDER BY n
            LOOP
                IF v.rank >= 0 THEN
                    PERFORM set_rank(me, v.token, v.rank);
                END IF;
                IF settle(me, who.name, v.token, v.outcome, v.delay, v.error, v.traceback,
                          v.started, v.ended, nullif(decode(v.result, 'base64'), ''), v.hold, t, p)
                THEN
                    IF f_ids IS NOT NULL THEN
                        PERFORM follow(v.n::int, f_ids, f_envelopes, f_shape, f_shapes, t, p);
                    END IF;
                ELSE
                    lost := lost || v.n::int;
                END IF;
            END LOOP;
        END IF;
        IF cardinality(over) > 0 THEN
            kept := without(carry(me, over, t), over);
            IF kept <> '{}' THEN
                moved := true;
                ended := ended || ARRAY (SELECT over[n] >> 16 FROM unnest(kept) AS n);
                kept := ARRAY (SELECT n FROM unnest(kept) AS n WHERE NOT settle(
                    me, who.name, over[n], 7, 0, '', '', 0, 0, NULL, false, t, p));
            END IF;
        END IF;
        FOR n IN 1..coalesce(cardinality(touch_tokens), 0) LOOP
            IF NOT touch(me, touch_tokens[n], touch_seconds[n], t) THEN
                late := late || n;
            END IF;
        END LOOP;
        moved := flow(flows, t, p) OR moved;
        IF cardinality(take_tokens) > 0 THEN
            stale := without(take_carried(me, take_tokens, take_ids, who.consumes, t), take_tokens);
            moved := moved OR cardinality(stale) > 0;
        END IF;
        IF limited THEN
            PERFORM sync_gates(false, t);
        END IF;
        IF w.count > 0 THEN
            PERFORM pg_advisory_xact_lock_shared('meta'::regclass::oid::int, 0);
            SELECT moves_to INTO leaves FROM departure;
        END IF;
        IF w.count > 0 AND leaves IS NULL THEN
            taken := take(w, limited, me, this, who.consumes, t, p, mine.last_queue);
            leases := taken.leases;
            -- Who got something comes back for the rest before it sleeps (see exchange.py).
            hungry := CASE WHEN taken.got = 0 AND handed = '' THEN w.count ELSE 0 END;
            mine.last_queue := taken.last_queue;
        END IF;
        -- Commands stay until the step after, should this reply be lost.
        DELETE FROM command WHERE owner = me AND serial < this;
        WITH told AS (
            UPDATE command SET serial = this WHERE owner = me AND serial IS NULL AND this > 0
            RETURNING number, verb, token
        )
        SELECT coalesce(jsonb_agg(jsonb_build_array(verb, token) ORDER BY number), '[]')
        INTO commands FROM told;
        -- Nothing was done that must not be lost.
        leases := handed || leases;
        idle := NOT moved AND leases = '' AND cardinality(ended) = 0 AND notes IS NULL
                AND commands = '[]' AND coalesce(cardinality(touch_tokens), 0) = 0
                AND over = '{}' AND take_tokens = '{}';
        mine.missed := jsonb_build_object('missed', missed, 'lost', lost, 'late', late,
                                          'kept', kept, 'stale', stale);
        answer := mine.missed || jsonb_build_object('commands', commands, 'leaves', leaves);
    END IF;
    IF behind THEN
        answer := answer || '{"behind": true}';
    END IF;
    IF strays <> '{}' THEN
        answer := answer || jsonb_build_object('strays', strays);
    END IF;
    IF w.told >= 0 THEN
        answer := answer || unknown_since(w.told);
    END IF;
    d := next_step(limited);
    IF NOT coalesce(w.sleep, false) THEN
        hungry := 0;
    END IF;
    IF this > 0 THEN
        UPDATE pulse SET
            serial = this, turn = step.turn, until = greatest(until, t + p.lease),
            due = coalesce(d, 'infinity'), missed = mine.missed, last_queue = mine.last_queue,
            handed = mine.handed
        WHERE owner = me;
    END IF;
    IF w.mode IS NOT NULL THEN  -- who says nothing of what it wants sleeps on for the same
        UPDATE pulse SET asleep = hungry > 0,
                         room = CASE WHEN w.hand THEN hungry ELSE 0 END, tasks = w.tasks, messages = w.messages,
                         alone = w.alone, queues = w.queues, knows = w.knows,
                         told = coalesce((answer -> 'told')::bigint, -1)
        WHERE owner = me;
    END IF;
    answer := answer || jsonb_build_object('due', d - t, 'turn', turn, 'firing', next_firing() - t);
END $$;

-- Look once more, now that all can see that we are about to sleep. Whoever puts a job looks for
-- sleepers after its commit: if it did not see us, its job was there before this look.
CREATE OR REPLACE FUNCTION tidemill.look_again(
    me int, this bigint, this_turn bigint, limited boolean, w tidemill.want, p tidemill.prefs,
    OUT leases bytea, OUT due float8)
LANGUAGE plpgsql
SET search_path = tidemill, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    t     float8;
    mine  pulse;
    taken record;
    who   record;
    d     float8;
BEGIN
    leases := '';
    -- Nothing to see, mostly: then nothing is written either.
    IF (cardinality(lines_for(w.queues, kinds_of(w), clock(p), limited)) > 0 OR has_unknown(w.knows, w.queues))
       AND NOT EXISTS (SELECT FROM departure) THEN
        SELECT * INTO mine FROM pulse WHERE owner = me FOR UPDATE;
        -- The client may have lost us and sent the step again: what we took now, nobody would hear of.
        -- And what it was handed since it has yet to hear.
        IF FOUND AND mine.turn = this_turn AND mine.handed = '{}' THEN
            t := clock(p);
            SELECT kind = 'consumer' AS consumes INTO who FROM owner WHERE number = me;
            taken := take(w, limited, me, this, who.consumes, t, p, mine.last_queue);
            leases := taken.leases;
            IF taken.got > 0 THEN
                UPDATE pulse SET last_queue = taken.last_queue, asleep = taken.got < w.count, room = 0
                WHERE owner = me;
            END IF;
        END IF;
    END IF;
    d := next_step(limited);
    IF limited THEN  -- a gate may open later than the step said: nobody is to rely on us before
        UPDATE pulse SET due = coalesce(d, 'infinity') WHERE owner = me AND pulse.due < coalesce(d, 'infinity');
    END IF;
    due := d - clock(p);
    IF w.told >= 0 AND EXISTS (SELECT FROM unknown)
       AND unknown_since((SELECT told FROM pulse WHERE owner = me)) -> 'unknown' <> '[]' THEN
        due := 0;
    END IF;
END $$;

-- One step: two transactions, one round trip. The second commit need not reach the disk unless
-- something was leased in it.
CREATE OR REPLACE PROCEDURE tidemill.exchange(
    me int, this bigint, tokens bigint[], starts float8[], ends float8[], results bytea[],
    verdicts jsonb, f_ids text[], f_envelopes bytea[], f_shape int[], f_shapes jsonb,
    touch_tokens bigint[], touch_seconds float8[], notes jsonb, w tidemill.want, heard bigint[],
    over bigint[], take_tokens bigint[], take_ids text[], held bigint[],
    p tidemill.prefs, chores int, INOUT answer jsonb, INOUT leases bytea, INOUT more bytea)
LANGUAGE plpgsql AS $$
DECLARE
    s    record;
    a    record;
    mine int := me;  -- who is not told, since it has looked
BEGIN
    s := tidemill.step(me, this, tokens, starts, ends, results, verdicts, f_ids, f_envelopes,
                       f_shape, f_shapes, touch_tokens, touch_seconds, notes, w, heard,
                       over, take_tokens, take_ids, held, p);
    answer := s.answer;
    leases := s.leases;
    IF s.idle THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    COMMIT;
    IF s.limited THEN
        CALL tidemill.open_gates(p);
    END IF;
    IF s.hungry > 0 THEN
        s.limited := s.limited OR EXISTS (SELECT FROM tidemill.terms);  -- it may be the first, and have come just now
        BEGIN
            a := tidemill.look_again(me, this, s.turn, s.limited, w, p);
        EXCEPTION
            WHEN serialization_failure OR deadlock_detected THEN
                RAISE;
            WHEN OTHERS THEN  -- the step counts all the same: it is to be sent again, and answered
                RAISE EXCEPTION USING ERRCODE = 'TM005', MESSAGE = SQLERRM;
        END;
        more := a.leases;
        answer := answer || jsonb_build_object('due', a.due);
    END IF;
    IF coalesce(more, '') = '' THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    IF s.hungry > 0 AND s.limited THEN
        COMMIT;  -- who came to a gate while we were there did not get it, and is to be seen now
        IF EXISTS (SELECT FROM tidemill.inbox) OR EXISTS (SELECT FROM tidemill.said) THEN
            CALL tidemill.open_gates(p);
            mine := 0;  -- what that opens may be for us, who have looked before
        END IF;
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    PERFORM tidemill.ring(mine, s.moved, s.ended, p);
    IF chores > 0 THEN
        COMMIT;
        PERFORM set_config('synchronous_commit', 'off', true);
        PERFORM tidemill.do_chores(chores, p);
    END IF;
END $$;
