-- How many jobs of a queue were purged.
ALTER TABLE tidemill.tally ADD COLUMN purged bigint NOT NULL DEFAULT 0;
