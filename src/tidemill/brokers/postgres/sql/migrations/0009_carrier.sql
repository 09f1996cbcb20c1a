-- Leases may lie with a carrier: see 48_carrier.sql. Its leases have the owner 0.

ALTER TABLE tidemill.tally ADD COLUMN carried bigint NOT NULL DEFAULT 0;  -- of "running", how many
CREATE INDEX lease_carried ON tidemill.lease (line, seq) WHERE owner = 0;
ALTER TABLE tidemill.inbox ADD COLUMN again float8;  -- "back" is when it was charged, and then it starts
