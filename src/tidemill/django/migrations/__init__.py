"""The migrations of the tables of ``django://``."""
