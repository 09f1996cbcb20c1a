-- A put with a nonce leaves a row in "call" that is changed no more, and there are as many as there were such
-- puts in ten minutes: they go by an index, and the rows of lines, which are few and change with each call, by
-- another. What an index covers is never changed, so that those changes stay within their page.

ALTER TABLE tidemill.call ADD COLUMN once float8;  -- when the put with this nonce came; nothing for a line
UPDATE tidemill.call SET once = seen WHERE line LIKE 'once %';
CREATE INDEX call_once ON tidemill.call (once) WHERE once IS NOT NULL;
CREATE INDEX call_line ON tidemill.call (line) WHERE once IS NULL;
