-- Other ranks and other queues for jobs that wait.

-- Give jobs that wait another rank, or move them to another queue while that queue has room. NULL
-- changes nothing. "packed" is the name of the queue as an envelope has it: the second field, behind
-- three bytes and the id. "said" is a line for their logs.
CREATE OR REPLACE FUNCTION tidemill.alter_jobs(
    ids text[], new_rank bigint, to_queue text, packed bytea, said text, p tidemill.prefs) RETURNS boolean[]
LANGUAGE plpgsql SET search_path = tidemill, pg_temp AS $$
DECLARE
    done   boolean[] := '{}';
    which  bigint;
    target int;
    seqs   bigint[];
    seen   bigint[];
    t      float8;
BEGIN
    PERFORM check_here();
    IF to_queue IS NOT NULL THEN
        target := (SELECT number FROM queue_numbers(ARRAY[to_queue]));
        -- As in put_jobs, only one transaction fills a bounded queue at a time. This lock comes before all others.
        PERFORM pg_advisory_xact_lock('queue'::regclass::oid::int, target)
        FROM queue WHERE number = target AND max_size > 0;
    END IF;
    t := clock(p);
    seqs := seqs_of(ids);
    seen := end_by_time(t);
    PERFORM lock_acts(ids, seqs, seen);
    PERFORM come_due(seen, t, p);
    FOREACH which IN ARRAY seqs LOOP
        done := done || alter_one(which, new_rank, target, packed, said, t);
    END LOOP;
    IF true = ANY (done) THEN
        UPDATE queue SET listed = true WHERE number = target AND NOT listed;
    END IF;
    PERFORM tell_all('all');
    RETURN done;
END $$;

-- Alter one job; false when it does not wait, or the queue is full. A job in "later" stays there,
-- with its due time.
-- lock_acts has locked the other rows, so a job that is not in "later" cannot come there meanwhile.
CREATE OR REPLACE FUNCTION tidemill.alter_one(
    which bigint, new_rank bigint, target int, packed bytea, said text, t float8) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    j     record;
    l     later;
    stood text;
    other int;
BEGIN
    SELECT * INTO l FROM later WHERE seq = which FOR UPDATE;
    SELECT line, rank INTO j FROM job WHERE seq = which;
    IF NOT FOUND OR EXISTS (SELECT FROM behind WHERE seq = which AND waits = 'barrier') THEN
        RETURN false;
    END IF;
    other := coalesce(target * 4 + (j.line & 3), j.line);
    new_rank := coalesce(new_rank, j.rank);
    IF other = j.line AND new_rank = j.rank THEN
        RETURN NOT EXISTS (SELECT FROM lease WHERE seq = which)
           AND NOT EXISTS (SELECT FROM done WHERE seq = which);
    ELSIF other <> j.line AND l.waiting IS NOT TRUE AND EXISTS (
        SELECT FROM queue WHERE number = target AND max_size > 0 AND max_size <= size_of(target))
    THEN
        RETURN false;
    END IF;
    stood := unplace(which, false);
    IF stood IS NULL OR stood NOT IN ('ready', 'scheduled', 'waiting') THEN
        RETURN false;
    END IF;
    UPDATE job SET rank = new_rank, line = other, due = CASE stood WHEN 'ready' THEN 0 ELSE due END,
                   envelope = CASE line WHEN other THEN envelope ELSE overlay(
                       envelope PLACING packed FROM 4 + packed_size(id)
                       FOR packed_size((SELECT name FROM queue WHERE number = line / 4))) END
    WHERE seq = which;
    PERFORM add_line(which, said, t);
    IF stood = 'ready' OR l.seq IS NULL THEN
        PERFORM place(which, t);
    ELSE
        INSERT INTO later (seq, due, waiting) VALUES (which, l.due, l.waiting);
        PERFORM count(other, stood);
    END IF;
    RETURN true;
END $$;

-- The bytes of a text in an envelope.
CREATE OR REPLACE FUNCTION tidemill.packed_size(data text) RETURNS int
LANGUAGE sql IMMUTABLE AS $$
    SELECT size + CASE WHEN size < 32 THEN 1 WHEN size < 256 THEN 2 ELSE 3 END
    FROM octet_length(convert_to(data, 'UTF8')) AS size
$$;
