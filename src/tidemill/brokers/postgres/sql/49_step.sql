-- The parts of a step: lock, settle, lease, tell, close.

-- Lock the rows that a step may change or wait for, in the order that all transactions use. First
-- come keys. Then come the children of jobs that the step may end, and the jobs in "next" of the new
-- jobs that its verdicts put. Leases come last. Returns the result of lock_flows.
CREATE OR REPLACE FUNCTION tidemill.lock_step(
    req tidemill.step_request, shapes jsonb, others bigint[], seen bigint[]) RETURNS bigint[]
LANGUAGE plpgsql AS $$
DECLARE
    jobs  bigint[];
    bad   boolean[];
    flows bigint[] := '{}';
    held  bigint[];
    keyed boolean := shapes IS NOT NULL OR EXISTS (SELECT FROM key);
    many  boolean := req.verdicts IS NOT NULL OR cardinality(others) > 1;
BEGIN
    IF keyed OR many THEN
        held := ARRAY (
            SELECT x >> 16 FROM unnest(req.tokens || others) AS x UNION ALL
            SELECT (v ->> 'token')::bigint >> 16 FROM jsonb_array_elements(req.verdicts) AS v);
    END IF;
    IF keyed THEN
        PERFORM lock_keys(held || seen, keys_of(shapes));
    END IF;
    IF EXISTS (SELECT FROM behind) THEN
        SELECT coalesce(array_agg(x.seq), '{}'), coalesce(array_agg(x.bad), '{}') INTO jobs, bad FROM (
            SELECT token >> 16 AS seq, false AS bad FROM unnest(req.tokens) AS token
            UNION ALL
            SELECT (v ->> 'token')::bigint >> 16, (v ->> 'outcome')::int <> 0
            FROM jsonb_array_elements(req.verdicts) AS v
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

-- Settle a request: notes, verdicts, touches.
CREATE OR REPLACE FUNCTION tidemill.settle_step(
    req tidemill.step_request, followers tidemill.batch, my_name text, limited boolean, t float8,
    p tidemill.prefs) RETURNS tidemill.step_settled
LANGUAGE plpgsql AS $$
DECLARE
    did   step_settled := ROW('{}', '{}', '{}', '{}', false);
    plain record;
    v     verdict;
    n     int := 0;
BEGIN
    IF req.notes IS NOT NULL THEN
        PERFORM take_notes(req.me, req.notes);
    END IF;
    IF cardinality(req.tokens) > 0 THEN
        plain := settle_plain(req, my_name, limited, t, p);
        did.ended := plain.ended;
        IF cardinality(plain.settled) < cardinality(req.tokens) THEN
            did.missed := ARRAY (SELECT generate_series(1, cardinality(req.tokens))
                                 EXCEPT SELECT unnest(plain.settled) ORDER BY 1);
        END IF;
    END IF;
    IF req.verdicts IS NOT NULL THEN
        did.moved := true;
        FOR v IN SELECT * FROM verdicts_of(req.verdicts) LOOP
            n := n + 1;
            IF v.rank >= 0 THEN
                PERFORM set_rank(req.me, v.token, v.rank);
            END IF;
            IF NOT settle(req.me, my_name, v, t, p) THEN
                did.lost := did.lost || n;
            ELSIF followers.ids IS NOT NULL THEN
                PERFORM follow(n, followers, t, p);
            END IF;
        END LOOP;
    END IF;
    FOR n IN 1..coalesce(cardinality(req.touch_tokens), 0) LOOP
        IF NOT touch(req.me, req.touch_tokens[n], req.touch_seconds[n], t) THEN
            did.late := did.late || n;
        END IF;
    END LOOP;
    RETURN did;
END $$;

-- Unpack the verdicts of a request, in order.
CREATE OR REPLACE FUNCTION tidemill.verdicts_of(verdicts jsonb) RETURNS SETOF tidemill.verdict
LANGUAGE sql IMMUTABLE AS $$
    SELECT x.token, x.outcome, x.delay, x.error, x.traceback, x.started, x.ended,
           nullif(decode(x.result, 'base64'), ''), x.hold, x.rank
    FROM jsonb_array_elements(verdicts) WITH ORDINALITY AS e (item, n),
        jsonb_to_record(item) AS x (
            token bigint, outcome int, delay float8, error text, traceback text,
            started float8, ended float8, result text, hold boolean, rank bigint)
    ORDER BY n
$$;

-- Lease the jobs that an owner wants, unless the store departs: then "leaves" is the new URL.
CREATE OR REPLACE FUNCTION tidemill.claim_step(
    req tidemill.step_request, w tidemill.want, limited boolean, consumes boolean, t float8,
    p tidemill.prefs, INOUT last_queue int, OUT leaves text, OUT got int, OUT leases bytea)
LANGUAGE plpgsql AS $$
DECLARE
    taken record;
BEGIN
    leases := '';
    IF w.count <= 0 THEN
        RETURN;
    END IF;
    PERFORM pg_advisory_xact_lock_shared('meta'::regclass::oid::int, 0);
    SELECT moves_to INTO leaves FROM departure;
    IF leaves IS NULL THEN
        taken := take_ready(w, limited, req.me, req.serial, consumes, t, p, last_queue);
        last_queue := taken.last_queue;
        got := taken.got;
        leases := taken.leases;
    END IF;
END $$;

-- Do a step that repeats no earlier step: settle, count down children, lease.
CREATE OR REPLACE FUNCTION tidemill.run_step(
    INOUT r tidemill.step_reply, INOUT mine tidemill.pulse, req tidemill.step_request,
    followers tidemill.batch, w tidemill.want, flows bigint[], my_name text, consumes boolean, t float8,
    p tidemill.prefs)
LANGUAGE plpgsql AS $$
DECLARE
    did   step_settled := settle_step(req, followers, my_name, r.limited, t, p);
    taken record;
BEGIN
    r.ended := did.ended;
    r.moved := flow(flows, t, p) OR r.moved OR did.moved;
    IF r.limited THEN
        PERFORM sync_gates(false, t);
    END IF;
    taken := claim_step(req, w, r.limited, consumes, t, p, mine.last_queue);
    mine.last_queue := taken.last_queue;
    -- An owner that got something comes back for the rest before it sleeps (see exchange.py).
    r.hungry := CASE WHEN taken.got = 0 AND r.leases = '' THEN w.count ELSE 0 END;
    r.leases := r.leases || taken.leases;
    mine.missed := jsonb_build_object('missed', did.missed, 'lost', did.lost, 'late', did.late);
    r.answer := mine.missed || jsonb_build_object(
        'commands', tell_commands(req.me, req.serial), 'leaves', taken.leaves);
    r.idle := NOT r.moved AND r.leases = '' AND did.ended = '{}' AND req.notes IS NULL
              AND coalesce(cardinality(req.touch_tokens), 0) = 0 AND r.answer -> 'commands' = '[]';
END $$;

-- The commands that an owner has yet to hear. They stay until its next step, in case this reply is lost.
CREATE OR REPLACE FUNCTION tidemill.tell_commands(who int, this bigint) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
    commands jsonb;
BEGIN
    DELETE FROM command WHERE owner = who AND serial < this;
    WITH told AS (
        UPDATE command SET serial = this WHERE owner = who AND serial IS NULL AND this > 0
        RETURNING number, verb, token
    )
    SELECT coalesce(jsonb_agg(jsonb_build_array(verb, token) ORDER BY number), '[]')
    INTO commands FROM told;
    RETURN commands;
END $$;

-- The commands and leases of a step, for its repetition.
CREATE OR REPLACE FUNCTION tidemill.repeat_reply(
    who int, this bigint, OUT commands jsonb, OUT leases bytea)
LANGUAGE plpgsql AS $$
BEGIN
    SELECT coalesce(jsonb_agg(jsonb_build_array(verb, token) ORDER BY number), '[]')
    INTO commands FROM command WHERE owner = who AND serial = this;
    SELECT coalesce(string_agg(pack(l.token, l.attempt, j.losses, j.rank, l.seq, j.timeout,
               l.leased, coalesce(l.deadline - l.leased, 0), j.envelope, j.inputs), '' ORDER BY l.seq), '')
    INTO leases FROM lease AS l JOIN job AS j USING (seq) WHERE l.owner = who AND l.serial = this;
END $$;

-- Complete the reply. Store the results of the step, and for which jobs its owner sleeps.
CREATE OR REPLACE FUNCTION tidemill.close_step(
    r tidemill.step_reply, this bigint, w tidemill.want, mine tidemill.pulse, behind boolean,
    strays bigint[], t float8, p tidemill.prefs) RETURNS tidemill.step_reply
LANGUAGE plpgsql AS $$
DECLARE
    opens float8 := next_due(r.limited, t);
BEGIN
    IF behind THEN
        r.answer := r.answer || '{"behind": true}';
    END IF;
    IF strays <> '{}' THEN
        r.answer := r.answer || jsonb_build_object('strays', strays);
    END IF;
    IF NOT coalesce(w.sleep, false) THEN
        r.hungry := 0;
    END IF;
    IF this > 0 THEN
        UPDATE pulse SET
            serial = this, turn = r.turn, until = greatest(until, t + p.lease),
            due = coalesce(opens, 'infinity'), missed = mine.missed, last_queue = mine.last_queue,
            handed = mine.handed
        WHERE owner = mine.owner;
    END IF;
    IF w.mode IS NOT NULL THEN  -- a step without a want leaves the owner asleep for the same jobs
        UPDATE pulse SET asleep = r.hungry > 0,
                         room = CASE WHEN w.hand THEN r.hungry ELSE 0 END, tasks = w.tasks, messages = w.messages,
                         alone = w.alone, queues = w.queues
        WHERE owner = mine.owner;
    END IF;
    r.answer := r.answer || jsonb_build_object('due', opens - t, 'turn', r.turn, 'firing', next_firing() - t);
    RETURN r;
END $$;
