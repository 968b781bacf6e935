"""Network models and tuning files with invented numbers."""

from collectives.runtime.choose.auto import Case, Tuning
from collectives.schedule.network import NETWORK as DEFAULT
from collectives.schedule.network import Link, Network

NETWORK_HERE = DEFAULT._replace(between=Link(1e-4, 8e-9), nic=Link(1e-5, 8e-9), system=Link(3e-6, 5e-11), cores=3)


NETWORK = Network(Link(1e-6, 2e-10), Link(3e-5, 8e-10), 3e-11, 4e-11, 5e-6, Link(1e-6, 2e-11), cores=16)


MEASURED = {
    Case("all_reduce", "ordinary", 4, 1): ((1000, "binomial"), (1 << 20, "double_tree")),
    Case("all_reduce", "symmetric", 4, 1): ((1 << 20, "ring"),),
    Case("all_to_all", "ordinary", 4, 1): ((1 << 20, "bruck"),),
    Case("barrier", "ordinary", 4, 1): ((0, "dissemination"),),
}


TUNING = Tuning(NETWORK, "t.json", MEASURED, {"mpi": "an MPI", "ranks": 4, "nodes": [4], "cores": [16]})
