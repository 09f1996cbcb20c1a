"""Moving jobs from store to store, and into and out of a message broker."""
