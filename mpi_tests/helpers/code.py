"""Run the code that follows `-c`, for `mpi_tests.helpers.forked`."""

import sys

if __name__ == "__main__":
    exec(sys.argv.pop(1), {"__name__": "__main__"})
