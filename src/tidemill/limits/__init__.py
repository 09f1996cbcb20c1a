"""Rate and concurrency limits: how users declare them, and their arithmetic. Knows no store."""
