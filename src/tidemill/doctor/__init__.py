"""The checks of a store, its queues and its workers: what ``doctor`` and the pages tell."""
