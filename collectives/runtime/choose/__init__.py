"""The choice of an algorithm by algorithm="auto"."""
