"""What requests and answers look like. Durations are seconds, times epoch seconds (wall time).

The description of the API is made of these: what is said here in a docstring is said to its users.
"""
