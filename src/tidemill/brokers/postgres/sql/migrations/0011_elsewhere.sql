-- Owners elsewhere live by what they say, whoever makes their calls: see 60_owners.sql.

ALTER TABLE tidemill.owner
    ADD COLUMN lease float8 NOT NULL DEFAULT 0;  -- seconds of silence for which it is given up
