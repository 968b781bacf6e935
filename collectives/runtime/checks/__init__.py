"""Detection of mismatched calls and of deadlocks."""
