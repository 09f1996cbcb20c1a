-- Schedules: records that come due, are handed out, and change by compare-and-set. An owner claims a schedule
-- for a second; then another owner gets it, if it has not changed. A lost claim costs only repeated work.

-- When the next schedule is to be handed out; NULL when no schedule will be.
CREATE OR REPLACE FUNCTION tidemill.next_firing() RETURNS float8
LANGUAGE plpgsql AS $$ BEGIN RETURN (SELECT next FROM schedule WHERE next IS NOT NULL ORDER BY next LIMIT 1); END $$;

-- Hand out due schedules, up to "most". "wait" is the seconds until the next is due.
DROP FUNCTION IF EXISTS tidemill.hand_out(int, tidemill.prefs); -- its results may have changed
CREATE FUNCTION tidemill.hand_out(
    most int, p tidemill.prefs,
    OUT names text[], OUT versions bigint[], OUT dues float8[], OUT bodies bytea[], OUT wait float8)
LANGUAGE plpgsql SET search_path = tidemill, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    t float8 := clock(p);
BEGIN
    IF EXISTS (SELECT FROM departure) THEN
        RETURN;
    END IF;
    -- A claim may be lost: its commit need not wait for the disk.
    PERFORM set_config('synchronous_commit', 'off', true);
    WITH mine AS MATERIALIZED (
        SELECT name FROM schedule WHERE next <= t ORDER BY next LIMIT most FOR UPDATE SKIP LOCKED
    ), claimed AS (
        UPDATE schedule SET next = t + 1 FROM mine WHERE schedule.name = mine.name
        RETURNING schedule.name, version, due, body
    )
    SELECT array_agg(name ORDER BY due, version), array_agg(version ORDER BY due, version),
           array_agg(due ORDER BY due, version), array_agg(body ORDER BY due, version)
    INTO names, versions, dues, bodies FROM claimed;
    wait := next_firing() - t;
END $$;

-- Change one record, if it still has the expected version. "sooner": the record comes due earlier than before.
CREATE OR REPLACE FUNCTION tidemill.change_one(
    which text, expect bigint, new_due float8, new_body bytea, gone boolean,
    OUT done boolean, OUT new_version bigint, OUT sooner boolean)
LANGUAGE plpgsql AS $$
DECLARE
    was float8 := 0;
BEGIN
    new_version := 0;
    sooner := false;
    IF expect = 0 AND NOT gone THEN
        INSERT INTO schedule (name, version, due, next, body)
        VALUES (which, nextval('acceptance'), new_due, nullif(new_due, 0), new_body)
        ON CONFLICT DO NOTHING RETURNING version INTO new_version;
        done := FOUND;
    ELSE
        SELECT due INTO was FROM schedule WHERE name = which AND version = expect FOR UPDATE;
        done := FOUND OR (expect = 0 AND NOT EXISTS (SELECT FROM schedule WHERE name = which));
        IF done AND gone THEN
            DELETE FROM schedule WHERE name = which;
        ELSIF done THEN
            UPDATE schedule SET version = nextval('acceptance'), due = new_due,
                                next = nullif(new_due, 0), body = new_body
            WHERE name = which RETURNING version INTO new_version;
        END IF;
    END IF;
    new_version := coalesce(new_version, 0);
    sooner := done AND NOT gone AND new_due > 0 AND (was = 0 OR new_due < was);
END $$;

-- Put a schedule's job, or say why it is left out.
CREATE OR REPLACE FUNCTION tidemill.put_if_it_fits(
    g tidemill.given, t float8, p tidemill.prefs) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    held boolean := false;
    most bigint;
BEGIN
    IF EXISTS (SELECT FROM job WHERE id = g.id) THEN
        RETURN 'id';
    END IF;
    IF g.key IS NOT NULL THEN
        held := EXISTS (SELECT FROM find_key(g.key, t));
    END IF;
    IF held AND g.conflict = 'reject' THEN
        RETURN 'key';
    END IF;
    SELECT max_size INTO most FROM queue WHERE number = g.line / 4;
    IF NOT held AND most > 0 AND size_of(g.line / 4) >= most THEN
        RETURN 'full';
    END IF;
    RETURN CASE WHEN put_one(g, false, t, p) ->> 0 IN ('kept', 'merged') THEN 'key' END;
END $$;

-- Put the jobs of the changes that were made; "owners" has the number of each job's change. The answer tells
-- for each change why jobs were left out.
CREATE OR REPLACE FUNCTION tidemill.put_fired(
    new_jobs tidemill.batch, owners int[], made boolean[], p tidemill.prefs) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
    t        float8 := clock(p);
    ids      text[] := new_jobs.ids;
    shapes   jsonb := new_jobs.shapes;
    chosen   int[];
    seen     bigint[];
    left_out jsonb := '{}';
    plain    boolean := true;
    one      record;
    g        given;
    why      text;
    which    text;
