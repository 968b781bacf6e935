"""A call as it is made: its signature, its arguments, the memory that it works on, and adapters of other arrays."""
