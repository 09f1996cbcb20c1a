-- History: rows of numbers by period. A step inserts its rows as one row of history_added, so no
-- step waits for another. The numbers are packed, so clients compute the sums: now and then, a
-- client sums rows and stores the sums.

-- Add the rows of a step; false when there are none.
CREATE OR REPLACE FUNCTION tidemill.add_history(counts bytea) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    IF counts IS NULL THEN
        RETURN false;
    END IF;
    INSERT INTO history_added (rows) VALUES (counts);
    RETURN true;
END $$;

-- The sums of a time range, and all added rows, of one moment. Sums come first, in order.
CREATE OR REPLACE FUNCTION tidemill.history_of(
    kind text, span int, since bigint, until bigint, name text, OUT is_sum boolean, OUT data bytea) RETURNS SETOF record
LANGUAGE sql STABLE SET search_path = tidemill, pg_temp SET jit = off AS $$
    (SELECT true, h.data FROM history AS h
     WHERE h.span = history_of.span AND h.kind = history_of.kind AND h.at >= since AND h.at < until
       AND (history_of.name = '' OR h.name = history_of.name)
     ORDER BY h.at, h.name)
    UNION ALL
    (SELECT false, a.rows FROM history_added AS a ORDER BY a.n)
$$;

-- The kinds and spans that have rows, by one look into the index each.
CREATE OR REPLACE FUNCTION tidemill.history_kinds(OUT kind text, OUT span int) RETURNS SETOF record
LANGUAGE sql STABLE SET search_path = tidemill, pg_temp SET enable_seqscan = off SET jit = off AS $$
    WITH RECURSIVE k AS (
        (SELECT h.span, h.kind FROM history AS h ORDER BY h.span, h.kind LIMIT 1)
        UNION ALL
        SELECT n.span, n.kind FROM k CROSS JOIN LATERAL (
            SELECT h.span, h.kind FROM history AS h WHERE (h.span, h.kind) > (k.span, k.kind)
            ORDER BY h.span, h.kind LIMIT 1) AS n
    )
    SELECT k.kind, k.span FROM k
$$;

-- The first added rows, and the count of changes, of one moment.
CREATE OR REPLACE FUNCTION tidemill.added_history(
    most int, OUT changes bigint, OUT numbers bigint[], OUT rows bytea[])
LANGUAGE sql STABLE SET search_path = tidemill, pg_temp SET jit = off AS $$
    SELECT (SELECT count FROM history_changes), coalesce(array_agg(a.n ORDER BY a.n), '{}'),
           coalesce(array_agg(a.rows ORDER BY a.n), '{}')
    FROM (SELECT * FROM history_added ORDER BY n LIMIT most) AS a
$$;

-- The sums of some keys, NULL for a key without a sum, and the count of changes, of one moment.
CREATE OR REPLACE FUNCTION tidemill.history_sums(
    spans bigint[], kinds text[], ats bigint[], names text[], OUT changes bigint, OUT sums bytea[])
LANGUAGE sql STABLE SET search_path = tidemill, pg_temp SET enable_seqscan = off SET jit = off AS $$
    SELECT (SELECT count FROM history_changes), ARRAY (
        SELECT h.data FROM unnest(spans, kinds, ats, names) WITH ORDINALITY AS k (span, kind, at, name, n)
        LEFT JOIN history AS h ON h.span = k.span AND h.kind = k.kind AND h.at = k.at AND h.name = k.name
        ORDER BY k.n)
$$;

-- Store sums, and delete the added rows that are in them. An empty sum is deleted. False when others have changed sums
-- since the caller read them: then nothing happens.
CREATE OR REPLACE FUNCTION tidemill.change_history(
    known bigint, numbers bigint[], spans bigint[], kinds text[], ats bigint[], names text[], sums bytea[])
RETURNS boolean
LANGUAGE plpgsql SET search_path = tidemill, pg_temp SET jit = off AS $$
BEGIN
    UPDATE history_changes SET count = count + 1 WHERE count = known;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    DELETE FROM history_added WHERE n = ANY (numbers);
    FOR i IN 1..cardinality(spans) LOOP
        IF sums[i] = '' THEN
            DELETE FROM history AS h
            WHERE h.span = spans[i] AND h.kind = kinds[i] AND h.at = ats[i] AND h.name = names[i];
        ELSE
            INSERT INTO history VALUES (spans[i], kinds[i], ats[i], names[i], sums[i])
            ON CONFLICT (span, kind, at, name) DO UPDATE SET data = excluded.data;
        END IF;
    END LOOP;
    RETURN true;
END $$;

-- Delete rows whose time is over (KEEP in history_rows.py), up to "most"; return how many.
CREATE OR REPLACE FUNCTION tidemill.prune_history(most int, t float8) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
    pruned int := 0;
    gone   int;
    term   record;
    which  text;
BEGIN
    FOR term IN SELECT * FROM (VALUES (60, 172800), (3600, 7776000)) AS x (span, keep) LOOP
        which := '';
        LOOP
            SELECT min(kind) INTO which FROM history WHERE span = term.span AND kind > which;
            EXIT WHEN which IS NULL OR pruned >= most;
            DELETE FROM history WHERE ctid = ANY (ARRAY (
                SELECT ctid FROM history WHERE span = term.span AND kind = which AND at < floor(t - term.keep)::bigint
                ORDER BY at LIMIT most - pruned FOR UPDATE SKIP LOCKED));
            GET DIAGNOSTICS gone = ROW_COUNT;
            pruned := pruned + gone;
        END LOOP;
    END LOOP;
    RETURN pruned;
END $$;
