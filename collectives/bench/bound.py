"""What no algorithm can beat: memory that must be copied in a node, or what must pass a node's wire."""

from collections.abc import Sequence

from collectives.cost import Network


def bound_s(collective: str, nbytes: int, nodes: Sequence[Sequence[int]], network: Network) -> float | None:
    """Seconds that a vector needs at the rates measured; None where nothing must move."""
    size = sum(map(len, nodes))
    if size == 1 or not nbytes:
        return None
    if len(nodes) > 1:
        return nbytes * on_wire(collective, nodes) * network.gate.beta_s_per_byte
    return nbytes * in_memory(collective, size) * network.copy_s_per_byte * max(1.0, size / network.cores)


def shared_device_bound_s(collective: str, nbytes: int, size: int, copy_s_per_byte: float | None) -> float | None:
    """Seconds that a vector needs between ranks that share a device, whose memory copies at that rate.

    An all-reduce reads and writes each rank's vector: so do as many copies as there are ranks, one after the other.

    >>> shared_device_bound_s("all_reduce", 100, 4, copy_s_per_byte=0.5)
    200.0
    """
    if size == 1 or not nbytes or copy_s_per_byte is None:
        return None
    return nbytes * in_memory(collective, size) * copy_s_per_byte * size


def in_memory(collective: str, size: int) -> float:
    """How often each rank copies the vector, all of them at once, where the copying is shared alike.

    A copy reads and writes: to read p vectors and write one is (p + 1) / 2 copies.

    >>> in_memory("all_reduce", 4), in_memory("reduce", 4), in_memory("gather", 4)
    (1.0, 0.625, 0.25)
    """
    shares = {
        "reduce_scatter": (size + 1) / (2 * size),
        "reduce": (size + 1) / (2 * size),
        "broadcast": (size - 1) / size,
        "gather": 1 / size,
        "scatter": 1 / size,
    }
    return shares.get(collective, 1.0)


def on_wire(collective: str, nodes: Sequence[Sequence[int]]) -> float:
    """How many vectors pass the busiest node's wire, one way.

    >>> nodes = ((0, 1), (2, 3), (4, 5), (6, 7))
    >>> on_wire("all_reduce", nodes), on_wire("all_to_all", nodes), on_wire("all_gather", nodes)
    (1.5, 1.5, 0.75)
    """
    size, lengths = sum(map(len, nodes)), [len(node) for node in nodes]
    match collective:
        case "all_reduce":
            return 2 * (len(nodes) - 1) / len(nodes)
        case "broadcast" | "reduce":
            return 1.0
        case "all_to_all":
            return max(length * (size - length) / size for length in lengths)
    return (size - min(lengths)) / size


def bus_factor(collective: str, size: int) -> float:
    """What nccl-tests multiplies bytes of vector a second by, for the bytes that a rank's link carries.

    >>> [bus_factor(name, 4) for name in ("all_reduce", "all_gather", "broadcast")]
    [1.5, 0.75, 1.0]
    """
    if collective in ("broadcast", "reduce"):
        return 1.0
    return (2 if collective == "all_reduce" else 1) * (size - 1) / size
