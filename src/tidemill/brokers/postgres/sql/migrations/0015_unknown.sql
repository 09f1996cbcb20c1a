-- Jobs of unknown tasks: see 31_unknown.sql. Their rows in "later" have the task; "due" is when the job
-- fails, or infinity.

ALTER TABLE tidemill.later ADD COLUMN task text COLLATE "C", ADD COLUMN queue int, ADD COLUMN rank bigint;
CREATE INDEX later_unknown ON tidemill.later (task, queue, rank, seq) WHERE task IS NOT NULL;

-- The tasks that have such jobs, or had some; numbers are committed in their order.
CREATE TABLE tidemill.unknown (
    task   text   COLLATE "C" PRIMARY KEY,
    number bigint NOT NULL
);
CREATE INDEX unknown_number ON tidemill.unknown (number);

ALTER TABLE tidemill.pulse
    ADD COLUMN knows text[],                 -- tasks of those that the owner knows
    ADD COLUMN told bigint NOT NULL DEFAULT -1;  -- the highest number it has heard of; -1: it does not ask
ALTER TYPE tidemill.want ADD ATTRIBUTE knows text[];
ALTER TYPE tidemill.want ADD ATTRIBUTE told bigint;
