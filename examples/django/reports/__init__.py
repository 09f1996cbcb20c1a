"""Reports that take a while."""
