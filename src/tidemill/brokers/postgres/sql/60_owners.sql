-- The owners on the list, dead or alive, and what they are told.

CREATE OR REPLACE FUNCTION tidemill.attach(
    new_id text, new_name text, new_kind text, new_host text, new_channel text, has_lock boolean,
    new_facts bytea, p tidemill.prefs) RETURNS int
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
DECLARE
    new_number int;
BEGIN
    PERFORM check_here();
    PERFORM let_go(new_id, true, '{}', '{}', p);
    INSERT INTO owner (id, name, kind, host, channel, locked, facts)
    VALUES (new_id, new_name, new_kind, new_host, new_channel, has_lock, new_facts)
    RETURNING number INTO new_number;
    INSERT INTO pulse (owner, until) VALUES (new_number, clock(p) + p.lease);
    PERFORM tell_all('roster');
    RETURN new_number;
END $$;

-- Everybody who listens to this store hears a word.
CREATE OR REPLACE FUNCTION tidemill.tell_all(word text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('tidemill_' || 'owner'::regclass::oid, word);
END $$;

-- Take an owner off the list; what it held goes back by the witness's account, or, without one, with
-- a loss each. Returns how much that was.
CREATE OR REPLACE FUNCTION tidemill.let_go(
    who text, witness boolean, ran bigint[], causes text[], p tidemill.prefs) RETURNS int
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
DECLARE
    o    record;
    held int;
BEGIN
    -- Its pulse first: a step of its own that runs now ends before, and none begins after.
    SELECT owner.number, owner.name, owner.channel, owner.kind INTO o
    FROM owner JOIN pulse ON pulse.owner = owner.number WHERE owner.id = who FOR UPDATE OF pulse;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    -- A relay runs nothing.
    held := give_back(o.number, o.name, witness OR o.kind = 'relay', ran, causes, clock(p), p);
    DELETE FROM command WHERE owner = o.number;
    DELETE FROM pulse WHERE owner = o.number;
    DELETE FROM owner WHERE number = o.number;
    -- All look again: a hint that it was given and did not follow is somebody else's now.
    PERFORM tell_all('all');
    RETURN held;
END $$;

-- What a consumer runs is all it has taken.
CREATE OR REPLACE FUNCTION tidemill.tokens_of(who int) RETURNS bigint[]
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    RETURN ARRAY (SELECT token FROM lease WHERE owner = who);
END $$;

-- True while somebody holds the session lock of an owner.
CREATE OR REPLACE FUNCTION tidemill.is_locked(who int) RETURNS boolean
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    RETURN NOT pg_try_advisory_xact_lock_shared('owner'::regclass::oid::int, who);
END $$;

-- Owners as a reaper sees them: how long their lease has run out, negative while it has not, and
-- whether the lock that says that they live is held. A message's ttr is its own promise: a consumer
-- is not late while one that it holds runs.
CREATE OR REPLACE FUNCTION tidemill.roster(p tidemill.prefs)
RETURNS TABLE (number int, id text, kind text, host text, locked boolean, late float8, facts bytea)
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    RETURN QUERY
    SELECT o.number, o.id, o.kind, o.host, o.locked, clock(p) - greatest(pulse.until, (
               SELECT max(deadline) FROM lease WHERE lease.owner = o.number)), o.facts
    FROM owner AS o JOIN pulse ON pulse.owner = o.number ORDER BY o.number;
END $$;

CREATE OR REPLACE FUNCTION tidemill.send_command(who text, new_verb text, new_token bigint)
RETURNS boolean
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
DECLARE
    o record;
BEGIN
    SELECT number, channel INTO o FROM owner WHERE id = who;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO command (owner, verb, token) VALUES (o.number, new_verb, new_token);
    IF o.channel <> '' THEN
        PERFORM pg_notify(o.channel, o.number::text);
    END IF;
    RETURN true;
END $$;

-- What is done by the clock: what comes due, what is pruned, what nobody needs any more. True when
-- there is more of it than one call should do.
CREATE OR REPLACE PROCEDURE tidemill.tick(most int, p tidemill.prefs, INOUT more boolean)
LANGUAGE plpgsql AS $$
BEGIN
    more := tidemill.tick_once(most, p);
    COMMIT;
    CALL tidemill.open_gates(p);
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM tidemill.ring(0, true, '{}', p);
END $$;

CREATE OR REPLACE FUNCTION tidemill.tick_once(most int, p tidemill.prefs) RETURNS boolean
LANGUAGE plpgsql
SET search_path = tidemill, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    t    float8 := clock(p);
    more boolean;
BEGIN
    more := move_due(t, p);
    DELETE FROM await WHERE until < t;
    DELETE FROM call WHERE seen > 0 AND seen < t - 600;
    PERFORM fold();
    PERFORM sync_gates(false, t);
    RETURN greatest(prune(most, t, p), sweep_keys(most, t), sweep_gates(most, t)) >= most OR more;
END $$;
