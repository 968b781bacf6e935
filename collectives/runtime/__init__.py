"""Execution of calls: resolved, bound, and run by messages, in shared memory or on devices."""
