-- What lies with the carrier takes its tokens when it starts: see 27_limits.sql.

ALTER TABLE tidemill.gate ADD COLUMN held float8 NOT NULL DEFAULT 0;  -- of a lane: what such jobs cost together
ALTER TABLE tidemill.inbox ADD COLUMN held float8;  -- more of that, or less; "again" is when such a job starts