BEGIN
    chosen := ARRAY (SELECT n FROM generate_series(1, cardinality(ids)) AS n WHERE made[owners[n]] ORDER BY n);
    IF cardinality(chosen) = 0 THEN
        RETURN left_out;
    END IF;
    -- As in put_jobs: only one transaction fills a bounded queue at a time.
    FOR one IN
        SELECT number FROM queue
        WHERE number IN (SELECT (s ->> 'line')::int / 4 FROM jsonb_array_elements(shapes) AS s)
          AND max_size > 0
        ORDER BY number
    LOOP
        PERFORM pg_advisory_xact_lock('queue'::regclass::oid::int, one.number);
        plain := false;
    END LOOP;
    plain := plain AND NOT jsonb_path_exists(shapes, '$[*].key')
             AND NOT EXISTS (SELECT FROM job WHERE id = ANY (ids))
             AND cardinality(ids) = (SELECT count(DISTINCT id) FROM unnest(ids) AS u (id));
    IF plain THEN
        PERFORM put_plain(ROW(
            ARRAY (SELECT ids[n] FROM unnest(chosen) WITH ORDINALITY AS c (n, o) ORDER BY o),
            ARRAY (SELECT new_jobs.envelopes[n] FROM unnest(chosen) WITH ORDINALITY AS c (n, o) ORDER BY o),
            ARRAY (SELECT new_jobs.shape[n] FROM unnest(chosen) WITH ORDINALITY AS c (n, o) ORDER BY o),
            shapes)::batch, t);
        IF jsonb_path_exists(shapes, '$[*].lane') THEN
            PERFORM park_new(ARRAY (SELECT ids[n] FROM unnest(chosen) AS n), shapes);
        END IF;
        RETURN left_out;
    END IF;
    seen := end_by_time(t);
    PERFORM lock_keys(seen, keys_of(shapes));
    PERFORM come_due(seen, t, p);  -- an expired job must not keep another job out
    FOR g IN SELECT * FROM unpack(new_jobs) ORDER BY ord LOOP
        CONTINUE WHEN NOT g.ord = ANY (chosen);
        why := put_if_it_fits(g, t, p);
        IF why IS NOT NULL THEN
            which := owners[g.ord]::text;
            left_out := jsonb_set(left_out, ARRAY[which], coalesce(left_out -> which, '[]') || to_jsonb(why));
        END IF;
    END LOOP;
    RETURN left_out;
END $$;

-- Change the records that still have the expected version. The caller makes sure that no change
-- makes a record, and that no name comes twice.
CREATE OR REPLACE FUNCTION tidemill.change_known(
    names text[], expects bigint[], dues float8[], bodies bytea[], gone bigint[],
    OUT made boolean[], OUT versions bigint[], OUT sooner boolean)
LANGUAGE plpgsql AS $$
BEGIN
    WITH c AS MATERIALIZED (
        SELECT s.name, s.due AS was, c.due, c.body, c.gone, c.n
        FROM unnest(names, expects, dues, bodies, gone) WITH ORDINALITY
             AS c (name, expect, due, body, gone, n)
             JOIN schedule AS s ON s.name = c.name AND s.version = c.expect
        FOR UPDATE OF s
    ), struck AS (
        DELETE FROM schedule AS s USING c WHERE s.name = c.name AND c.gone = 1
        RETURNING c.n, 0::bigint AS version, false AS sooner
    ), changed AS (
        UPDATE schedule AS s
        SET version = nextval('acceptance'), due = c.due, next = nullif(c.due, 0), body = c.body
        FROM c WHERE s.name = c.name AND c.gone = 0
        RETURNING c.n, s.version, c.due > 0 AND (c.was = 0 OR c.due < c.was) AS sooner
    ), did AS (
        SELECT * FROM struck UNION ALL SELECT * FROM changed
    )
    SELECT array_agg(did.n IS NOT NULL ORDER BY n), array_agg(coalesce(did.version, 0) ORDER BY n),
           coalesce(bool_or(did.sooner), false)
    INTO made, versions, sooner
    FROM generate_series(1, cardinality(names)) AS n LEFT JOIN did USING (n);
END $$;

-- Give a record its other due time and body, since all its jobs were left out.
CREATE OR REPLACE FUNCTION tidemill.change_instead(
    which text, new_due float8, new_body bytea, OUT new_version bigint)
LANGUAGE sql AS $$
    INSERT INTO tidemill.schedule AS s (name, version, due, next, body)
    VALUES (which, nextval('tidemill.acceptance'), new_due, nullif(new_due, 0), new_body)
    ON CONFLICT (name) DO UPDATE
    SET version = excluded.version, due = excluded.due, next = excluded.next, body = excluded.body
    RETURNING s.version;
$$;

