-- The delay of a job after a failed attempt: the function "backoff" of core/retry.py, in SQL.

-- "policy" is delay, factor, cap, jitter and immediate; NULL for the default of a task or a message.
CREATE OR REPLACE FUNCTION tidemill.backoff(policy float8[], is_message boolean, attempt int) RETURNS float8
LANGUAGE plpgsql AS $$
DECLARE
    p     float8[] := coalesce(policy, CASE WHEN is_message THEN '{1,2,300,0,1}' ELSE '{5,2,3600,1,0}' END::float8[]);
    step  int      := attempt - 1 - p[5]::int;
    bound float8;
BEGIN
    IF p[1] <= 0 OR step < 0 THEN
        RETURN 0;
    END IF;
    bound := least(p[3], p[1] * power(p[2], least(step, 64)::float8));
    RETURN CASE WHEN p[4] = 1 THEN bound * random() ELSE bound END;
END $$;
