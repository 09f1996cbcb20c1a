"""A script without a guard, as it may lie in any app."""

raise SystemExit(3)
