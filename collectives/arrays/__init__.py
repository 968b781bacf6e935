"""Arrays and their memory: NumPy, CuPy, torch, and memory that ranks share."""
