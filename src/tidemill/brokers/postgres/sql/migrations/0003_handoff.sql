-- A put may lease a job to an owner that sleeps for it: see 25_handoff.sql.

ALTER TABLE tidemill.pulse
    ADD COLUMN room   int      NOT NULL DEFAULT 0,     -- jobs it may be handed; 0 unless it is asleep
    ADD COLUMN handed bigint[] NOT NULL DEFAULT '{}';  -- tokens of those it has not said it heard of

ALTER TYPE tidemill.want ADD ATTRIBUTE hand boolean;  -- a put may lease to it while it sleeps
