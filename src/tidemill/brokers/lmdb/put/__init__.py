"""How jobs enter a store: puts, their keys, flows and schedules."""
