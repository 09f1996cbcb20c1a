"""The objects that user code calls: tasks, calls, job handles, results, messages, batches."""
