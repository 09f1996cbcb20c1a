-- Accepting jobs one at a time, where a key may be held or a queue may be full.

-- Accept one job, whose key another job may hold. A follower is accepted even when the queue is full.
CREATE OR REPLACE FUNCTION tidemill.put_one(
    g tidemill.given, limited boolean, t float8, p tidemill.prefs) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
    k       key;
    held    boolean := false;
    how     text := 'created';
    answer  jsonb;
    start   float8 := CASE WHEN g.delay > 0 THEN t + g.delay ELSE g.at END;
    began   float8 := 0;
    new_seq bigint;
BEGIN
    IF g.key IS NOT NULL THEN
        SELECT * INTO k FROM find_key(g.key, t);
        held := FOUND;
    END IF;
    IF held AND g.conflict = 'reject' THEN
        RAISE EXCEPTION USING ERRCODE = 'TM001', MESSAGE = 'key', DETAIL = g.key, HINT = g.id;
    END IF;
    IF EXISTS (SELECT FROM job WHERE id = g.id) THEN
        PERFORM refuse_id(g.id);
    END IF;
    IF held THEN
        answer := yield_to(g, k, start, t);
        IF answer IS NOT NULL THEN
            RETURN answer;
        END IF;
        how := replace_holder(g.id, k, t, p);
    END IF;
    IF g.key IS NOT NULL AND g.max_wait > 0 THEN
        IF held AND (k.successor IS NOT NULL OR how = 'replaced') THEN
            began := k.since;
        END IF;
        began := CASE WHEN began > 0 THEN began ELSE t END;
        IF start > greatest(t, began + g.max_wait) THEN
            start := CASE WHEN began + g.max_wait > t THEN began + g.max_wait ELSE 0 END;
        END IF;
    END IF;
    IF limited AND g.waits IS NULL THEN
        PERFORM check_space(g.line / 4);
    END IF;
    INSERT INTO job (seq, rank, due, expires, timeout, ttr, result_ttl, line, policy, tries, id, key,
                     envelope, linked, inputs, lane, cost, backoff, body)
    VALUES (nextval('acceptance'), g.rank, start,
            CASE WHEN g.expires > 0 THEN t + g.expires ELSE 0 END, g.timeout, g.ttr, g.result_ttl,
            g.line, g.tries, g.tries, g.id, g.key, g.envelope, coalesce(g.linked, false), g.inputs,
            g.lane, g.cost, g.backoff, g.body)
    ON CONFLICT (id) DO NOTHING
    RETURNING seq INTO new_seq;
    IF NOT FOUND THEN
        PERFORM refuse_id(g.id);
    END IF;
    PERFORM place_new(g, new_seq, how = 'successor', start, began, t);
    RETURN jsonb_build_array(how, g.id);
END $$;

-- The answer for a new job that leaves its key to the holder. NULL when the new job replaces the
-- holder.
CREATE OR REPLACE FUNCTION tidemill.yield_to(
    g tidemill.given, k tidemill.key, start float8, t float8) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
    stood text;
BEGIN
    IF k.over IS NOT NULL THEN
        RETURN jsonb_build_array('kept', k.over);
    END IF;
    IF g.conflict = 'merge' THEN
        stood := unplace(k.holder, false);
        IF stood <> 'running' THEN
            PERFORM merge(k.holder, stood, g.rank, start, t);
            RETURN jsonb_build_array('merged', (SELECT id FROM job WHERE seq = k.holder));
        END IF;
    END IF;
    IF g.conflict <> 'replace' THEN
        RETURN jsonb_build_array('kept', (SELECT id FROM job WHERE seq = k.holder));
    END IF;
    RETURN NULL;
END $$;

-- End the holder of a key, and its successor. A running holder stays: then the new job becomes its successor.
CREATE OR REPLACE FUNCTION tidemill.replace_holder(
    new_id text, k tidemill.key, t float8, p tidemill.prefs) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    stood text := unplace(k.holder, false);
BEGIN
    IF k.successor IS NOT NULL THEN  -- end the successor first: it must not be promoted
        PERFORM unplace(k.successor, false);
        PERFORM finish(k.successor, 'cancelled', 'replaced by ' || new_id, NULL, t, p);
    END IF;
    IF stood = 'running' THEN
        RETURN 'successor';
    END IF;
    PERFORM finish(k.holder, 'cancelled', 'replaced by ' || new_id, NULL, t, p);
    RETURN 'replaced';
END $$;

-- Refuse a job for a full queue.
CREATE OR REPLACE FUNCTION tidemill.check_space(which int) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    most bigint;
BEGIN
    SELECT max_size INTO most FROM queue WHERE number = which;
    IF most > 0 AND size_of(which) >= most THEN
        RAISE EXCEPTION USING ERRCODE = 'TM002', MESSAGE = most::text,
            DETAIL = (SELECT name FROM queue WHERE number = which);
    END IF;
END $$;

-- Place a job that was just stored, with its key, limit and expiry.
CREATE OR REPLACE FUNCTION tidemill.place_new(
    g tidemill.given, new_seq bigint, succeeds boolean, start float8, began float8, t float8)
RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    ends float8 := CASE WHEN g.period > 0 THEN t + g.period ELSE 0 END;
BEGIN
    PERFORM count(g.line, 'accepted');
    IF g.lane IS NOT NULL THEN
        PERFORM declare(g.lane, g.terms, g.if_new);
    END IF;
    IF g.expires > 0 THEN
        INSERT INTO expiry (seq, due) VALUES (new_seq, t + g.expires);
    END IF;
    IF succeeds THEN
        UPDATE key SET successor = new_seq, until = ends, since = began WHERE key.key = g.key;
    END IF;
    IF succeeds OR g.waits IS NOT NULL THEN
        INSERT INTO later (seq, due, waiting) VALUES (new_seq, start, true);
        PERFORM count(g.line, 'waiting');
        RETURN;
    END IF;
    IF g.key IS NOT NULL THEN
        INSERT INTO key (key, holder, until, since) VALUES (g.key, new_seq, ends, began);
    END IF;
    PERFORM place(new_seq, t);
END $$;

-- Merge a new job into the holder by pyspider's rule: the higher priority and the earlier time win, the data stay.
CREATE OR REPLACE FUNCTION tidemill.merge(
    holder bigint, stood text, new_rank bigint, new_due float8, t float8) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE job SET rank = least(rank, new_rank),
                   due = CASE WHEN stood = 'scheduled' THEN least(due, new_due) ELSE due END
    WHERE seq = holder;
    PERFORM place(holder, t);
END $$;
