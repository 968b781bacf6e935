"""Write a schedule of one's own, the exchanges of Swing; prove, draw, price and run it beside NCCL's double tree.

mpirun -n 4 python examples/own_schedule.py
"""

import numpy as np

import collectives
from collectives import algorithms
from collectives.schedule.cost import predict_best
from collectives.schedule.fabrics import topology
from collectives.schedule.moves import RecvReduce, Send, render
from collectives.schedule.proof import check


@algorithms.register("all_reduce", lambda size: size & (size - 1) == 0, "a power of two of ranks")
def swing(rank, size):
    """Exchange the vector with ranks at distances 1, 1, 3, 5, 11 ..., even ranks to the right and odd ones to the left.

    Source: De Sensi et al., "Swing: Short-cutting Rings for Higher Bandwidth Allreduce", NSDI 2024, section 3.1.
    """
    for step in range(size.bit_length() - 1):
        distance = (1 - (-2) ** (step + 1)) // 3
        peer = (rank + distance if rank % 2 == 0 else rank - distance) % size
        yield Send(peer, range(size)), RecvReduce(peer, range(size))


def main():
    comm = collectives.world()
    if comm.rank == 0:
        for size in (1, 2, 4, 8, 64, 256):
            check("all_reduce", swing, size)
        print(render(swing, 4))
        for fabric in ("ndr", "100gbe"):
            nodes, network, words = topology(fabric, 1024)
            print(f"1024 ranks, {words}, in us:")
            for nbytes in (8, 1 << 20):
                times = []
                for algorithm in (swing, "double_tree"):
                    row = algorithms.find("all_reduce", algorithm)
                    best, seconds = predict_best(row, nbytes, 1024, nodes, network=network)
                    times.append(f"{best.name.rpartition(':')[2]} {seconds * 1e6:.0f}")
                print(f"  {nbytes} B: {', '.join(times)}")
    x = np.full(6, comm.rank + 1.0)
    comm.all_reduce(x, algorithm=swing)
    if comm.rank == 0:
        print("the sum on all ranks:", x[0])


if __name__ == "__main__":
    main()
