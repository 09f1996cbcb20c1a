-- Numbers that are given away, for protocols whose jobs have numbers: see 72_named.sql.

CREATE TABLE tidemill.numbered (
    last bigint NOT NULL
);
INSERT INTO tidemill.numbered VALUES (0);
