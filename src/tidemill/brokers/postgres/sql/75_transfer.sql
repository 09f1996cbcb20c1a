-- Transfer: leaving for another store, and taking in jobs of a departed store.

-- Refuse changes to a store that departs. No departure begins until this transaction ends: a job accepted while
-- all is copied would stay behind.
CREATE OR REPLACE FUNCTION tidemill.check_here() RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    d record;
BEGIN
    PERFORM pg_advisory_xact_lock_shared('meta'::regclass::oid::int, 0);
    SELECT (SELECT moves_to FROM departure), EXISTS (SELECT FROM uptime) AS up INTO d;
    IF d.moves_to IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'TM003', MESSAGE = 'moved', DETAIL = d.moves_to;
    END IF;
    IF NOT d.up THEN
        PERFORM come_back();
    END IF;
END $$;

CREATE OR REPLACE FUNCTION tidemill.is_sealed() RETURNS boolean
LANGUAGE plpgsql AS $$ BEGIN RETURN EXISTS (SELECT FROM departure WHERE sealed); END $$;

-- The highest number ever drawn.
CREATE OR REPLACE FUNCTION tidemill.last_number() RETURNS bigint
LANGUAGE plpgsql AS $$ BEGIN RETURN (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM acceptance); END $$;

CREATE OR REPLACE FUNCTION tidemill.depart(
    new_mark text, target text, seal boolean,
    OUT mark text, OUT moves_to text, OUT last bigint, OUT sealed boolean)
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    PERFORM pg_advisory_xact_lock('meta'::regclass::oid::int, 0);
    INSERT INTO departure SELECT new_mark, target, false
    WHERE NOT EXISTS (SELECT FROM departure);
    UPDATE departure SET sealed = departure.sealed OR seal WHERE departure.moves_to = target;
    SELECT d.mark, d.moves_to, d.sealed INTO mark, moves_to, sealed FROM departure AS d;
    IF moves_to <> target THEN
        RAISE EXCEPTION USING ERRCODE = 'TM003', MESSAGE = 'moved', DETAIL = moves_to;
    END IF;
    last := last_number();
    PERFORM tell_all('all');
END $$;

CREATE OR REPLACE FUNCTION tidemill.stay() RETURNS void
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    DELETE FROM departure;
    PERFORM tell_all('all');
END $$;

CREATE OR REPLACE FUNCTION tidemill.adopted(which text) RETURNS text
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    RETURN coalesce((SELECT cursor FROM arrival WHERE mark = which), '');
END $$;

-- Take in jobs of a departed store, and keep the cursor that was reached, in one transaction.
CREATE OR REPLACE FUNCTION tidemill.adopt(
    which text, last bigint, reached text, records jsonb, envelopes bytea[], results bytea[],
    p tidemill.prefs) RETURNS boolean[]
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
DECLARE
    start bigint;
    taken boolean[] := '{}';
BEGIN
    PERFORM check_here();
    PERFORM pg_advisory_xact_lock('acceptance'::regclass::oid::int, 0);
    INSERT INTO arrival (mark, cursor, first) VALUES (which, reached, last_number())
    ON CONFLICT (mark) DO UPDATE SET cursor = reached
    RETURNING first INTO start;
    IF start + last > last_number() THEN
        PERFORM setval('acceptance', start + last);
    END IF;
    PERFORM lock_keys('{}', keys_of(records));
    FOR n IN 1..cardinality(envelopes) LOOP
        taken := taken || adopt_one(records -> (n - 1), start, envelopes[n], nullif(results[n], ''), clock(p), p);
    END LOOP;
    PERFORM tell_all('all');
    RETURN taken;
END $$;

CREATE OR REPLACE FUNCTION tidemill.adopt_one(
    item jsonb, start bigint, envelope bytea, answer bytea, t float8, p tidemill.prefs) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    r     record;
    k     record;
    what  text;
    ended boolean;
