-- The arithmetic of limits, the same as in tidemill/limits/arithmetic.py. Times are microseconds, as floats.
--
-- Limit settings ("terms") are eight numbers, NULL where a setting is absent: 1, 2 a rate: jobs, seconds ·
-- 3 its burst · 4, 5 a window: jobs, seconds · 6 concurrency · 7, 8 a breaker: failures, seconds.

CREATE OR REPLACE FUNCTION tidemill.no_terms() RETURNS float8[]
LANGUAGE sql IMMUTABLE AS $$ SELECT ARRAY[NULL, NULL, 1, NULL, NULL, NULL, NULL, NULL]::float8[] $$;

-- The time from one token to the next; 0 where there is no bucket.
CREATE OR REPLACE FUNCTION tidemill.every(x float8[]) RETURNS float8
LANGUAGE sql IMMUTABLE AS $$ SELECT CASE WHEN x[1] > 0 THEN x[2] * 1e6 / x[1] ELSE 0 END $$;

-- How many jobs may run at a time; NULL for any number. After a failure, the bound is
-- the number of failures left until the breaker opens.
CREATE OR REPLACE FUNCTION tidemill.most_running(x float8[], failures int) RETURNS float8
LANGUAGE sql IMMUTABLE AS $$
    SELECT least(x[6], CASE WHEN x[7] IS NOT NULL AND failures > 0 THEN greatest(1, x[7] - failures) END)
$$;

-- When a window lets jobs of this cost start.
CREATE OR REPLACE FUNCTION tidemill.window_opens(
    x float8[], slots float8[], now float8, cost float8) RETURNS float8
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    length float8 := floor(x[5] * 1e6);
    need   float8 := least(cost, x[4]);
    used   float8 := slots_used(x, slots, now);
    at     float8 := 0;
BEGIN
    IF x[4] = 0 THEN
        RETURN 'infinity';
    END IF;
    FOR i IN 1..cardinality(slots) / 2 LOOP
        CONTINUE WHEN slots[2 * i - 1] + length <= now;
        EXIT WHEN used + need <= x[4];
        used := used - slots[2 * i];
        at := slots[2 * i - 1] + length;
    END LOOP;
    RETURN at;
END $$;

-- The cost of the jobs that have started within the window.
CREATE OR REPLACE FUNCTION tidemill.slots_used(x float8[], slots float8[], now float8) RETURNS float8
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    used float8 := 0;
BEGIN
    FOR i IN 1..cardinality(slots) / 2 LOOP
        IF slots[2 * i - 1] + floor(x[5] * 1e6) > now THEN
            used := used + slots[2 * i];
        END IF;
    END LOOP;
    RETURN used;
END $$;

-- When a job of this cost may start: 0 for now, infinity when time alone does not open the limiter.
CREATE OR REPLACE FUNCTION tidemill.gate_opens(
    x float8[], g tidemill.gate, running bigint, now float8, cost float8) RETURNS float8
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    at float8 := 0;
BEGIN
    IF running >= x[6] THEN
        RETURN 'infinity';
    END IF;
    IF g.failures >= x[7] THEN
        at := g.until;
    END IF;
    IF at <= now AND running >= most_running(x, g.failures) THEN
        RETURN 'infinity';
    END IF;
    IF x[1] = 0 THEN
        RETURN 'infinity';
    ELSIF x[1] > 0 THEN  -- one microsecond less, since sums of fractions may be off
        at := greatest(at, floor(g.filled - (x[3] - least(cost, x[3])) * every(x) - 1));
    END IF;
    IF x[4] IS NOT NULL THEN
        at := greatest(at, window_opens(x, g.slots, now, cost));
    END IF;
    RETURN CASE WHEN at > now THEN at ELSE 0 END;
END $$;

