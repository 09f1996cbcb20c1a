"""The JSON API of the job server, from the connection to the endpoints."""
