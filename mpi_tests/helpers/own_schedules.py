"""Schedules of a program's own: right ones, and wrong ones with the words that refuse them, for 4 ranks."""

from collectives.schedule.moves import Barrier, Copy, Get, GetReduce, Put, Recv, RecvReduce, Send


def exchange(rank, size):
    """All-reduce the whole vector among a power of two of ranks."""
    for bit in range(size.bit_length() - 1):
        peer = rank ^ (1 << bit)
        yield Send(peer, range(size)), RecvReduce(peer, range(size))


def line(rank, size, root, num_chunks):
    """Broadcast along a line that begins at the root, chunk by chunk."""
    number, right, left = (rank - root) % size, (rank + 1) % size, (rank - 1) % size
    for step in range(size + num_chunks - 2 if size > 1 else 0):
        send = [Send(right, range(c, c + 1)) for c in (step - number,) if c in range(num_chunks) and number < size - 1]
        recv = [Recv(left, range(c, c + 1)) for c in (step - number + 1,) if c in range(num_chunks) and number]
        yield (*send, *recv)


def spread(rank, size, num_chunks):
    """All-gather by sending the own chunks to everybody, a neighbour after the other."""
    each = num_chunks // size
    own = range(rank * each, (rank + 1) * each)
    for step in range(1, size):
        source = (rank - step) % size
        yield Send((rank + step) % size, own), Recv(source, range(source * each, (source + 1) * each))


def rotated(rank, size):
    """All-to-all of neighbours at all distances; the own chunk is copied."""
    yield (Copy(range(rank, rank + 1), range(size + rank, size + rank + 1)),)
    for step in range(1, size):
        dest, source = (rank + step) % size, (rank - step) % size
        yield Send(dest, range(dest, dest + 1)), Recv(source, range(size + source, size + source + 1))


def in_node(rank, size, groups):
    """All-reduce by reading the memory of the node's ranks, for one node."""
    node = groups[0] if groups else tuple(range(size))
    own = range(rank, rank + 1)
    yield (Barrier(node),)
    yield (GetReduce(node, own, own),)
    yield (Barrier(node),)
    yield tuple(Get(other, range(other, other + 1), range(other, other + 1)) for other in node if other != rank)
    yield (Barrier(node),)


def parked(rank, size):
    """All-reduce, after a neighbour's chunk 0 was put behind the vector, where a chunk 1 has its place."""
    yield Send(rank ^ 1, range(1)), Recv(rank ^ 1, range(size + 1, size + 2))
    yield from exchange(rank, size)


def lost_chunk(rank, size):
    for moves in exchange(rank, size):
        yield tuple(move._replace(run=range(size - 1)) for move in moves)


def doubled_addend(rank, size):
    yield from exchange(rank, size)
    yield from exchange(rank, 2)


def deadlock(rank, size):
    yield ((Send(1, range(1)),) if rank == 0 else ())
    yield ((Recv(0, range(1)),) if rank == 2 else ())


def race(rank, size):
    yield (Barrier(tuple(range(size))),)
    yield (GetReduce(tuple(range(size)), range(size), range(size)),)
    yield (Barrier(tuple(range(size))),)


def wrong_rank(rank, size):
    yield (Send(size, range(1)),)


def wrong_run(rank, size):
    yield Send(rank ^ 1, range(-1, 1)), Recv(rank ^ 1, range(2))


def uneven_rounds(rank, size):
    yield from exchange(rank, size)
    if rank == 2:
        yield ()


def lone_move(rank, size):
    yield Send(rank ^ 1, range(1))


def no_rounds(rank, size):
    return size


def failing(rank, size):
    yield ()
    raise KeyError("chunks")


def put_outside(rank, size):
    yield (Barrier(tuple(range(size))),)
    yield (Put(rank ^ 1, range(1), range(size, size + 1)),)
    yield (Barrier(tuple(range(size))),)


WRONG = {
    lost_chunk: "lost_chunk is wrong: all_reduce on 4 ranks: rank 0 ends with chunk 3 of r0 in [3], "
    "must be chunk 3 of r0 + r1 + r2 + r3",
    doubled_addend: "doubled_addend is wrong: all_reduce on 4 ranks: rank 0 ends with "
    "chunk 0 of 2*r0 + 2*r1 + 2*r2 + 2*r3 in [0], must be chunk 0 of r0 + r1 + r2 + r3",
    deadlock: "deadlock is wrong: deadlock: rank 0 in round 0 waits to send [0] to rank 1; "
    "rank 2 in round 1 waits to receive [0] from rank 0",
    race: "race is wrong: race: rank 1 in round 1 would get and reduce [0-3] of ranks 0-3 into [0-3], which rank 2 may "
    "still write",
    wrong_rank: "wrong_rank: rank 0 of 4 in round 0: to 4 is out of range: use ranks from 0 to 3",
    wrong_run: "wrong_run: rank 0 of 4 in round 0: run range(-1, 1) is not a run of chunks: use range(first, last + 1)",
    uneven_rounds: "uneven_rounds: rank 2 has 3 rounds, and rank 0 has 2: yield () for a round without moves",
    lone_move: "lone_move: rank 0 of 4 in round 0 yields Send(to=1, run=range(0, 1)): yield a tuple of moves, as "
    "(Send(1, range(1)),)",
    no_rounds: "no_rounds fails for rank 0 of 4: TypeError: it returns 4: write a generator that yields rounds",
    failing: "failing fails for rank 0 of 4: KeyError: 'chunks'",
    put_outside: "put_outside: rank 0 in round 1 would put [0] into [4] of rank 1: only the vector's 4 chunks can be "
    "accessed",
}
