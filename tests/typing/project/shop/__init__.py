"""A small shop that uses tidemill as a strict user does."""
