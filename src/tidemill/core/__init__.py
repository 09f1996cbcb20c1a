"""The basis of all parts: jobs, errors, encodings, clocks, files, signals. Knows no store."""
