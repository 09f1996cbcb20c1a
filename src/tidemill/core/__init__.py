"""What every part stands on: jobs, errors, encodings, clocks, files, signals. Knows no store."""
