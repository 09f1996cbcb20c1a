-- Drop the functions of another version first: arguments or results may have changed. A migration is
-- one transaction, so nobody sees a store without functions.

DROP VIEW IF EXISTS tidemill.shown;
DO $$
DECLARE
    f regprocedure;
BEGIN
    FOR f IN SELECT oid FROM pg_proc WHERE pronamespace = current_schema()::regnamespace LOOP
        EXECUTE format('DROP ROUTINE IF EXISTS %s CASCADE', f);
    END LOOP;
END $$;
