-- The text of a report of progress.

ALTER TABLE tidemill.note ADD COLUMN text text NOT NULL DEFAULT '';
