-- Direct hand-off. Without it, a put commits and wakes an owner, which leases the job in a second
-- commit. With it, a put of one job leases the job in its own transaction. The lease goes to an
-- owner that sleeps for such jobs. The notification brings the lease: the owner wakes and starts
-- the job, and asks nobody.
--
-- The token stays in "pulse.handed" until a step of the owner confirms it. The next step with a
-- want brings the leases that the owner has not confirmed. A notification names the owner's turn.
-- The notification is valid only until the owner begins another step, since that step may bring the
-- same lease. An owner gets one job by hand-off and then counts as awake. So later jobs wait in
-- order until the owner has looked.

-- The hand-off does not wait for the disk. The put commits without a sync and notifies the owner.
-- Then it waits until all is on disk, and answers. If the server dies in between, the job has begun
-- but was never accepted. A crash before a verdict is stored is similar: work was done without a
-- record. But no other job may get the lost number: the verdict of the first job would settle the
-- other job. So after a crash, the first call skips more numbers than the server can have lost.

CREATE OR REPLACE FUNCTION tidemill.come_back() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock('uptime'::regclass::oid::int, 0);
    IF NOT EXISTS (SELECT FROM uptime) THEN
        PERFORM setval('acceptance', last_number() + 10000000);
        INSERT INTO uptime VALUES (extract(epoch FROM clock_timestamp()));
    END IF;
END $$;

-- Wait until all that was committed is on disk.
CREATE OR REPLACE FUNCTION tidemill.flush() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_logical_emit_message(true, 'tidemill', '');
END $$;

-- Put one job without a key or a limit, for a queue without a bound or a limit. If "stored" is
-- NULL, use put_jobs. "place" and "word" are the channel and the text of the notification to send
-- after the commit.
CREATE OR REPLACE FUNCTION tidemill.put_single(
    new_jobs tidemill.batch, p tidemill.prefs,
    OUT stored boolean, OUT place text, OUT word text)
LANGUAGE plpgsql
SET search_path = tidemill, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    t float8 := clock(p);
    q record;
    g record;
    o record;
    n bigint;
BEGIN
    IF NOT EXISTS (SELECT FROM uptime) THEN
        RETURN;
    END IF;
    PERFORM check_here();
    SELECT * INTO g FROM jsonb_to_record(new_jobs.shapes -> 0) AS s (
        line int, rank bigint, delay float8, at float8, expires float8, timeout float8, ttr float8,
        result_ttl float8, tries int, key text, linked boolean, lane text,
        backoff float8[], body int[]);
    SELECT max_size, paused, gated INTO q FROM queue WHERE number = g.line / 4;
    IF q.max_size > 0 OR q.gated OR g.key IS NOT NULL OR g.linked OR g.lane IS NOT NULL THEN
        RETURN;
    END IF;
    IF g.line & 3 <> 0 OR g.delay > 0 OR g.at > t OR g.expires > 0 OR q.paused THEN
        PERFORM put_plain(new_jobs, t);
        stored := true;
        RETURN;
    END IF;
    o := sleeper_for(g.line, t, p);
    IF o.number IS NULL THEN
        PERFORM put_plain(new_jobs, t);
        stored := true;
        RETURN;
    END IF;
    n := nextval('acceptance');
    WITH new AS (
        INSERT INTO job (seq, rank, due, expires, timeout, ttr, result_ttl, line, policy, tries, id,
                         envelope, backoff, body)
        VALUES (n, g.rank, g.at, 0, g.timeout, g.ttr, g.result_ttl, g.line, g.tries, g.tries, new_jobs.ids[1],
                new_jobs.envelopes[1], g.backoff, g.body)
        ON CONFLICT (id) DO NOTHING RETURNING seq
    ), lent AS (
        INSERT INTO lease (seq, token, serial, leased, result_ttl, owner, line, attempt, keyed)
        SELECT seq, seq << 16, -1, t, g.result_ttl, o.number, g.line, 1, false FROM new
    ), handed AS (
        UPDATE pulse SET asleep = false, room = 0, handed = handed || (seq << 16) FROM new
        WHERE owner = o.number
    ), counted AS (
        INSERT INTO tally (queue, accepted, running) SELECT g.line / 4, 1, 1 FROM new
    )
    SELECT true INTO stored FROM new;
    IF stored IS NULL THEN
        PERFORM refuse_id(new_jobs.ids[1]);
    END IF;
    place := o.channel;
    word := format('%s:%s:%s', o.number, o.turn, translate(encode(
        pack(n << 16, 1, 0, g.rank, n, g.timeout, t, 0, new_jobs.envelopes[1], NULL), 'base64'), E'\n', ''));
    IF length(word) > 7900 THEN  -- a notification has 8000 bytes
        word := o.number::text;
    END IF;
END $$;

-- Find an owner that sleeps for jobs of a line. Find none if another ready job may come before the
-- new job.
CREATE OR REPLACE FUNCTION tidemill.sleeper_for(
    l int, t float8, p tidemill.prefs, OUT number int, OUT turn bigint, OUT channel text)
LANGUAGE plpgsql AS $$
DECLARE
    wanted int[];
BEGIN
    -- An owner in a step holds the lock of its pulse, and is not asleep. An owner whose lease is not
    -- renewed in time is not reliable.
    SELECT pulse.owner, pulse.turn, owner.channel, pulse.queues
    INTO number, turn, channel, wanted
    FROM pulse JOIN owner ON owner.number = pulse.owner
    WHERE pulse.room > 0 AND pulse.asleep AND (pulse.queues IS NULL OR l / 4 = ANY (pulse.queues))
      AND pulse.until > t + 0.6 * p.lease AND owner.channel <> ''
    ORDER BY random() LIMIT 1 FOR UPDATE OF pulse SKIP LOCKED;
    IF number IS NOT NULL AND cardinality(lines_for(wanted, '{0,2}', t, is_limited())) > 0 THEN
        number := NULL;  -- another ready job may come first
    END IF;
END $$;

-- Fetch the handed leases that an owner did not hear of: as many as it still wants, packed. The others go back
-- without counting an attempt.
CREATE OR REPLACE FUNCTION tidemill.fetch_handed(
    me int, my_name text, this bigint, tokens bigint[], room int, t float8, p tidemill.prefs,
    OUT got int, OUT leases bytea)
LANGUAGE plpgsql AS $$
DECLARE
    l lease;
BEGIN
    got := 0;
    leases := '';
    FOR l IN
        SELECT * FROM lease WHERE seq = ANY (ARRAY (SELECT x >> 16 FROM unnest(tokens) AS x))
                              AND owner = me AND token = ANY (tokens)
        ORDER BY seq FOR UPDATE
    LOOP
        IF got < room AND NOT (SELECT cancelling FROM job WHERE job.seq = l.seq) THEN
            UPDATE lease SET serial = this WHERE seq = l.seq;
            leases := leases || (
                SELECT pack(l.token, l.attempt, losses, rank, seq, timeout, l.leased, 0, envelope, NULL)
                FROM job WHERE seq = l.seq);
            got := got + 1;
        ELSE
            PERFORM close_attempt(l, my_name, release_of(l.token, 'cancelled before it started', 0), t, p);
        END IF;
    END LOOP;
END $$;
