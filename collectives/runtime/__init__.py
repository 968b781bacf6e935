"""What runs: a call resolved, bound, and run by messages, in shared memory or on devices."""