-- Change records and put their jobs; each change succeeds or fails by itself. The answer has for
-- each change: done, the new version, why jobs were left out. "sooner" says that owners must wake
-- sooner.
CREATE OR REPLACE FUNCTION tidemill.change_all(
    changes tidemill.schedule_changes, new_jobs tidemill.batch, p tidemill.prefs,
    OUT answer jsonb, OUT sooner boolean)
LANGUAGE plpgsql SET search_path = tidemill, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    names    text[] := changes.names;
    c        record;
    made     boolean[] := '{}';
    versions bigint[] := '{}';
    left_out jsonb := '{}';
    which    text;
    whys     jsonb;
BEGIN
    sooner := false;
    PERFORM check_here();
    -- One transaction at a time: two changes of the same names in different orders would deadlock.
    PERFORM pg_advisory_xact_lock('schedule'::regclass::oid::int, 0);
    IF 0 = ANY (changes.expects)
       OR cardinality(names) > (SELECT count(DISTINCT name) FROM unnest(names) AS u (name))
    THEN
        FOR n IN 1..cardinality(names) LOOP
            c := change_one(names[n], changes.expects[n], changes.dues[n], changes.bodies[n],
                            changes.gone[n] = 1);
            made := made || c.done;
            versions := versions || c.new_version;
            sooner := sooner OR c.sooner;
        END LOOP;
    ELSE
        SELECT * INTO made, versions, sooner
        FROM change_known(names, changes.expects, changes.dues, changes.bodies, changes.gone);
    END IF;
    IF cardinality(new_jobs.ids) > 0 THEN
        left_out := put_fired(new_jobs, changes.owners, made, p);
    END IF;
    FOR which, whys IN SELECT * FROM jsonb_each(left_out) LOOP
        IF changes.bodies_instead[which::int] <> ''
           AND jsonb_array_length(whys) = (SELECT count(*) FROM unnest(changes.owners) AS o WHERE o = which::int)
        THEN
            versions[which::int] := change_instead(
                names[which::int], changes.dues_instead[which::int], changes.bodies_instead[which::int]);
        END IF;
    END LOOP;
    answer := (
        SELECT jsonb_agg(jsonb_build_array(made[n], versions[n], coalesce(left_out -> n::text, '[]'))
                         ORDER BY n)
        FROM generate_series(1, cardinality(names)) AS n);
END $$;

-- Wake the owners that fire schedules, to look again.
CREATE OR REPLACE FUNCTION tidemill.fire_sooner() RETURNS void
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    PERFORM pg_notify(channel, number::text) FROM owner WHERE kind <> 'consumer' AND channel <> '';
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'nobody was told of schedules: %', SQLERRM;
END $$;

-- One call: commit the changes, then wake sleeping owners, as after a put.
CREATE OR REPLACE PROCEDURE tidemill.change_schedules(
    client text, this bigint, changes tidemill.schedule_changes, new_jobs tidemill.batch,
    p tidemill.prefs, INOUT answer jsonb)
LANGUAGE plpgsql AS $$
DECLARE
    first record;
    did   record;
BEGIN
    first := tidemill.begin_call(client, this, p);
    IF NOT first.fresh THEN  -- this call was done before
        answer := first.told;
        COMMIT;
        PERFORM tidemill.ring_again(p);
        PERFORM tidemill.fire_sooner();
        RETURN;
    END IF;
    did := tidemill.change_all(changes, new_jobs, p);
    answer := tidemill.end_call(client, did.answer);
    COMMIT;
    IF EXISTS (SELECT FROM tidemill.inbox) OR EXISTS (SELECT FROM tidemill.said) THEN
        CALL tidemill.open_gates(p);
    END IF;
    PERFORM set_config('synchronous_commit', 'off', true);
    IF did.sooner THEN
        PERFORM tidemill.fire_sooner();
    END IF;
    IF cardinality(new_jobs.ids) > 0 THEN
        PERFORM tidemill.ring(0, true, '{}', p);
    END IF;
END $$;

-- Take in jobs and schedules of a departed store: see 75_transfer.sql.
CREATE OR REPLACE FUNCTION tidemill.adopt_all(
    which text, last bigint, reached text, records jsonb, envelopes bytea[], results bytea[],
    names text[], dues float8[], bodies bytea[], p tidemill.prefs) RETURNS boolean[]
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    RETURN adopt(which, last, reached, records, envelopes, results, p)
        || adopt_schedules(names, dues, bodies);
END $$;

CREATE OR REPLACE FUNCTION tidemill.adopt_schedules(names text[], dues float8[], bodies bytea[])
RETURNS boolean[]
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
DECLARE
    taken boolean[] := '{}';
BEGIN
    PERFORM pg_advisory_xact_lock('schedule'::regclass::oid::int, 0);
    FOR n IN 1..cardinality(names) LOOP
        taken := taken || (SELECT done FROM change_one(names[n], 0, dues[n], bodies[n], false));
    END LOOP;
    RETURN taken;
END $$;
