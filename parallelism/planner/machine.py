"""Machine model: nodes, links, and the speed and memory of a rank."""

from typing import NamedTuple

from collectives.schedule.cost import Network, Nodes

SPARE = 0.1  # fraction of memory reserved for libraries and fragmentation, which are not counted


class Machine(NamedTuple):
    """Nodes and links; `flops_per_s` is a rank's speed in matrix products, `memory_bytes` its capacity.

    A pass of a block takes at least `least_pass_s`, however small the block is.
    """

    nodes: Nodes
    network: Network
    flops_per_s: float
    memory_bytes: float
    least_pass_s: float = 0.0

    @property
    def world_size(self) -> int:
        return sum(map(len, self.nodes))

    @property
    def node_of(self) -> tuple[int, ...]:
        """The node of each rank."""
        homes = {rank: number for number, node in enumerate(self.nodes) for rank in node}
        return tuple(homes[rank] for rank in range(self.world_size))


class DeviceSpec(NamedTuple):
    """A device: peak speed of matrix products by dtype, and memory."""

    peak_flops_per_s: dict[str, float]
    memory_bytes: float


DEVICES = {  # by fabric
    # NVIDIA, H100 datasheet, SXM: half of the value for sparse matrices; float32 without the tensor cores' TF32.
    "ndr": DeviceSpec({"bfloat16": 989e12, "float16": 989e12, "float32": 67e12, "float64": 67e12}, 80e9),
    # NVIDIA, A100 datasheet, 40 GB, likewise.
    "slingshot": DeviceSpec({"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12, "float64": 19.5e12}, 40e9),
}
