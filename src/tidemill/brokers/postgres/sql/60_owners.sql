-- The list of owners, dead or alive, and their commands and notifications.

CREATE OR REPLACE FUNCTION tidemill.attach(
    new_id text, new_name text, new_kind text, new_host text, new_channel text,
    new_facts bytea, new_lease float8, over bigint, new_number int, p tidemill.prefs) RETURNS int
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    PERFORM check_here();
    IF new_lease > 0 THEN
        SELECT number INTO new_number FROM owner WHERE id = new_id AND lease > 0;
        IF hear(new_number, new_channel) THEN
            UPDATE owner SET name = new_name, kind = new_kind, host = new_host, facts = new_facts,
                             lease = new_lease
            WHERE number = new_number;
            UPDATE pulse SET turn = turn + 1, missed = CASE WHEN over > serial THEN '{}' ELSE missed END,
                             serial = greatest(serial, over)
            WHERE owner = new_number;
            RETURN new_number;
        END IF;
    END IF;
    PERFORM let_go(new_id, true, '{}', '{}', NULL, NULL, false, p);
    new_number := coalesce(new_number, nextval(pg_get_serial_sequence('owner', 'number')));
    INSERT INTO owner (number, id, name, kind, host, channel, facts, lease) OVERRIDING SYSTEM VALUE
    VALUES (new_number, new_id, new_name, new_kind, new_host, new_channel, new_facts, new_lease);
    INSERT INTO pulse (owner, serial, until) VALUES (new_number, over, clock(p) + p.lease);
    PERFORM tell_all('roster');
    RETURN new_number;
END $$;

-- Send a remote owner's notifications to another process from now on; false when the owner is not
-- on the list.
CREATE OR REPLACE FUNCTION tidemill.hear(who int, new_channel text) RETURNS boolean
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    PERFORM FROM pulse WHERE owner = who FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE owner SET channel = new_channel WHERE number = who;
    -- Notifications may have been lost with the process that got them before.
    PERFORM tell_all('all');
    RETURN true;
END $$;

-- The signs of life of remote owners, by which their silence is counted: each step has its own
-- turn. "holds" says that silence does not count now: the consumer has a message whose ttr is not
-- over.
CREATE OR REPLACE FUNCTION tidemill.words(p tidemill.prefs)
RETURNS TABLE (number int, id text, lease float8, turn bigint, holds boolean)
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    RETURN QUERY
    SELECT o.number, o.id, o.lease, pulse.turn, o.kind = 'consumer' AND EXISTS (
        SELECT FROM lease AS l WHERE l.owner = o.number AND l.deadline > clock(p))
    FROM owner AS o JOIN pulse ON pulse.owner = o.number WHERE o.lease > 0;
END $$;

-- Send a word to every process that listens to this store.
CREATE OR REPLACE FUNCTION tidemill.tell_all(word text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('tidemill_' || 'owner'::regclass::oid, word);
END $$;

-- Take an owner off the list. Its leases go back by the report of a witness. Without a witness,
-- each task counts a loss. Does nothing, and returns NULL, if the owner has another number than "same",
-- has made a step after "last_turn", or is "late" no more. Returns how many leases the owner had.
CREATE OR REPLACE FUNCTION tidemill.let_go(
    who text, witness boolean, ran bigint[], causes text[], same int, last_turn bigint, late boolean,
    p tidemill.prefs) RETURNS int
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
DECLARE
    o    record;
    held int;
BEGIN
    -- Lock its pulse first: a running step of this owner ends before, and no step begins after.
    SELECT owner.number, owner.name, owner.channel INTO o
    FROM owner JOIN pulse ON pulse.owner = owner.number
    WHERE owner.id = who AND number = coalesce(same, number)
      AND (last_turn IS NULL OR lease > 0 AND turn = last_turn)
      AND NOT (late AND until > clock(p)) FOR UPDATE OF pulse;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    held := give_back(o.number, o.name, witness, ran, causes, clock(p), p);
    DELETE FROM command WHERE owner = o.number;
    DELETE FROM pulse WHERE owner = o.number;
    DELETE FROM owner WHERE number = o.number;
    -- All owners look again: another owner must follow a hint that this owner got and did not follow.
    PERFORM tell_all('all');
    RETURN held;
END $$;

-- The list of owners, for a reaper. "late" is the seconds since an owner's lease ran out, negative
-- before that. A consumer is not late while it has a message whose ttr is not over.
CREATE OR REPLACE FUNCTION tidemill.roster(p tidemill.prefs)
RETURNS TABLE (number int, late float8, facts bytea)
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    RETURN QUERY
    SELECT o.number, clock(p) - greatest(pulse.until, (SELECT max(deadline) FROM lease AS l WHERE l.owner = o.number)),
           o.facts
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

-- Do the work of the clock: move due jobs, prune, and delete rows that nobody needs any more. "more" says that
-- more is left than one call should do.
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
LANGUAGE plpgsql SET search_path = tidemill, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    t    float8 := clock(p);
    more boolean;
BEGIN
    more := move_due(t, p);
    DELETE FROM await WHERE until < t;
    DELETE FROM call WHERE once < t - 600;
    DELETE FROM call WHERE once IS NULL AND seen < t - 600;
    PERFORM fold();
    PERFORM sync_gates(false, t);
    RETURN greatest(prune(most, t, p), sweep_keys(most, t), sweep_gates(most, t), prune_history(most, t)) >= most OR more;
END $$;
