-- Direct hand-off. Without it, a put commits and wakes an owner, which leases the job in a second
-- commit. With it, a put of one job leases the job in its own transaction. The lease goes to an
-- owner that sleeps and takes jobs of this queue. The notification brings the lease: the owner wakes and starts
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

-- Put one plain job: without a key, limit, links, delay or expiry. Before it writes anything, it passes the
-- job on to "put" if the queue has a bound or a limit, if the store departs, if the server may have lost
-- numbers, or if the put was made before.
CREATE OR REPLACE PROCEDURE tidemill.put_single(
    client text, this bigint, new_id text, new_envelope bytea, s tidemill.shape, p tidemill.prefs, chores int,
    INOUT answer jsonb)
LANGUAGE plpgsql AS $$
DECLARE
    t      float8;
    q      record;
    fresh  boolean := false;
    w      record;  -- the worker that sleeps
    worker int;     -- the worker that gets the job
    word   text;
    n      bigint;
BEGIN
    PERFORM pg_advisory_xact_lock_shared('tidemill.meta'::regclass::oid::int, 0);  -- as check_here
    t := tidemill.clock(p);
    SELECT paused, EXISTS (SELECT FROM tidemill.pulse WHERE asleep AND room > 0) AS watched INTO q
    FROM tidemill.queue WHERE number = s.line / 4 AND max_size <= 0 AND NOT gated
        AND NOT EXISTS (SELECT FROM tidemill.departure) AND EXISTS (SELECT FROM tidemill.uptime);
    IF FOUND THEN
        UPDATE tidemill.call AS c SET serial = this, seen = t, answer = NULL
        WHERE c.line = client AND c.serial < this;
        fresh := FOUND OR (tidemill.begin_call(client, this, p)).fresh;
    END IF;
    IF NOT fresh THEN
        CALL tidemill.put(client, this, ROW(ARRAY[new_id], ARRAY[new_envelope], '{0}', jsonb_build_array(
            to_jsonb(s) || '{"n": 0, "delay": 0, "at": 0, "expires": 0}'))::tidemill.batch,
            '{}', '{}', p, chores, answer);
        RETURN;
    END IF;
    INSERT INTO tidemill.job (seq, rank, due, expires, timeout, ttr, result_ttl, line, policy, tries, id,
                              envelope, backoff, body)
    VALUES (nextval('tidemill.acceptance'), s.rank, 0, 0, s.timeout, s.ttr, s.result_ttl, s.line, s.tries,
            s.tries, new_id, new_envelope, s.backoff, s.body)
    ON CONFLICT (id) DO NOTHING RETURNING seq INTO n;
    IF n IS NULL THEN
        PERFORM tidemill.refuse_id(new_id);
    END IF;
    IF q.watched AND s.line & 3 = 0 AND NOT q.paused THEN
        -- No statement behind this lock waits for another transaction: the owner's next step waits for the lock.
        -- An owner whose lease is not renewed in time is not reliable.
        SELECT pulse.owner, pulse.turn, owner.channel,
               (EXISTS (SELECT FROM tidemill.ready) OR EXISTS (SELECT FROM tidemill.stand))
               AND tidemill.others_start(pulse.queues, t) AS others
        INTO w
        FROM tidemill.pulse JOIN tidemill.owner ON owner.number = pulse.owner
        WHERE room > 0 AND asleep AND (queues IS NULL OR s.line / 4 = ANY (queues))
            AND until > t + 0.6 * p.lease AND owner.channel <> ''
        ORDER BY random() LIMIT 1 FOR UPDATE OF pulse SKIP LOCKED;
        IF NOT w.others THEN
            worker := w.owner;
        END IF;
    END IF;
    IF worker IS NULL THEN
        INSERT INTO tidemill.ready (line, rank, seq) VALUES (s.line, s.rank, n);
        INSERT INTO tidemill.tally (queue, accepted, ready) VALUES (s.line / 4, 1, 1);
        COMMIT;
        IF EXISTS (SELECT FROM tidemill.pulse WHERE asleep) THEN
            PERFORM set_config('synchronous_commit', 'off', true);
            PERFORM tidemill.ring(0, false, '{}', p);
        END IF;
    ELSE
        INSERT INTO tidemill.lease (seq, token, serial, leased, result_ttl, owner, line, attempt, keyed)
        VALUES (n, n << 16, -1, t, s.result_ttl, worker, s.line, 1, false);
        UPDATE tidemill.pulse SET asleep = false, room = 0, handed = handed || (n << 16) WHERE owner = worker;
        INSERT INTO tidemill.tally (queue, accepted, running) VALUES (s.line / 4, 1, 1);
        word := format('%s:%s:%s', worker, w.turn, translate(encode(tidemill.pack(
            n << 16, 1, 0, s.rank, n, s.timeout, t, 0, new_envelope, NULL), 'base64'), E'\n', ''));
        IF length(word) > 7900 THEN  -- a notification has 8000 bytes
            word := worker::text;
        END IF;
        PERFORM pg_notify(w.channel, word), set_config('synchronous_commit', 'off', true);
        COMMIT;
        PERFORM tidemill.flush();
    END IF;
    IF chores > 0 THEN
        COMMIT;
        PERFORM set_config('synchronous_commit', 'off', true);
        PERFORM tidemill.do_chores(chores, p);
    END IF;
END $$;

-- Whether a ready job, which comes first, may start on an owner that wants these queues.
CREATE OR REPLACE FUNCTION tidemill.others_start(wanted int[], t float8) RETURNS boolean
LANGUAGE plpgsql SET search_path = tidemill, pg_temp SET enable_seqscan = off AS $$
BEGIN
    RETURN cardinality(lines_for(wanted, '{0,2}', t, is_limited())) > 0;
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
