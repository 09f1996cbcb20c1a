-- A step of an owner: it hands in verdicts and takes jobs. The parts of a step are in 49_step.sql.

-- The first transaction of a step: note, settle, touch, lease, in that order. The answer to a
-- repeated step comes from the kept results. A step with the serial 0 is made on behalf of a remote owner:
-- its verdicts count, but it does not disturb the series of the owner's own steps.
CREATE OR REPLACE FUNCTION tidemill.step(
    req tidemill.step_request, followers tidemill.batch, w tidemill.want, p tidemill.prefs, counts bytea)
RETURNS tidemill.step_reply
LANGUAGE plpgsql SET search_path = tidemill, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    r       step_reply := ROW(NULL, '', NULL, '{}', false, 0, false, false);
    t       float8;
    mine    pulse;
    who     record;
    handed  record;
    did     record;
    unheard bigint[];
    again   boolean;
    behind  boolean;
    strays  bigint[];
    flows   bigint[];
    seen    bigint[];
BEGIN
    SELECT * INTO mine FROM pulse WHERE owner = req.me FOR UPDATE;
    IF NOT FOUND THEN
        r.answer := '{"gone": true}';
        RETURN r;
    END IF;
    IF req.serial < mine.serial AND req.serial > 0 THEN  -- the step comes late, and nobody waits for it
        r.answer := jsonb_build_object('last', mine.serial);
        RETURN r;
    END IF;
    again := mine.serial = req.serial AND req.serial > 0;
    behind := again OR mine.serial < req.serial - 1;
    IF req.held IS NOT NULL THEN
        strays := ARRAY (SELECT token FROM lease WHERE owner = req.me
                         EXCEPT SELECT unnest(req.held || mine.handed));
    END IF;
    t := clock(p);
    r.turn := mine.turn + 1;
    SELECT name, kind = 'consumer' AS consumes, EXISTS (SELECT FROM uptime) AS up,
           EXISTS (SELECT FROM terms) OR EXISTS (SELECT FROM said) AS limited
    INTO who
    FROM owner WHERE number = req.me;
    r.limited := who.limited OR coalesce(jsonb_path_exists(followers.shapes, '$[*].lane'), false);
    IF NOT who.up THEN
        PERFORM come_back();
        r.moved := true;  -- the commit must reach the disk
    END IF;
    -- Leases handed to this owner while it slept, which it has not heard of.
    unheard := ARRAY (SELECT x FROM unnest(mine.handed) AS x WHERE NOT x = ANY (req.heard));
    IF NOT again THEN
        seen := end_by_time(t);
        flows := lock_step(req, followers.shapes, req.touch_tokens || unheard, seen);
    END IF;
    mine.handed := CASE WHEN w.mode IS NULL THEN unheard ELSE '{}' END;  -- kept for a step with a want
    IF w.mode IS NOT NULL AND cardinality(unheard) > 0 THEN
        r.moved := true;
        handed := fetch_handed(req.me, who.name, req.serial, unheard, CASE
            WHEN w.tasks AND w.queues IS NOT DISTINCT FROM mine.queues THEN w.count ELSE 0 END, t, p);
        w.count := w.count - handed.got;
        r.leases := handed.leases;
    END IF;
    IF again THEN
        r.moved := true;
        did := repeat_reply(req.me, req.serial);
        r.answer := mine.missed || jsonb_build_object('commands', did.commands);
        r.leases := did.leases;
        r.hungry := CASE WHEN r.leases = '' THEN w.count ELSE 0 END;
    ELSE
        IF come_due(seen, t, p) THEN
            r.moved := true;
            flows := ARRAY (SELECT f FROM unnest(flows) AS f WHERE EXISTS (SELECT FROM job WHERE seq = f)
                                                       AND NOT EXISTS (SELECT FROM done WHERE seq = f));
        END IF;
        did := run_step(r, mine, req, followers, w, flows, who.name, who.consumes, t, p);
        r := did.r;
        mine := did.mine;
        r.idle := NOT add_history(counts) AND r.idle;
    END IF;
    RETURN close_step(r, req.serial, w, mine, behind, strays, t, p);
END $$;

-- Look once more, after the commit that marks this owner asleep. A put looks for sleeping owners
-- after its commit. If the put did not see this owner, the put's job was there before this look.
CREATE OR REPLACE FUNCTION tidemill.look_again(
    me int, this bigint, this_turn bigint, limited boolean, w tidemill.want, p tidemill.prefs,
    OUT leases bytea, OUT due float8)
LANGUAGE plpgsql SET search_path = tidemill, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    t     float8;
    mine  pulse;
    taken record;
    who   record;
    d     float8;
    ready int[];