BEGIN
    SELECT * INTO r FROM jsonb_to_record(item) AS x (
        id text, seq bigint, rank bigint, line int, state int, policy int, tries int, attempt int,
        losses int, due float8, expires float8, finished float8, timeout float8, ttr float8, result_ttl float8,
        cancelling boolean, key text, error text, trail jsonb, done float8,
        total float8, text text, log jsonb, linked boolean,
        inputs text[], next text[], waits text, pending bigint, failures bigint, dropped boolean,
        delay float8, at float8, until float8, lane text, cost float8, terms float8[], backoff float8[], body int[]);
    r.seq := start + r.seq;
    what := ('{waiting,scheduled,ready,running,succeeded,failed,cancelled,expired}'::text[])[r.state + 1];
    ended := r.state > 3;
    IF EXISTS (SELECT FROM job WHERE id = r.id) THEN
        RETURN false;
    END IF;
    IF r.key IS NOT NULL AND NOT ended THEN
        SELECT * INTO k FROM find_key(r.key, t);
        IF NOT FOUND THEN
            INSERT INTO key (key, holder, until) VALUES (r.key, r.seq, coalesce(r.until, 0));
        ELSIF what = 'waiting' AND k.successor IS NULL AND k.over IS NULL THEN
            UPDATE key SET successor = r.seq, until = 0, since = 0 WHERE key.key = r.key;
        ELSE
            RETURN false;
        END IF;
    END IF;
    INSERT INTO job (seq, rank, due, expires, timeout, ttr, result_ttl, line, policy, tries, attempt, losses,
                     cancelling, id, key, error, trail, envelope, linked, inputs, lane, cost, backoff, body)
    VALUES (r.seq, r.rank, r.due, r.expires, r.timeout, r.ttr, r.result_ttl, r.line, r.policy,
            r.tries, r.attempt, r.losses, r.cancelling, r.id, r.key,
            CASE WHEN ended THEN '' ELSE r.error END, nullif(r.trail, 'null'), envelope,
            r.linked, r.inputs, r.lane, r.cost, r.backoff, r.body);
    IF r.lane IS NOT NULL THEN
        PERFORM declare(r.lane, r.terms, true);
    END IF;
    IF r.waits IS NOT NULL THEN
        INSERT INTO behind (seq, id, waits, pending, failures, dropped, delay, at)
        VALUES (r.seq, r.id, r.waits, r.pending, r.failures, r.dropped, r.delay, r.at);
    END IF;
    INSERT INTO edge (parent, child) SELECT r.seq, child FROM unnest(r.next) AS child;
    IF r.done IS NOT NULL OR r.log <> '[]' THEN
        INSERT INTO note (seq, done, total, text, log) VALUES (r.seq, r.done, r.total, coalesce(r.text, ''), r.log);
    END IF;
    IF r.key IS NOT NULL AND what = 'succeeded' AND r.until > t
        AND NOT EXISTS (SELECT FROM find_key(r.key, t))
    THEN
        INSERT INTO key (key, holder, until, over) VALUES (r.key, r.seq, r.until, r.id);
    END IF;
    IF ended THEN
        PERFORM count(r.line, what);
        what := CASE WHEN is_purged(r.error) THEN 'failed' ELSE what END;  -- kept as long as failed
        INSERT INTO done (seq, prune, finished, class, state, error, result)
        VALUES (r.seq, CASE WHEN r.linked THEN t + p.protect ELSE least(r.finished, t)
                       + keep_for(what, r.result_ttl, answer IS NOT NULL, p) END,
                r.finished,
                CASE WHEN r.linked THEN 3 WHEN what = 'failed' THEN 2
                     WHEN what = 'succeeded' AND answer IS NULL THEN 0 ELSE 1 END,
                r.state, r.error, answer);
        IF what <> 'failed' AND NOT r.linked THEN
            PERFORM count(r.line, 'kept');
        END IF;
        RETURN true;
    END IF;
    IF r.expires > 0 THEN
        INSERT INTO expiry (seq, due) VALUES (r.seq, r.expires);
    END IF;
    IF what = 'waiting' THEN
        INSERT INTO later (seq, due, waiting) VALUES (r.seq, r.due, true);
        PERFORM count(r.line, 'waiting');
    ELSE
        PERFORM place(r.seq, t);
    END IF;
    RETURN true;
END $$;
