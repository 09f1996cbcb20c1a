"""A broker that keeps jobs in a store and carries what is ready through a message broker."""
