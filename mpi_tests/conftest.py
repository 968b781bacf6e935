pytest_plugins = ["mpi_tests.ranks"]
