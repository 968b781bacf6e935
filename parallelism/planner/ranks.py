"""Ranks of a running job: their measured speed, memory and links, and the best layout for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import collectives
from collectives.job import environment, system
from collectives.schedule.network import Nodes
from parallelism.numerics.clipping import BITS, highest, sum_of_squares
from parallelism.pipeline.balance import relative_speeds
from parallelism.pipeline.layer_times import now
from parallelism.planner.cluster import GIGABIT, GIGABYTE, Cluster, ClusterHost
from parallelism.planner.flops import block_flops
from parallelism.planner.layout import TrainingJob
from parallelism.planner.place import SPARE, Machine
from parallelism.planner.search import PlannedLayout, best
from parallelism.planner.shape import ModelShape

LEAST_S, BLOCK_S = 0.1, 0.5  # of measurements; a block's is longer than a limited host's turns without a core
MOST_TOKENS = {"cpu": 256, "cuda": 4096}  # of a measured block, by the kind of device, if samples are no longer
PROBED_BLOCKS, UPDATED_ELEMENTS = 2, 1 << 22
PROBES = 5, 1  # measurements of each speed of the network, and warm-ups
MESSAGE_BYTES, MESSAGES = 1 << 20, 3  # between hosts, each way


def start() -> collectives.Communicator:
    """Return the communicator of all ranks; each computes with the threads of a rank from now on.  Collective."""
    torch.set_num_threads(environment.threads_per_rank())
    return collectives.world()


def best_layout(
    comm: collectives.Communicator, job: TrainingJob, fixed: Mapping[str, Any] = {}, device: str = "cpu"
) -> PlannedLayout:
    """Return the best layout for the ranks of `comm` with the `fixed` values, computed on rank 0.  Collective.

    Its replicas have equal numbers of micro-batches.

    Raises: InputError on every rank if no layout fits, or the model cannot be divided.
    """
    hardware = machine(comm, job, device)
    with comm.agreed("best_layout"):
        planned = best(job, hardware, fixed, moves=False) if comm.rank == 0 else None
    return comm.broadcast_object(planned)


def machine(comm: collectives.Communicator, job: TrainingJob, device: str = "cpu") -> Machine:
    """Measure the ranks of `comm` while all compute at once; link speeds are those that `comm` uses.  Collective."""
    nodes, names = comm.topology.nodes, comm.host_names()
    cluster = cluster_of([names[node[0]] for node in nodes], nodes, own_speed(comm, job, device), device)
    cluster = cluster._replace(sync_s=sync_s(comm, job, device))
    relative = relative_speeds([1 / host.tflops for host in cluster.hosts])  # equal ones, but for noise, are 1
    fast = min(host.tflops / speed for host, speed in zip(cluster.hosts, relative, strict=True))
    hosts = [replace(host, tflops=fast * speed) for host, speed in zip(cluster.hosts, relative, strict=True)]
    return cluster._replace(hosts=hosts).machine(comm.network, SPARE)._replace(nodes=nodes)


def measured_cluster(comm: collectives.Communicator, job: TrainingJob, device: str = "cpu") -> Cluster:
    """Measure the ranks of `comm` while all compute at once, and the links of their hosts.  Collective."""
    from collectives.bench.constants import speeds  # loads MPI, and so not with this module

    nodes, names = comm.topology.nodes, comm.host_names()
    cluster = cluster_of([names[node[0]] for node in nodes], nodes, own_speed(comm, job, device), device)
    network, rates = speeds(comm, *PROBES), host_rates(comm)
    hosts = [replace(host, gbit=rate / GIGABIT) for host, rate in zip(cluster.hosts, rates, strict=False)]
    return cluster._replace(hosts=hosts or cluster.hosts, network=network, sync_s=sync_s(comm, job, device))


def own_speed(comm: collectives.Communicator, job: TrainingJob, device: str) -> np.ndarray:
    """Measure ranks' FLOP/s, bytes of memory, and seconds of a minimal pass and of an element's update.  Collective.

    Shapes: (ranks, 4).
    """
    ranks = len(comm.topology.nodes[comm.topology.node_of[comm.rank]])
    comm.barrier()
    own = [flops_per_s(job, device), memory_bytes(device, ranks), least_pass_s(job, device), update_s(job, device)]
    return comm.all_gather(np.array(own)).reshape(comm.size, len(own))


def cluster_of(names: Sequence[str], nodes: Nodes, ranks: np.ndarray, device: str) -> Cluster:
    """Return the cluster of the slowest rank of each node, and of its rank with least memory."""
    hosts = []
    for name, node in zip(names, nodes, strict=True):
        rate, memory, *_ = ranks[list(node)].min(0).tolist()
        hosts.append(ClusterHost(name, len(node), rate / 1e12, memory / GIGABYTE))
    least_s, element_s = ranks[:, 2:].min(0).tolist()
    return Cluster(hosts, least_pass_s=least_s, overlaps=device != "cpu", update_s=element_s)


def sync_s(comm: collectives.Communicator, job: TrainingJob, device: str) -> float:
    """Measure for how long ranks wait for each other after blocks' forward passes; 0 on devices.  Collective."""
    if device != "cpu":
        return 0.0
    blocks, x = probe(job, device)
    own_s = seconds(lambda: blocks(x), device)
    number = max(1, int(BLOCK_S / comm.all_reduce(np.array([own_s]), op="max")[0]))
    times_s = []
    for waits in (False, True):
        comm.barrier()
        begin_s = time.perf_counter()
        for _ in range(number):
            blocks(x)
            if waits:
                comm.barrier()
        times_s.append((time.perf_counter() - begin_s) / number)
    alone_s, together_s = comm.all_reduce(np.array(times_s), op="max").tolist()
    return max(0.0, together_s - alone_s)


