"""The schemas of requests and answers. Durations are seconds, times are epoch seconds (wall time).

The OpenAPI description is made of these structs, so their docstrings are read by users of the API.
"""