BEGIN
    leases := '';
    -- Mostly there is no job: then write nothing.
    ready := lines_for(w.queues, kinds_of(w), clock(p), limited);
    IF cardinality(ready) > 0 AND NOT EXISTS (SELECT FROM departure) THEN
        -- The step passed over the limiters that others held. Wait for them now, before any other lock is held.
        IF limited AND may_read_terms() THEN
            PERFORM FROM gate WHERE id = ANY (
                ARRAY (SELECT 'q' || number FROM queue
                       WHERE gated AND number IN (SELECT l / 4 FROM unnest(ready) AS l))
                || (SELECT lane FROM stand WHERE line = ANY (ready) ORDER BY line, rank, number LIMIT 1))
            ORDER BY id FOR UPDATE;
        END IF;
        SELECT * INTO mine FROM pulse WHERE owner = me FOR UPDATE;
        -- Take no jobs if the client has repeated this step on another connection: nobody would
        -- hear of them. Take none if jobs were handed to the owner meanwhile: the owner must hear
        -- of the handed jobs first.
        IF FOUND AND mine.turn = this_turn AND mine.handed = '{}' THEN
            t := clock(p);
            SELECT kind = 'consumer' AS consumes INTO who FROM owner WHERE number = me;
            taken := take_ready(w, limited, me, this, who.consumes, t, p, mine.last_queue);
            leases := taken.leases;
            IF taken.got > 0 THEN
                UPDATE pulse SET last_queue = taken.last_queue, asleep = taken.got < w.count, room = 0
                WHERE owner = me;
            END IF;
        END IF;
    END IF;
    d := next_due(limited, clock(p));
    IF limited THEN  -- if a limiter opens later than the step said, this owner wakes later, too
        UPDATE pulse SET due = coalesce(d, 'infinity') WHERE owner = me AND pulse.due < coalesce(d, 'infinity');
    END IF;
    due := d - clock(p);
END $$;

-- Settle a lease in the caller's transaction, which may last long: so this touches no other job that is
-- due. A lease whose time is over counts as lost, although nobody has given its job back yet.
CREATE OR REPLACE FUNCTION tidemill.settle_inside(me int, told jsonb, p tidemill.prefs) RETURNS boolean
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
DECLARE
    t     float8 := clock(p);
    v     verdict;
    jobs  bigint[];
    flows bigint[];
BEGIN
    SELECT * INTO v FROM verdicts_of(told);
    jobs := ARRAY[v.token >> 16];
    PERFORM lock_keys(jobs, '{}');
    flows := lock_flows(jobs, all_bad(jobs), '{}');
    IF EXISTS (SELECT FROM lease WHERE seq = v.token >> 16 AND deadline <= t)
        OR NOT settle(me, (SELECT name FROM owner WHERE number = me), v, t, p)
    THEN
        RETURN false;
    END IF;
    PERFORM flow(flows, t, p);
    PERFORM tell_all('all');
    RETURN true;
END $$;

-- A step: two transactions, one round trip. The second commit need not reach the disk unless it leases
-- jobs.
CREATE OR REPLACE PROCEDURE tidemill.exchange(
    req tidemill.step_request, followers tidemill.batch, w tidemill.want, p tidemill.prefs, chores int,
    INOUT answer jsonb, INOUT leases bytea, INOUT more bytea, counts bytea DEFAULT NULL)
LANGUAGE plpgsql AS $$
DECLARE
    s    record;
    a    record;
    mine int := req.me;  -- ring does not wake this owner, which has looked
BEGIN
    s := tidemill.step(req, followers, w, p, counts);
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
        s.limited := s.limited OR EXISTS (SELECT FROM tidemill.terms);  -- the first limit may have come just now
        BEGIN
            a := tidemill.look_again(req.me, req.serial, s.turn, s.limited, w, p);
        EXCEPTION
            WHEN serialization_failure OR deadlock_detected THEN
                RAISE;
            WHEN OTHERS THEN  -- the step is committed: the client must repeat it
                RAISE EXCEPTION USING ERRCODE = 'TM005', MESSAGE = SQLERRM;
        END;
        more := a.leases;
        answer := answer || jsonb_build_object('due', a.due);
    END IF;
    IF coalesce(more, '') = '' THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    IF s.hungry > 0 AND s.limited THEN
        COMMIT;  -- while we held a limiter, others left events: take these over now
        IF EXISTS (SELECT FROM tidemill.inbox) OR EXISTS (SELECT FROM tidemill.said) THEN
            CALL tidemill.open_gates(p);
            mine := 0;  -- jobs that this opens may be for this owner, which has looked before
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
