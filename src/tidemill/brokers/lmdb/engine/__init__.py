"""The engine of a store: environment, transactions, group commit, locks, room, wake-ups."""
