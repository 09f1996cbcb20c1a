-- Queues that are bound to patterns of topics: see 22_topics.sql.

CREATE TABLE tidemill.binding (
    queue   text COLLATE "C" NOT NULL,
    pattern text COLLATE "C" NOT NULL,
    PRIMARY KEY (queue, pattern)
);

-- One row: a new id after each change of a binding.
CREATE TABLE tidemill.binding_version (version text NOT NULL);
INSERT INTO tidemill.binding_version VALUES ('');
