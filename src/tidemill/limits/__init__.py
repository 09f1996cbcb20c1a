"""Rate and concurrency limits: how users declare them, and their arithmetic, without a store."""