def host_rates(comm: collectives.Communicator) -> list[float]:
    """Measure the bytes a second of each host's link; nothing for one host.  Collective."""
    first = [node[0] for node in comm.topology.nodes]
    if len(first) == 1:
        return []
    rates, message = np.zeros(len(first)), np.zeros(MESSAGE_BYTES, np.uint8)
    for hosts in rounds_of_pairs(len(first)):
        comm.barrier()
        for own in map(list, hosts):
            pair = first[own[0]], first[own[1]]
            if comm.rank in pair:
                rates[own] = np.maximum(rates[own], MESSAGE_BYTES / exchange_s(comm, pair, message))
    return comm.all_reduce(rates, op="max").tolist()


def rounds_of_pairs(number: int) -> Iterator[list[tuple[int, int]]]:
    """Yield pairs of hosts that exchange messages at once: each meets several, of which some are fast.

    >>> [*rounds_of_pairs(3)]
    [[(0, 1)], [(1, 2)], [(0, 2)]]
    """
    for power in range((number - 1).bit_length()):
        shift = 1 << power
        pairs = [(host, host + shift) for host in range(number - shift)]
        for parity in range(2):
            if disjoint := [pair for pair in pairs if pair[0] // shift % 2 == parity]:
                yield disjoint


def exchange_s(comm: collectives.Communicator, pair: tuple[int, int], message: np.ndarray) -> float:
    """Return the least seconds in which a message goes one way between two ranks, which both call this."""
    times_s = []
    for _ in range(1 + MESSAGES):
        begin_s = time.perf_counter()
        for act in (comm.send, comm.recv)[:: 1 if comm.rank == pair[0] else -1]:
            act(message, sum(pair) - comm.rank)
        times_s.append((time.perf_counter() - begin_s) / 2)
    return min(times_s[1:])


def flops_per_s(job: TrainingJob, device: str = "cpu") -> float:
    """Measure the speed of both passes of the model's blocks, in floating-point operations per second.

    On a processor, the time of minimal blocks' three passes is no part of it.
    """
    blocks, x = probe(job, device)
    flops = 3 * len(blocks) * block_flops(job.model) * x.shape[:-1].numel()
    all_s = seconds(lambda: blocks(x).sum().backward(), device, BLOCK_S)
    launches_s = 3 * len(blocks) * least_pass_s(job, device) if device == "cpu" else 0.0
    return flops / max(all_s / 2, all_s - launches_s)


def probe(job: TrainingJob, device: str) -> tuple[nn.Sequential, Tensor]:
    """Return some of the model's blocks, and their input.  Shapes of the input: (samples, block_size, n_embd).

    As there are several, one finds its weights in no cache.
    """
    model, dtype = job.model, getattr(torch, job.dtype)
    samples = max(1, MOST_TOKENS[torch.device(device).type] // model.block_size)
    sizes = model.n_embd, model.hidden_width, model.n_head, model.num_kv_heads, model.head_size
    x = torch.randn(samples, model.block_size, model.n_embd, device=device, dtype=dtype, requires_grad=True)
    blocks = [ProbeBlock(model, *sizes) for _ in range(min(PROBED_BLOCKS, model.n_layer))]
    return nn.Sequential(*blocks).to(device, dtype), x


def update_s(job: TrainingJob, device: str = "cpu") -> float:
    """Measure the seconds for an element to clip and zero its gradient, and to update it; 0 on devices.

    On a device, all of them take as long as their memory needs.  No cache has all of the elements.
    """
    if device != "cpu":
        return 0.0
    param, elements = nn.Parameter(torch.zeros(UPDATED_ELEMENTS)), torch.rand(UPDATED_ELEMENTS)
    param.grad = elements
    optimizer = torch.optim.SGD([param], 0.1, 0.9) if job.optimizer == "sgd" else torch.optim.AdamW([param], fused=True)
    one = torch.ones((), dtype=torch.float64)

    def update() -> None:
        highest([elements], elements.device)
        sum_of_squares([elements], one, BITS)
        elements.mul_(1.0)
        optimizer.step()
        elements.zero_()

    return seconds(update, device) / len(elements)


def least_pass_s(job: TrainingJob, device: str = "cpu") -> float:
    """Measure the time of a minimal block of the model's kind, which is launch overhead."""
    block = minimal_block(job.model).to(device)
    x = torch.ones(1, 2, block.width, device=device)
    return seconds(lambda: block(x), device)


def minimal_block(model: ModelShape) -> ProbeBlock:
    """Return the operations of a block of a model on as few elements as possible."""
    return ProbeBlock(model, 4, 8, heads=2, kv_heads=1 if model.num_kv_heads < model.n_head else 2, head_size=2)


class ProbeBlock(nn.Module):
    """The operations of a pre-norm block of a model, with sizes of its own.

    It has as many experts as the model, and grouped heads, gates and rotations if the model has them.

    Shapes: x and result (batch, seq, width).
    """

    def __init__(self, model: ModelShape, width: int, hidden: int, heads: int, kv_heads: int, head_size: int):
        super().__init__()
        self.heads, self.model, self.width, self.head_size = [heads, kv_heads, kv_heads], model, width, head_size
        norm = nn.RMSNorm if model.has_rms_norms else nn.LayerNorm
        self.norms = nn.ModuleList(norm(width) for _ in range(2))
        self.qkv = nn.Linear(width, sum(self.heads) * self.head_size, bias=model.bias or model.qkv_bias)
        self.out = nn.Linear(heads * head_size, width, bias=model.bias or model.out_bias)
        num_mlps, columns = model.num_experts or 1, hidden * (2 if model.is_gated else 1)
        bias = (model.bias or model.mlp_bias) and not model.num_experts
        self.first = nn.ModuleList(nn.Linear(width, columns, bias=bias) for _ in range(num_mlps))
        self.second = nn.ModuleList(nn.Linear(hidden, width, bias=bias) for _ in range(num_mlps))
        self.router = nn.Linear(width, model.num_experts, bias=False) if model.num_experts else None
        self.drop = nn.Dropout(model.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norms[0](x))
        normed = self.norms[1](x)
        return x + self.drop(self.mix(normed) if self.router else self.mlp(0, normed))

    def attend(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # (batch, heads, seq, head_size)
        q, k, v = heads.split(self.heads, dim=1)
        if not self.model.embeds_positions:
            angles = torch.arange(q.shape[2], device=q.device)[:, None, None] * 0.5  # (seq, 1, 1)
            turns = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
            q, k, v = rotate(q, *turns), rotate(k, *turns), v.clone()
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] < q.shape[1])
        return self.drop(self.out(y.transpose(1, 2).flatten(2)))  # (batch, seq, width)

    def mlp(self, number: int, x: Tensor) -> Tensor:
        x = self.first[number](x)
        if self.model.is_gated:
            gate, up = x.chunk(2, dim=-1)
            return self.second[number](F.silu(gate) * up)
        return self.second[number](F.gelu(x, approximate="tanh"))

    def mix(self, x: Tensor) -> Tensor:
        assert self.router
        scores, num_choices = self.router(x.flatten(0, 1)).sigmoid(), self.model.experts_per_token  # (tokens, experts)
        experts = scores.topk(num_choices).indices  # (tokens, choices)
        weights = scores.gather(-1, experts)
        weights = weights / weights.sum(-1, keepdim=True)
        order = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=self.model.num_experts).tolist()
        rows = x.flatten(0, 1).index_select(0, order // num_choices)  # (rows, width), by expert
        y = torch.cat([self.mlp(number, part) for number, part in enumerate(rows.split(counts))])
        y = y * weights.index_select(0, order // num_choices).gather(1, (order % num_choices)[:, None])
        return torch.zeros_like(x).flatten(0, 1).index_add(0, order // num_choices, y).view(x.shape)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.transpose(1, 2).chunk(2, dim=-1)  # (batch, seq, heads, head_size/2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).transpose(1, 2)


def seconds(act: Callable[[], object], device: str, least_s: float = LEAST_S) -> float:
    """Return the mean seconds per call, over at least `least_s`."""
    act()
    number, begin = 0, now(device)
    while (elapsed_s := now(device) - begin) < least_s:
        act()
        number += 1
    return elapsed_s / number


def memory_bytes(device: str = "cpu", ranks: int = 1) -> float:
    """Return the bytes of a device's memory, or a rank's part of its host's free memory."""
    if device != "cpu":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return system.available_memory_bytes() / ranks
