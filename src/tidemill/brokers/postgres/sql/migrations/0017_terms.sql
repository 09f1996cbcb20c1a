-- Other terms reach the gates of a limit in pieces: see 28_terms.sql.

ALTER TABLE tidemill.terms ADD COLUMN version int NOT NULL DEFAULT 0;  -- grows with each change
ALTER TABLE tidemill.gate  ADD COLUMN version int NOT NULL DEFAULT 0;  -- of the terms it goes by
DROP INDEX tidemill.gate_terms;
CREATE INDEX gate_terms ON tidemill.gate (terms, version);

-- Terms that do not hold any more, as long as a gate goes by them.
CREATE TABLE tidemill.outdated (
    id      text     COLLATE "C" NOT NULL,
    version int      NOT NULL,
    terms   float8[] NOT NULL,
    PRIMARY KEY (id, version)
);
