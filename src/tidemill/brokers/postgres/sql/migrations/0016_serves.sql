-- The oldest version of the code whose calls the functions answer: see schema.py.

ALTER TABLE tidemill.meta ADD COLUMN serves int NOT NULL DEFAULT 0;
