"""The schemas of requests and answers. Durations are seconds, times are epoch seconds (wall time).

The OpenAPI description is made from these structs, so users of the API read their docstrings.
"""
