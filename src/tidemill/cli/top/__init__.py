"""``tidemill top``: queues, running jobs and workers in a terminal, refreshed while they change."""
