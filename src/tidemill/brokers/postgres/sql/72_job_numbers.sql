-- Calls for protocols that name jobs by number: drawing numbers, and leasing jobs by their ids.

-- Draw this many numbers, which nobody else gets; return the last.
CREATE OR REPLACE FUNCTION tidemill.numbers(many bigint) RETURNS bigint
LANGUAGE sql SET search_path = tidemill, pg_temp AS $$
    UPDATE numbered SET last = last + many RETURNING last
$$;

-- Lease these jobs to a consumer, if they are ready or can be made ready. Returns base64 of each
-- lease, or NULL.
CREATE OR REPLACE FUNCTION tidemill.lease_named(me int, ids text[], p tidemill.prefs) RETURNS text[]
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
DECLARE
    leases text[] := '{}';
    which  bigint;
    t      float8 := clock(p);
    seqs   bigint[] := seqs_of(ids);
    seen   bigint[] := end_by_time(t);
BEGIN
    PERFORM check_here();
    PERFORM lock_acts(ids, seqs, seen);
    PERFORM come_due(seen, t, p);
    FOREACH which IN ARRAY seqs LOOP
        leases := leases || CASE WHEN EXISTS (SELECT FROM pulse WHERE owner = me)
                            THEN encode(lease_one(which, me, t, p), 'base64') END;
    END LOOP;
    RETURN leases;
END $$;

CREATE OR REPLACE FUNCTION tidemill.lease_one(which bigint, me int, t float8, p tidemill.prefs)
RETURNS bytea
LANGUAGE plpgsql AS $$
DECLARE
    j     job;
    token bigint;
    ttr   float8;
    gates text[];
BEGIN
    SELECT * INTO j FROM job WHERE seq = which;
    IF NOT FOUND OR j.lane IS NOT NULL THEN
        RETURN NULL;
    END IF;
    IF EXISTS (SELECT FROM later WHERE seq = which AND NOT waiting)
        OR EXISTS (SELECT FROM done WHERE seq = which AND state = 5) THEN
        PERFORM retry_one(which, false, 0, t, p);
        SELECT * INTO STRICT j FROM job WHERE seq = which;
    END IF;
    DELETE FROM ready WHERE line = j.line AND rank = j.rank AND seq = which;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    PERFORM count(j.line, 'ready', -1);
    IF j.expires > 0 AND j.expires <= t THEN
        PERFORM finish(which, 'expired', 'not started before it expired', NULL, t, p);
        PERFORM flow(ARRAY[which], t, p);
        RETURN NULL;
    END IF;
    gates := try_gates(ARRAY (SELECT 'q' || number FROM queue WHERE gated AND number = j.line / 4));
    PERFORM fold_gates(gates, floor(t * 1e6));
    PERFORM start_queues(gates, ARRAY[j.line], floor(t * 1e6));
    token := (which << 16) | (j.returns & 65535);
    ttr := CASE WHEN j.ttr > 0 THEN j.ttr ELSE 60 END;  -- the lease belongs to no step: its serial is 0
    INSERT INTO lease (seq, token, serial, leased, deadline, result_ttl, owner, line, attempt, keyed, linked)
    VALUES (which, token, 0, t, t + ttr, j.result_ttl, me, j.line, j.attempt + 1, j.key IS NOT NULL, j.linked);
    PERFORM count(j.line, 'running');
    PERFORM renew_gates(gates, floor(t * 1e6));
    RETURN pack(token, j.attempt + 1, j.losses, j.rank, which, j.timeout, t, ttr, j.envelope, j.inputs);
END $$;

-- Change the rank of a leased job, which stands on no line.
CREATE OR REPLACE FUNCTION tidemill.set_rank(me int, which bigint, new bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM lease WHERE seq = which >> 16 AND token = which AND owner = me FOR UPDATE;
    IF FOUND THEN
        UPDATE job SET rank = new WHERE seq = which >> 16;
    END IF;
END $$;
