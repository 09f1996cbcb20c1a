"""A broker that keeps jobs in a store and carries ready jobs through a message broker."""
