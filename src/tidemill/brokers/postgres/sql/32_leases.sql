-- Leases: renewal by their owner, and return for an owner that is gone.

-- Start a lease's ttr anew. False when the lease was lost.
CREATE OR REPLACE FUNCTION tidemill.touch(me int, which bigint, seconds float8, t float8)
RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE lease SET deadline = CASE WHEN deadline IS NOT NULL THEN t + CASE
        WHEN seconds > 0 THEN seconds
        ELSE (SELECT CASE WHEN ttr > 0 THEN ttr ELSE 60 END FROM job WHERE job.seq = lease.seq)
    END END
    WHERE seq = which >> 16 AND token = which AND owner = me;
    RETURN FOUND;
END $$;

-- Give back all leases of an owner, by the report of a witness. Without a witness, each task counts
-- a loss.
CREATE OR REPLACE FUNCTION tidemill.give_back(
    who int, worker text, witness boolean, ran bigint[], causes text[], t float8,
    p tidemill.prefs) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
    l    lease;
    at   int;
    held int := 0;
    j    record;
    mine bigint[] := ARRAY (SELECT seq FROM lease WHERE owner = who);
BEGIN
    PERFORM lock_keys(mine, '{}');
    mine := lock_flows(mine, all_bad(mine), '{}');
    FOR l IN SELECT * FROM lease WHERE owner = who ORDER BY seq FOR UPDATE LOOP
        held := held + 1;
        at := array_position(ran, l.token);
        IF NOT witness AND l.line & 3 = 1 THEN
            PERFORM close_attempt(l, worker, retry_of(l.token, 0, 'its consumer died', t), t, p);
            CONTINUE;
        END IF;
        IF NOT witness THEN
            UPDATE job SET losses = losses + 1, line = line - (line & 3) + CASE line & 3
                WHEN 1 THEN 1 ELSE 2 END
            WHERE seq = l.seq RETURNING losses, tries, line INTO j;
            PERFORM add_line(l.seq, format('lost after %s s with its worker %s',
                             round((t - l.leased)::numeric, 3), worker), t);
            -- tallies count by queue, which stays the same
            IF j.tries > 0 AND j.losses >= j.tries THEN
                DELETE FROM lease WHERE seq = l.seq;
                PERFORM leave_gates(l, true, NULL, 0);
                PERFORM count(j.line, 'running', -1);
                PERFORM finish(l.seq, 'failed', format('lost with its worker: loss %s of %s',
                               j.losses, j.tries), NULL, t, p);
                CONTINUE;
            END IF;
        END IF;
        IF witness AND at IS NOT NULL THEN
            PERFORM close_attempt(l, worker, retry_of(l.token, 0, causes[at], t), t, p);
        ELSE
            -- without a witness the job may have run
            PERFORM close_attempt(l, worker, CASE
                WHEN witness THEN release_of(l.token, 'cancelled before it started', 0)
                ELSE release_of(l.token, '', l.leased) END, t, p);
        END IF;
    END LOOP;
    PERFORM flow(mine, t, p);
    RETURN held;
END $$;
