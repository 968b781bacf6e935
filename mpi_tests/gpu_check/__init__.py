"""Checks that need a machine with a GPU, and a table of their results."""
