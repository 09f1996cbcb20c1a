-- Keys for a time: see 15_keys.sql. The times belong to the last in line for a key.

ALTER TABLE tidemill.key
    ADD COLUMN until float8 NOT NULL DEFAULT 0,  -- it has the key so long also when it has succeeded
    ADD COLUMN since float8 NOT NULL DEFAULT 0,  -- when the first came that it replaced
    ADD COLUMN over  text COLLATE "C";           -- the job that has succeeded and holds the key still
CREATE INDEX key_held ON tidemill.key (until) WHERE over IS NOT NULL;

ALTER TYPE tidemill.given
    ADD ATTRIBUTE period   float8,
    ADD ATTRIBUTE max_wait float8;
