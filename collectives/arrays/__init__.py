"""Where arrays live: NumPy, CuPy, torch, and memory that ranks share."""
