"""A catalogue of misdeeds of tasks, and a test that tries each in a real worker."""
