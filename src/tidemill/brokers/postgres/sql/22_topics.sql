-- Topics: bindings of queues, and publishing. A publish names the version of the bindings from
-- which its caller made the copies of the message. A publish and a change of bindings exclude each
-- other by a lock; publishes share the lock. Each transaction takes this lock right after the lock
-- of check_here. A publish in the caller's transaction takes no such lock, since that transaction
-- may stay open for long.

CREATE OR REPLACE FUNCTION tidemill.lock_bindings() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock('binding'::regclass::oid::int, 0);
END $$;

CREATE OR REPLACE FUNCTION tidemill.changed_bindings() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE binding_version SET version = gen_random_uuid()::text;
END $$;

-- Bind a queue to a pattern; false when it is bound already. A missing queue is made.
CREATE OR REPLACE FUNCTION tidemill.bind_queue(which text, topics text) RETURNS boolean
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    PERFORM check_here();
    IF EXISTS (SELECT FROM binding AS b WHERE b.queue = which AND b.pattern = topics) THEN
        RETURN false;
    END IF;
    PERFORM lock_bindings();
    INSERT INTO queue (name, listed) VALUES (which, true)
    ON CONFLICT ON CONSTRAINT queue_name_key DO UPDATE SET listed = true;
    INSERT INTO binding VALUES (which, topics) ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM changed_bindings();
    RETURN true;
END $$;

-- Delete a binding; false when there is no such binding.
CREATE OR REPLACE FUNCTION tidemill.unbind_queue(which text, topics text) RETURNS boolean
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    PERFORM check_here();
    PERFORM lock_bindings();
    DELETE FROM binding AS b WHERE b.queue = which AND b.pattern = topics;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM changed_bindings();
    RETURN true;
END $$;

-- Delete all bindings of a queue. The caller has the lock.
CREATE OR REPLACE FUNCTION tidemill.drop_bindings(which text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM binding AS b WHERE b.queue = which;
    IF FOUND THEN
        PERFORM changed_bindings();
    END IF;
END $$;

-- All bindings and their version, of one moment: [version, [[queue, pattern], …]].
CREATE OR REPLACE FUNCTION tidemill.all_bindings() RETURNS jsonb
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    RETURN (SELECT jsonb_build_array(v.version, (
                SELECT coalesce(jsonb_agg(jsonb_build_array(b.queue, b.pattern)), '[]') FROM binding AS b))
            FROM binding_version AS v);
END $$;

-- Whether the bindings have this version. They do not change before the end of the transaction.
CREATE OR REPLACE FUNCTION tidemill.bindings_have(wanted text) RETURNS boolean
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    PERFORM check_here();
    PERFORM pg_advisory_xact_lock_shared('binding'::regclass::oid::int, 0);
    RETURN EXISTS (SELECT FROM binding_version WHERE version = wanted);
END $$;

-- Put copies as put does, if the bindings have this version. Else put nothing and answer "stale". A repeated call gets
-- the answer of the first.
CREATE OR REPLACE PROCEDURE tidemill.publish(
    client text, this bigint, new_jobs tidemill.batch, wanted text, p tidemill.prefs, chores int, INOUT answer jsonb)
LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM tidemill.call AS c WHERE c.line = client AND c.serial >= this)
       AND NOT tidemill.bindings_have(wanted) THEN
        answer := '"stale"';
        RETURN;
    END IF;
    CALL tidemill.put(client, this, new_jobs, '{}', '{}', p, chores, answer);
END $$;

-- Publish inside a transaction of the caller.
CREATE OR REPLACE FUNCTION tidemill.publish_inside(new_jobs tidemill.batch, wanted text, p tidemill.prefs) RETURNS jsonb
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    PERFORM check_here();
    IF NOT EXISTS (SELECT FROM binding_version WHERE version = wanted) THEN
        RETURN '"stale"';
    END IF;
    RETURN put_inside(new_jobs, '{}', '{}', p);
END $$;
