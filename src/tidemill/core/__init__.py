"""The basis of all parts: jobs, errors, encodings, clocks, files, signals; without a store."""
