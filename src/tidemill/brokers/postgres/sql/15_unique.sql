-- Keys. An unfinished job holds its key, perhaps with a successor; a job that succeeded may hold it for a time.

-- Admit one transaction at a time per key. Else another transaction could commit meanwhile, and the
-- answer whether the key is held would be wrong.
CREATE OR REPLACE FUNCTION tidemill.lock_key(name text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock('key'::regclass::oid::int, hashtext(name));
END $$;

-- Lock the keys of some jobs, and other keys, in the order that all transactions use. Keys come
-- before rows of "behind" and before leases: a transaction with locked keys may wait for such rows.
CREATE OR REPLACE FUNCTION tidemill.lock_keys(jobs bigint[], names text[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock('key'::regclass::oid::int, h) FROM (
        SELECT DISTINCT hashtext(name) AS h FROM (
            SELECT n AS name FROM unnest(names) AS n UNION ALL
            SELECT job.key FROM unnest(jobs) AS j CROSS JOIN LATERAL (
                SELECT key FROM job WHERE job.seq = j OFFSET 0) AS job) AS x
        WHERE name IS NOT NULL ORDER BY h) AS ordered;
END $$;

-- The keys of jobs to put.
CREATE OR REPLACE FUNCTION tidemill.keys_of(shapes jsonb) RETURNS text[]
LANGUAGE plpgsql AS $$ BEGIN RETURN ARRAY (SELECT s ->> 'key' FROM jsonb_array_elements(shapes) AS s); END $$;

-- Lock a key and return its row; no row when the key is free.
CREATE OR REPLACE FUNCTION tidemill.find_key(name text, t float8) RETURNS SETOF tidemill.key
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM lock_key(name);
    DELETE FROM key AS k WHERE k.key = name AND k.over IS NOT NULL AND k.until <= t;
    RETURN QUERY SELECT * FROM key AS k WHERE k.key = name;
END $$;

-- Let a job that succeeded hold its key until its period ends. False when the job does not hold the key.
CREATE OR REPLACE FUNCTION tidemill.hold_key(name text, job_seq bigint, job_id text, t float8)
RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM lock_key(name);
    UPDATE key SET over = job_id
    WHERE key = name AND holder = job_seq AND successor IS NULL AND until > t;
    RETURN FOUND;
END $$;

-- Take a key from its job, and give the key to the job's successor.
CREATE OR REPLACE FUNCTION tidemill.give_up_key(name text, job_seq bigint, t float8) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    k record;
BEGIN
    PERFORM lock_key(name);
    SELECT holder, successor INTO k FROM key WHERE key = name;
    IF k.successor = job_seq THEN
        UPDATE key SET successor = NULL, until = 0, since = 0 WHERE key = name;
    ELSIF k.holder = job_seq AND k.successor IS NULL THEN
        DELETE FROM key WHERE key = name;
    ELSIF k.holder = job_seq THEN
        UPDATE key SET holder = successor, successor = NULL WHERE key = name;
        IF unplace(k.successor, false) = 'waiting' THEN
            PERFORM place(k.successor, t);
        END IF;
    END IF;
END $$;

-- Forget the keys of jobs that succeeded, once their period is over. No wake-up is needed: find_key
-- checks the time.
CREATE OR REPLACE FUNCTION tidemill.sweep_keys(most int, t float8) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
    swept int;
BEGIN
    IF is_sealed() THEN
        RETURN 0;
    END IF;
    DELETE FROM key WHERE ctid = ANY (ARRAY (
        SELECT ctid FROM key WHERE over IS NOT NULL AND until <= t
        ORDER BY until LIMIT most FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS swept = ROW_COUNT;
    RETURN swept;
END $$;
