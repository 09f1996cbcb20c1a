-- A put that hands its job over is seen before it is on disk: see 25_handoff.sql. This table is empty
-- whenever something that was seen may have been lost: a server that died empties it as it comes back.

CREATE UNLOGGED TABLE tidemill.uptime (
    since float8 NOT NULL
);
INSERT INTO tidemill.uptime VALUES (extract(epoch FROM now()));
