-- The delay of a message after a failed attempt: the function "backoff" of core/backoff.py, in SQL.

-- Read bytes as an unsigned number.
CREATE OR REPLACE FUNCTION tidemill.unsigned_in(data bytea, at int, size int) RETURNS numeric
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    total numeric := 0;
BEGIN
    FOR n IN 0..size - 1 LOOP
        total := total * 256 + get_byte(data, at + n);
    END LOOP;
    RETURN total;
END $$;

-- Read an IEEE 754 float; "bits" is the size of its fraction, 23 or 52. Policies hold no infinity and no NaN.
CREATE OR REPLACE FUNCTION tidemill.float_in(data bytea, at int, size int) RETURNS float8
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    bits     int     := CASE size WHEN 4 THEN 23 ELSE 52 END;
    bias     int     := CASE size WHEN 4 THEN 127 ELSE 1023 END;
    whole    numeric := unsigned_in(data, at, size) % power(2::numeric, size * 8 - 1);
    exponent int     := div(whole, power(2::numeric, bits));
    fraction float8  := mod(whole, power(2::numeric, bits))::float8 / power(2::float8, bits);
BEGIN
    IF exponent = 0 THEN
        RETURN 0;  -- or a number too small to matter
    END IF;
    RETURN CASE WHEN get_byte(data, at) > 127 THEN -1 ELSE 1 END
        * (1 + fraction) * power(2::float8, exponent - bias);
END $$;

-- Read one msgpack value; "next" is the place of the next value. A text is read as 0, an array as its
-- length, true as 1 and false as 0.
CREATE OR REPLACE FUNCTION tidemill.read_value(data bytea, at int, OUT value float8, OUT next int)
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    code int := get_byte(data, at);
    size int;
BEGIN
    value := 0;
    next := at + 1;
    IF code < 128 THEN
        value := code;
    ELSIF code >= 224 THEN
        value := code - 256;
    ELSIF code BETWEEN 160 AND 191 THEN
        next := at + 1 + code - 160;
    ELSIF code BETWEEN 144 AND 159 THEN
        value := code - 144;
    ELSIF code IN (194, 195) THEN
        value := code - 194;
    ELSIF code IN (196, 197, 198, 217, 218, 219) THEN  -- a text: its size in 1, 2 or 4 bytes
        size := CASE WHEN code IN (196, 217) THEN 1 WHEN code IN (197, 218) THEN 2 ELSE 4 END;
        next := at + 1 + size + unsigned_in(data, at + 1, size)::int;
    ELSIF code IN (202, 203) THEN
        size := CASE code WHEN 202 THEN 4 ELSE 8 END;
        value := float_in(data, at + 1, size);
        next := at + 1 + size;
    ELSE  -- a number of 1, 2, 4 or 8 bytes, unsigned or signed
        size := 1 << ((code - 204) % 4);
        value := unsigned_in(data, at + 1, size)::float8;
        IF code >= 208 AND get_byte(data, at + 1) > 127 THEN
            value := value - power(2::float8, size * 8);
        END IF;
        next := at + 1 + size;
    END IF;
END $$;

-- The retry policy in an envelope: limit, delay, factor, cap, jitter, immediate.
CREATE OR REPLACE FUNCTION tidemill.policy_in(envelope bytea) RETURNS float8[]
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    at     int      := CASE get_byte(envelope, 0) WHEN 220 THEN 3 ELSE 1 END;
    value  float8;
    policy float8[] := '{}';
BEGIN
    FOR field IN 1..11 LOOP  -- the fields before the policy
        at := (read_value(envelope, at)).next;
    END LOOP;
    SELECT r.value, r.next INTO value, at FROM read_value(envelope, at) AS r;
    FOR field IN 1..value::int LOOP
        SELECT r.value, r.next INTO value, at FROM read_value(envelope, at) AS r;
        policy := policy || value;
    END LOOP;
    RETURN policy;
END $$;

-- Seconds until a message whose attempt failed is ready again.
CREATE OR REPLACE FUNCTION tidemill.backoff(envelope bytea, attempt int) RETURNS float8
LANGUAGE plpgsql AS $$
DECLARE
    p     float8[] := policy_in(envelope);
    step  int      := attempt - 1 - coalesce(p[6], 0)::int;
    bound float8;
BEGIN
    IF p[1] < 0 OR p[2] <= 0 OR step < 0 THEN
        RETURN 0;
    END IF;
    bound := least(p[4], p[2] * power(p[3], least(step, 64)::float8));
    RETURN CASE WHEN p[5] = 1 THEN bound * random() ELSE bound END;
END $$;
