-- Schedules: see 55_schedules.sql.

CREATE TABLE tidemill.schedule (
    name    text   COLLATE "C" PRIMARY KEY,
    version bigint NOT NULL,                 -- fresh with every change
    due     float8 NOT NULL,                 -- 0 for never
    next    float8,                          -- when it is to be handed out
    body    bytea  NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0);
CREATE INDEX schedule_next ON tidemill.schedule (next) WHERE next IS NOT NULL;
