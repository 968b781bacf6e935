"""Formatting of sizes for readers."""


def shown(nbytes: float) -> str:
    """Format bytes by the largest binary unit that leaves at least 1.

    >>> [shown(nbytes) for nbytes in (8, 65536, 3 << 19, 1 << 40)]
    ['8 B', '64 KiB', '1.5 MiB', '1024 GiB']
    """
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.4g} {unit}"
    return f"{nbytes:.4g} B"
