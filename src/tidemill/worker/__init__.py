"""The worker: a supervisor that talks to the broker, and processes that run the user's code."""