-- How many jobs of cost 1 may start now, up to "most".
CREATE OR REPLACE FUNCTION tidemill.gate_room(
    x float8[], g tidemill.gate, running bigint, now float8, most int) RETURNS int
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    room float8 := most;
BEGIN
    IF gate_opens(x, g, running, now, 1) > 0 THEN
        RETURN 0;
    END IF;
    room := least(room, most_running(x, g.failures) - running);
    IF x[1] > 0 THEN
        room := least(room, greatest(1, floor(
            x[3] - greatest(0, g.filled - now) / every(x) + 1 / every(x))));
    END IF;
    IF x[4] IS NOT NULL THEN
        room := least(room, greatest(1, floor(x[4] - slots_used(x, g.slots, now))));
    END IF;
    RETURN room;
END $$;

-- When the bucket is full again after jobs of this cost have started.
CREATE OR REPLACE FUNCTION tidemill.filled_with(x float8[], filled float8, now float8, cost float8)
RETURNS float8
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN x[1] > 0 THEN greatest(filled, now) + cost * every(x) ELSE filled END
$$;

-- The slots of a window after jobs of this cost have started: each slot is a 64th of the window.
CREATE OR REPLACE FUNCTION tidemill.slots_with(x float8[], slots float8[], now float8, cost float8)
RETURNS float8[]
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    length float8 := floor(x[5] * 1e6);
    width  float8 := greatest(1, floor(length / 64));
    ends   float8 := (floor(now / width) + 1) * width;
    kept   float8[] := '{}';
    n      int;
BEGIN
    IF x[4] IS NULL OR cost = 0 THEN
        RETURN slots;
    END IF;
    FOR i IN 1..cardinality(slots) / 2 LOOP
        IF slots[2 * i - 1] + length > now THEN
            kept := kept || slots[2 * i - 1:2 * i];
        END IF;
    END LOOP;
    n := cardinality(kept);
    IF n > 0 AND kept[n - 1] >= ends THEN
        kept[n] := kept[n] + cost;
        RETURN kept;
    END IF;
    RETURN kept || ends || cost;
END $$;

-- The slots of a window after a job returns its cost, since the job did not run. The job took the
-- cost at the time "taken".
CREATE OR REPLACE FUNCTION tidemill.slots_without(x float8[], slots float8[], taken float8, cost float8)
RETURNS float8[]
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    width float8 := greatest(1, floor(floor(x[5] * 1e6) / 64));
BEGIN
    IF x[4] IS NULL THEN
        RETURN slots;
    END IF;
    FOR i IN 1..cardinality(slots) / 2 LOOP
        IF slots[2 * i - 1] > taken THEN
            IF slots[2 * i - 1] - width <= taken THEN
                slots[2 * i] := greatest(0, slots[2 * i] - cost);
            END IF;
            EXIT;
        END IF;
    END LOOP;
    RETURN slots;
END $$;

-- When the bucket is full again under new settings: the tokens stay, as far as the new bucket holds them.
CREATE OR REPLACE FUNCTION tidemill.filled_anew(old float8[], new float8[], filled float8, now float8)
RETURNS float8
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN filled <= now OR new[1] IS NULL THEN 0
        WHEN new[1] > 0 AND old[1] > 0 THEN
            now + (new[3] - least(new[3], old[3] - (filled - now) / every(old))) * every(new)
        WHEN new[1] > 0 THEN least(filled, now + new[3] * every(new))
        ELSE filled
    END
$$;

-- The time from which an unused limiter equals a new limiter.
CREATE OR REPLACE FUNCTION tidemill.clear_at(x float8[], g tidemill.gate) RETURNS float8
LANGUAGE sql IMMUTABLE AS $$
    SELECT greatest(CASE WHEN g.filled <> 0 THEN floor(g.filled) + 1 ELSE 0 END,
                    CASE WHEN x[4] IS NOT NULL AND g.slots <> '{}'
                    THEN g.slots[cardinality(g.slots) - 1] + floor(x[5] * 1e6) ELSE 0 END)
$$;
