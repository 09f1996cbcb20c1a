"""Part of the project that the tests use."""
