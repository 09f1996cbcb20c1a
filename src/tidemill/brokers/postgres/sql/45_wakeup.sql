-- Wake-ups after a commit, for sleeping owners and for waiters.

-- Wake as many sleeping owners as there are jobs, and waiters for ends of jobs. Wake one more owner
-- if a time comes due before any owner wakes. "rest" says that jobs besides "ended" may have ended,
-- or queues have space. The jobs that are ready now decide, not past events. So an owner that fills
-- its want and leaves jobs over passes the hint on. This runs after a commit, so an error here must
-- not fail the call; the same goes for chores.
CREATE OR REPLACE FUNCTION tidemill.ring(
    me int, rest boolean, ended bigint[], p tidemill.prefs) RETURNS void
LANGUAGE plpgsql SET search_path = tidemill, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    sleepers int;
    hinted   int[] := '{}';
    l        int;
    s        record;
    d        float8;
    t        float8;
    limits   boolean;
BEGIN
    SELECT count(*) INTO sleepers FROM pulse WHERE asleep AND owner <> me;
    IF sleepers > 0 THEN
        t := clock(p);
        limits := is_limited();
        FOR l IN SELECT * FROM ready_lines(t, limits) LOOP
            FOR s IN
                SELECT pulse.owner, owner.channel FROM pulse JOIN owner ON owner.number = pulse.owner
                WHERE pulse.asleep AND pulse.owner <> me AND NOT pulse.owner = ANY (hinted)
                  AND owner.channel <> ''
                  AND (pulse.queues IS NULL OR l / 4 = ANY (pulse.queues))
                  AND CASE l & 3 WHEN 0 THEN pulse.tasks WHEN 1 THEN pulse.messages
                      ELSE pulse.tasks AND pulse.alone END
                ORDER BY random()
                LIMIT (SELECT count(*) FROM (SELECT FROM ready WHERE line = l LIMIT sleepers) AS r)
                      + CASE WHEN limits THEN (
                          SELECT count(*) FROM (SELECT FROM stand WHERE line = l LIMIT sleepers) AS s)
                        ELSE 0 END
            LOOP
                hinted := hinted || s.owner;
                PERFORM pg_notify(s.channel, s.owner::text);
            END LOOP;
        END LOOP;
        d := next_due(limits, clock(p));
        IF d IS NOT NULL AND NOT EXISTS (
            SELECT FROM pulse WHERE asleep AND (pulse.due <= d OR owner = ANY (hinted)))
        THEN
            PERFORM pg_notify(channel, number::text) FROM (
                SELECT owner.channel, owner.number
                FROM pulse JOIN owner ON owner.number = pulse.owner
                WHERE pulse.asleep AND owner.channel <> '' ORDER BY random() LIMIT 1) AS one;
        END IF;
    END IF;
    IF EXISTS (SELECT FROM await) THEN
        PERFORM pg_notify(channel, 'await') FROM (
            SELECT DISTINCT channel FROM await WHERE rest OR ref = ANY (ended) OR ref < 0) AS a;
    END IF;
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'nobody was told of jobs: %', SQLERRM;
END $$;

-- Wake owners after a repeated put, whose reply was lost. An owner to which the put handed a job
-- may not have heard of the job.
CREATE OR REPLACE FUNCTION tidemill.ring_again(p tidemill.prefs) RETURNS void
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
BEGIN
    PERFORM ring(0, true, '{}', p);
    PERFORM pg_notify(owner.channel, owner.number::text)
    FROM pulse JOIN owner ON owner.number = pulse.owner
    WHERE pulse.handed <> '{}' AND owner.channel <> '';
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'nobody was told of jobs: %', SQLERRM;
END $$;
