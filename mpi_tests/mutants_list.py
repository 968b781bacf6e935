"""Mutants for `mutants.py`: plausible faults of one place each, and the few tests that should catch each of them.

`old` must occur exactly once in the file.
"""

from __future__ import annotations

from typing import NamedTuple


class Selection(NamedTuple):
    """Tests of a file anywhere beneath mpi_tests/, filtered by pytest's -k, on `ranks` ranks; 0: without MPI."""

    file: str
    keys: str = ""
    ranks: int = 0

    def __str__(self) -> str:
        """Describe them in one line.

        >>> print(Selection("test_zero.py", "sgd", ranks=2))
        test_zero.py -k 'sgd' on 2 ranks
        """
        keys = f" -k '{self.keys}'" if self.keys else ""
        return f"{self.file}{keys}{f' on {self.ranks} ranks' if self.ranks else ''}"

    @property
    def need_ranks(self) -> bool:
        return self.ranks > 0


class Mutant(NamedTuple):
    """A fault: `new` in place of `old` in a file."""

    file: str
    old: str
    new: str
    tests: tuple[Selection, ...]

    @property
    def fault(self) -> str:
        """The fault in one line.

        >>> Mutant("a.py", "  wait(peer)", "", ()).fault
        'wait(peer) -> nothing'
        """
        old, new = (" ".join(text.split()) or "nothing" for text in (self.old, self.new))
        return f"{old} -> {new}"

    def __str__(self) -> str:
        return f"{self.file}: {self.fault}"

    @property
    def need_ranks(self) -> bool:
        return any(tests.need_ranks for tests in self.tests)


def mutant(file: str, old: str, new: str, *tests: tuple) -> Mutant:
    return Mutant(file, old, new, tuple(Selection(*each) for each in tests))


ALGORITHMS = [
    mutant(
        "collectives/algorithms/ring.py",
        "first=rank - 1, take=RecvReduce",
        "first=rank, take=RecvReduce",
        ("test_schedule.py", "contract_holds and reduce_scatter-ring"),
    ),
    mutant(
        "collectives/algorithms/recursive.py",
        "Send(peer, block(peer, bit)), RecvReduce",
        "Send(peer, block(rank, bit)), RecvReduce",
        ("test_schedule.py", "contract_holds and recursive_halving"),
    ),
    mutant(
        "collectives/algorithms/tree.py",
        "Recv((rank - reach) % size, run)",
        "Recv((rank + reach) % size, run)",
        ("test_schedule.py", "contract_holds and broadcast-binomial"),
    ),
    mutant(
        "collectives/algorithms/chain.py",
        "[Recv(rank + 1, run) for run in nth(down + 1, num_chunks)",
        "[RecvReduce(rank + 1, run) for run in nth(down + 1, num_chunks)",
        ("test_schedule.py", "contract_holds and all_reduce-chain"),
    ),
    mutant(
        "collectives/algorithms/bruck.py",
        "nothing = range(0)\n    for bit in range((size - 1).bit_length())",
        "nothing = range(0)\n    for bit in range(size.bit_length() - 1)",
        ("test_schedule.py", "contract_holds and barrier-dissemination"),
    ),
    mutant(
        "collectives/algorithms/tree.py",
        "return (position & -position).bit_length() - 1\n",
        "return (position & -position).bit_length() // 2\n",
        ("test_schedule.py", "contract_holds and double_tree"),
    ),
    mutant(
        "collectives/schedule/proof.py",
        "if send.move.run != receive.move.run:",
        "if len(send.move.run) != len(receive.move.run):",
        ("test_schedule.py", "joined_chunks"),
    ),
    mutant(
        "collectives/schedule/proof.py",
        "if not apart and len(bounds) <= (num_chunks or size) and is_joinable(spec, programs):",
        "if not apart and len(bounds) <= (num_chunks or size):",
        ("test_schedule.py", "contract_holds or catches"),
    ),
    mutant(
        "collectives/algorithms/own_proof.py",
        "if len(rounds) != len(programs[0]):",
        "if len(rounds) < len(programs[0]):",
        ("test_own_schedules.py", "wrong_schedules"),
    ),
    mutant(
        "collectives/algorithms/own_proof.py",
        "if strange := [peer for peer in peers if peer not in node]:",
        "if strange := [peer for peer in peers if peer < 0]:",
        ("test_own_schedules.py", "cannot_be_run"),
    ),
    mutant(
        "collectives/algorithms/variants.py",
        "        if seconds >= least_s:\n            break\n",
        "        if seconds >= least_s:\n            continue\n",
        ("test_own_schedules.py", "dearer"),
    ),
    mutant(
        "collectives/algorithms/groups.py",
        "runs = laid(0, (each * row.count(member) for member in node))",
        "runs = laid(0, (each for member in node))",
        ("test_hierarchical.py", "variants"),
    ),
    mutant(
        "collectives/algorithms/bruck.py",
        "inbox((rank - slot) % size",
        "inbox((rank + slot) % size",
        ("test_schedule.py", "contract_holds and all_to_all-bruck"),
    ),
    mutant(
        "collectives/algorithms/direct.py",
        "into(s, size, apart)) for s in others(rank, size))\n    yield arrival(size)",
        "into(s, size, apart)) for s in others(rank, size))",
        ("test_schedule.py", "contract_holds and all_reduce-two_shot"),
    ),
    mutant(
        "collectives/algorithms/hierarchical.py",
        "partial(algorithm, root=ranks.index(root))",
        "partial(algorithm, root=0)",
        ("test_hierarchical.py", "any_groups and broadcast"),
    ),
    mutant(
        "collectives/schedule/moves.py",
        "length + (i < extra)",
        "length + (i >= parts - extra)",
        ("test_schedule.py", "shares_are"),
    ),
    mutant(
        "collectives/schedule/proof.py",
        "world.heard if spec.gives is Chunks.NONE else ()",
        "()",
        ("test_schedule.py", "check_catches and barrier"),
    ),
]

PROGRAMS = "collectives/runtime/backends/message_programs.py"
BETWEEN = ("test_calls.py", "between_nodes or other_nodes or another_node", 4)
CUBE = ("test_calls.py", "all_to_alls_between", 8)
ON_COMPARISON = [
    mutant(
        PROGRAMS,
        "self.instruction(kernels.OPEN, self.seen, 1)",
        "self.instruction(kernels.OPEN, self.seen, 0)",
        BETWEEN,
    ),
    mutant(
        PROGRAMS,
        "        self.instruction(kernels.VERDICT, self.headers.verdict)\n",
        "",
        BETWEEN,
    ),
    mutant(
        PROGRAMS,
        "kernels.MERGE, self.seen,",
        "kernels.MERGE, address_of(np.zeros(2, np.int64)),",
        BETWEEN,
    ),
    mutant(
        PROGRAMS,
        "local(headers.seen), HEADER_BYTES)",
        "local(headers.seen), 0)",
        BETWEEN,
    ),
    mutant(
        PROGRAMS,
        "frame[kernels.ON_MISMATCH], self.frame[kernels.YIELDS] = assembler.on_mismatch, YIELDS",
        "frame[kernels.YIELDS] = YIELDS",
        BETWEEN,
    ),
    mutant(PROGRAMS, "if divisor > 1:", "if divisor < 1:", BETWEEN),
    mutant(
        "collectives/runtime/backends/kernels.py",
        "frame[BINDING] << 32 | frame[NUMBER]",
        "frame[BINDING] << 32",
        BETWEEN,
    ),
    mutant(
        PROGRAMS,
        "in_caller_arrays=False, is_shared=True",
        "in_caller_arrays=False, is_shared=False",
        CUBE,
    ),
    mutant(PROGRAMS, "in_caller_arrays=False", "in_caller_arrays=True", BETWEEN),
    mutant(PROGRAMS, "begin = ends[leaves, partner]", "begin = 0", CUBE),
    mutant(
        "collectives/algorithms/leaders.py",
        "run_of[slot] = (run_of[slot] + num_teams) % (2 * num_teams)",
        "run_of[slot] = run_of[slot] % (2 * num_teams)",
        ("test_hierarchical.py", "any_groups or any_number"),
    ),
    mutant(
        "collectives/runtime/started.py",
        "            if arrival.has_failed:\n                return False\n",
        "",
        ("test_calls.py", "started_calls", 4),
    ),
]

RUNTIME = [
    mutant(
        "collectives/runtime/backends/messages.py",
        "at_once = reduce_late or any(into != sent for into, sent in clashes)",
        "at_once = reduce_late",
        ("test_device.py", "still_being_sent", 2),
    ),
    mutant(
        "collectives/runtime/backends/messages.py",
        "if source < self.mpi.rank:",
        "if source >= 0:",
        ("test_collectives.py", "same_bits and 2-ranks and float32", 2),
    ),
    mutant(
        "collectives/runtime/plan.py",
        'f"{self.name}{where}: {why}"',
        'f"{self.name}: {why}"',
        ("test_communicator.py", "error_of_mpi", 2),
    ),
    mutant(
        "collectives/runtime/plan.py",
        "keep_in_flight(request for bound in self.rounds for request in bound.in_flight())",
        "pass",
        ("test_freed.py", "comes_after", 2),
    ),
    mutant(
        "collectives/runtime/context.py",
        "return self.num_plans % (self.num_tags // TAGS) * TAGS",
        "return 0",
        ("test_watchdog.py", "another_order"),
    ),
    mutant(
        "collectives/runtime/backends/direct.py",
        'phases.Reduction(call.kernel_op, dtype, call.size if call.op == "avg" else 1)',
        "phases.Reduction(call.kernel_op, dtype, 1)",
        ("test_data_parallel.py", "whole_batch and 2-ranks", 2),
    ),
    mutant(
        "collectives/runtime/backends/point_to_point.py",
        "return (code, nbytes) == (self.code, self.wire.nbytes)",
        "return nbytes == self.wire.nbytes",
        ("test_communicator.py", "of_another_length_or_dtype", 2),
    ),
    mutant(
        "parallelism/pipeline/driver.py",
        "self.first_micro_batch + self.now.micro_batch",
        "self.now.micro_batch",
        ("test_pipeline.py", "handed_over and 4-ranks-1f1b", 4),
    ),
    mutant(
        "collectives/runtime/backends/point_to_point.py",
        "if peer not in self.node:",
        "if peer in self.node:",
        ("test_communicator.py", "in_short_parts", 2),
    ),
    mutant(
        "collectives/mpi4py/methods.py",
        "return method(comm, sendbuf, recvbuf, *rest, **named) if rest",
        "return method(comm, sendbuf, recvbuf, **named) if rest",
        ("test_mpi4py_face.py", "every_form and 2-ranks", 2),
    ),
    mutant(
        "collectives/runtime/backends/kernels.py",
        "total[i] = lesser(a[i], b[i])",
        "total[i] = greater(a[i], b[i])",
        ("test_finite.py", "losses_come_before and 2-ranks", 2),
    ),
    mutant(
        "collectives/runtime/backends/kernels.py",
        "while load_acquire(slots[peer] + number % 2 * LINE_BYTES) < number:",
        "while load_acquire(slots[peer] + number % 2 * LINE_BYTES) < number - 2:",
        ("test_direct.py", "come_when_they_like and 2-ranks and two_shot", 2),
    ),
    mutant(
        "collectives/runtime/backends/kernels.py",
        "bits + np.uint32(0x7FFF) + ",
        "bits + np.uint32(0x8000) + ",
        ("test_direct.py", "rounded_once and 3-ranks", 3),
        ("test_precision.py", "sums_are_rounded_once and 3-ranks", 3),
    ),
    mutant(
        "collectives/runtime/backends/kernels.py",
        "memcpy(target + end, source + end, nbytes - end)",
        "memcpy(target + end, source + end, 0)",
        ("test_reproducible.py", "long_arrays and 3-ranks", 3),
    ),
    mutant(
        "collectives/runtime/backends/kernels.py",
        "channel[NEXT_TURN] = 1 - channel[NEXT_TURN]",
        "channel[NEXT_TURN] = 0",
        ("test_direct.py", "come_when_they_like and 3-ranks and one_shot", 3),
    ),
    mutant(
        "collectives/runtime/backends/kernels.py",
        "same &= load(slot + SLOT_NUMBER) == frame[NUMBER]",
        "same &= frame[NUMBER] >= 0",
        ("test_calls.py", "skips_a_repeated_call and 2-ranks", 2),
    ),
    mutant(
        "collectives/runtime/backends/kernels.py",
        "same &= load(slot + SLOT_BINDING) == frame[BINDING]",
        "same &= frame[BINDING] >= 0",
        ("test_calls.py", "other_signatures and 2-ranks", 2),
    ),
    mutant(
        "collectives/runtime/backends/phases.py",
        "first._replace(register=first.register + turn) if chunk >= self.width",
        "first if chunk >= self.width",
        ("test_direct.py", "segments_follow and 3-ranks and staged", 3),
    ),
    mutant(
        "collectives/runtime/backends/phases.py",
        "min(step, length - segment * step)",
        "step",
        ("test_direct.py", "segments_follow and 2-ranks and two_shot", 2),
    ),
    mutant(
        "collectives/arrays/memory.py",
        "zip(self.blocks, in_use, strict=True) if not is_used]\n        fitting",
        "zip(self.blocks, in_use, strict=True) if block.free]\n        fitting",
        ("test_direct.py", "used_again and 2-ranks", 2),
    ),
]

CHECKS = [
    mutant(
        "collectives/runtime/agreement.py",
        'else f"{description}#{number}"',
        'else f"{description}#"',
        ("test_disagreement.py", "one_call_behind and 2-ranks", 2),
    ),
    mutant(
        "collectives/runtime/agreement.py",
        "if highest != -lowest:",
        "if failure and highest != -lowest:",
        ("test_disagreement.py", "different_things and 2-ranks and ops", 2),
    ),
    mutant(
        "collectives/runtime/reports/call_log.py",
        "if entry.number > max(",
        "if entry.number >= max(",
        ("test_record.py", "only_counted"),
    ),
    mutant(
        "collectives/runtime/reports/watchdog.py",
        "if overdue & (self.since.keys() | self.on_device().keys()):",
        "if overdue:",
        ("test_watchdog.py", "comes_while_the_others_ask"),
    ),
    mutant(
        "collectives/runtime/reports/watchdog.py",
        "reports[r].numbers.get(label, 0) < number]",
        "reports[r].numbers.get(label, 0) <= number]",
        ("test_watchdog.py", "does_not_enter"),
    ),
    mutant(
        "collectives/schedule/spec.py",
        '("reduce_scatter", ALL, OWN, "everyone"',
        '("reduce_scatter", ALL, ALL, "everyone"',
        ("test_schedule.py", "promises and reduce_scatter"),
    ),
    mutant(
        "collectives/runtime/backends/native_mpi.py",
        "is_even = call.send_counts is None if spec.exchanges else len(set(o.counts)) == 1",
        "is_even = True",
        ("test_collectives.py", "uneven_counts and 3-ranks", 3),
    ),
    mutant(
        "collectives/runtime/call/operands.py",
        "return counts, list(call.recv_counts or counts)",
        "return counts, counts",
        ("test_collectives.py", "uneven_all_to_all and 3-ranks", 3),
    ),
    mutant(
        "collectives/runtime/call/call.py",
        "if len(counts) != self.size or min(counts) < 0:",
        "if len(counts) != self.size:",
        ("test_disagreement.py", "get_wrong and 2-ranks and below", 2),
    ),
    mutant(
        "collectives/arrays/ops.py",
        "is_first | (is_equal & (b[index] < a[index]))",
        "is_first | (is_equal & (b[index] > a[index]))",
        ("test_ops.py", "least and 3-ranks", 3),
    ),
    mutant(
        "collectives/runtime/call/call.py",
        "in_order = self.reproducible or (isinstance(self.op, Op) and not self.op.commutative)",
        "in_order = self.reproducible",
        ("test_ops.py", "in_every_algorithm and False and 3-ranks or another_order and 3-ranks", 3),
    ),
    mutant(
        "collectives/runtime/call/packed.py",
        "after.append((view, numpy_view(packed)))",
        "after.append((numpy_view(packed), view))",
        ("test_strided.py", "good_as_its_copy and all_reduce and 3-ranks", 3),
    ),
    mutant(
        "collectives/runtime/call/call.py",
        "(row.in_order or not in_order)",
        "True",
        ("test_reproducible.py", "every_length and 5-ranks", 5),
        ("test_disagreement.py", "get_wrong and 2-ranks and order", 2),
    ),
    mutant(
        "collectives/arrays/ops.py",
        'if dtype in HALVES and op not in ("min", "max") else dtype',
        'if dtype in HALVES and op == "avg" else dtype',
        ("test_precision.py", "sums_are_rounded_once and 3-ranks", 3),
    ),
    mutant(
        "collectives/arrays/views.py",
        'f"op {op!r} of {dtype}: {remedy}"',
        'f"op {op!r} of {dtype}"',
        ("test_arrays.py", "ops_that_make_sense"),
    ),
]

TOOLS = [
    mutant(
        "collectives/schedule/cost.py",
        "max(seconds, link.alpha_s + slowest_s)",
        "max(seconds, link.alpha_s)",
        ("test_cost.py", "shares_its_way_out"),
    ),
    mutant(
        "collectives/schedule/cost.py",
        "slowest_s = max(slowest_s, waits_s",
        "slowest_s = min(slowest_s, waits_s",
        ("test_simulate.py", "slowest_of_the_ports"),
    ),
    mutant(
        "collectives/schedule/cost.py",
        "num_inner / len(inner) if n in inner else 1",
        "num_inner if n in inner else 1",
        ("test_simulate.py", "some_stand_for_all"),
    ),
    mutant(
        "collectives/schedule/cost.py",
        "copying = work.copied * chunk_bytes * network.copy_s_per_byte",
        "copying = work.copied * chunk_bytes * network.gamma_s_per_byte",
        ("test_cost.py", "moves_of_shared_memory"),
    ),
    mutant(
        "collectives/schedule/cost.py",
        "reduced += len(sources) * len(run)",
        "reduced += len(run)",
        ("test_cost.py", "moves_of_shared_memory"),
    ),
    mutant(
        "collectives/runtime/choose/auto.py",
        "[2 * winners[-1][0]]",
        "[winners[-1][0]]",
        ("test_tuning.py", "nearest_measured"),
    ),
    mutant(
        "collectives/runtime/choose/auto.py",
        'if take(data, "version", int) != VERSION:',
        'if not take(data, "version", int):',
        ("test_tuning.py", "a_bad_file"),
    ),
    mutant(
        "collectives/runtime/choose/auto.py",
        "tuple(row for row in rows if row.access <= access)",
        "tuple(rows)",
        ("test_tuning.py", "in_reach_is_usable"),
    ),
    mutant(
        "collectives/runtime/choose/auto.py",
        "meet_s=network.meet_s + alpha, pull_s_per_byte=beta",
        "meet_s=network.meet_s + alpha",
        ("test_tuning.py", "ordinary_arrays_are_read"),
    ),
    mutant(
        "collectives/runtime/choose/auto.py",
        "pull_s_per_byte=network.staged_s_per_byte",
        "pull_s_per_byte=0.0",
        ("test_tuning.py", "cores_share_a_cache"),
    ),
    mutant(
        "collectives/runtime/backends/kernels.py",
        "memcpy(target + begin, source + begin, min(PIECE_BYTES, nbytes - begin))",
        "memcpy(target + begin, source + begin, PIECE_BYTES)",
        ("test_kernels.py", "wherever_source_and_target_lie"),
    ),
    mutant(
        "collectives/schedule/draw.py",
        "(m.end * scale, m.dest)",
        "(m.end * scale, m.source)",
        ("test_draw.py", "one_scale"),
    ),
    mutant(
        "collectives/schedule/events.py",
        "self.free[resource] = end + pause_s",
        "self.free[resource] = end",
        ("test_simulate.py", "share_a_node_s_way"),
    ),
    mutant(
        "collectives/schedule/events.py",
        "begin, port_s)",
        "begin, 0.0)",
        ("test_simulate.py", "share_a_node_s_way"),
    ),
    mutant(
        "collectives/runtime/plan.py",
        "rounds, self.rounds = self.rounds, []",
        "rounds = self.rounds",
        ("test_freed.py", "freed_while_it_is_freed", 1),
    ),
    mutant(
        "collectives/bench/constants.py",
        "min(at_once.beta_s_per_byte / most, alone.beta_s_per_byte)",
        "min(at_once.beta_s_per_byte, alone.beta_s_per_byte)",
        ("test_links.py", "all_pairs_at_once"),
    ),
    mutant(
        "training/parallel/validation.py",
        "mine[all_have:]] if some_have_more else []",
        "mine[all_have:]] if len(mine) > all_have else []",
        ("test_samples.py", "as_long_on_all_ranks"),
    ),
    mutant(
        "collectives/algorithms/multi_ring.py",
        "node[(ring + 1 + i) % len(node)]",
        "node[(1 + i) % len(node)]",
        ("test_hierarchical.py", "fill_all_ports"),
    ),
    mutant(
        "collectives/schedule/events.py",
        "self.network.links[levels[-1]], path",
        "self.network.links[levels[0]], path",
        ("test_simulate.py", "lone_message"),
    ),
    mutant(
        "collectives/schedule/spec.py",
        '(2 if collective == "all_reduce" else 1) * (size - 1) / size',
        '(2 if collective == "all_reduce" else 1) * (size - 1)',
        ("test_bench.py", "bus_bandwidth"),
    ),
    mutant(
        "collectives/bench/trial.py",
        '"slowest rank": "max"',
        '"slowest rank": "min"',
        ("test_bench.py", "slowest", 2),
    ),
    mutant(
        "collectives/doctor.py",
        "need = ranks * RANK_MIB",
        "need = RANK_MIB",
        ("test_doctor.py", "test_shared_memory"),
    ),
    mutant(
        "collectives/doctor.py",
        'outcome.output.count("size 2") == 2',
        "outcome.output",
        ("test_doctor.py", "trial_that_fails"),
    ),
    mutant(
        "collectives/job/launch.py",
        "        signal.alarm(ENDING_S)",
        "        pass",
        ("test_survival.py", "within_a_limit"),
    ),
    mutant(
        "collectives/job/launch.py",
        "    if mpi4py_ends_mpi():\n        limit_mpi4py()",
        "    limit_mpi4py()",
        ("test_survival.py", "end_as_programs"),
    ),
    mutant(
        "collectives/job/launch.py",
        "0 if alone else first_left()",
        "0",
        ("test_survival.py", "reports_what"),
    ),
    mutant(
        "collectives/job/launch.py",
        "rc.initialize if rc.finalize is None else rc.finalize",
        "rc.finalize is not False",
        ("test_watchdog.py", "told_not_to"),
    ),
    mutant(
        "collectives/torch_backend/rendezvous.py",
        "for _ in range(2):",
        "for _ in range(1):",
        ("test_torch_reconfigure.py", "not_come", 3),
    ),
    mutant(
        "collectives/torch_backend/rendezvous.py",
        "sorted(ranks) if isinstance(handles, Set) else ranks",
        "sorted(ranks)",
        ("test_torch_reconfigure.py", "change_numbers", 3),
    ),
    mutant(
        "collectives/torch_backend/group.py",
        "if comm is self.comm and not isinstance",
        "if not isinstance",
        ("test_torch_reconfigure.py", "fail_alone", 3),
    ),
    mutant(
        "collectives/torch_backend/group.py",
        "self.rank_and_size = comm.rank, comm.size",
        "self.rank_and_size = comm.rank, super().size()",
        ("test_torch_reconfigure.py", "ddp_divides", 3),
    ),
    mutant(
        "collectives/torch_backend/calls.py",
        "(tensor.detach() * factor).to(tensor.dtype)",
        "tensor.detach().clone()",
        ("test_torch_backend.py", "sums_of_products and 2-ranks", 2),
    ),
    mutant(
        "collectives/torch_backend/calls.py",
        "run, self.note, self.call_site",
        'run, "", self.call_site',
        ("test_torch_backend.py", "ranks_that_disagree and 2-ranks", 2),
    ),
    mutant(
        "collectives/arrays/packing.py",
        "return [(part, region) for region, part in self.pairs]",
        "return []",
        ("test_arrays.py", "pieces_of_memory"),
    ),
    mutant(
        "collectives/mpi4py/buffers.py",
        "to_itself().Sendrecv(source, 0, 0, target, 0, 0)",
        "to_itself().Sendrecv(target, 0, 0, source, 0, 0)",
        ("test_mpi4py_face.py", "results_are_the_librarys and allgatherv and 2-ranks", 2),
    ),
    mutant(
        "collectives/mpi4py/calls.py",
        "results = [Packing(out, [(recv[:own], out)])] if in_place else ()",
        "results = ()",
        ("test_mpi4py_face.py", "results_are_the_librarys and reduce_scatter and 2-ranks", 2),
    ),
    mutant(
        "collectives/horovod/tensor_calls.py",
        "        each.store()\n",
        "        each.load()\n",
        ("test_horovod.py", "tensors_with_gaps and 2-ranks", 2),
    ),
    mutant(
        "collectives/torch_backend/work.py",
        "self.stream.wait_event(self.before)",
        "assert self.before",
        ("test_torch_order.py",),
    ),
    mutant(
        "collectives/torch_backend/work.py",
        "            self.after = self.stream.record_event()\n",
        "            self.stream.synchronize()\n",
        ("test_torch_order.py",),
    ),
    mutant(
        "collectives/torch_backend/work.py",
        "            raise self.error\n        follow(self.after, self.device)\n",
        "            raise self.error\n",
        ("test_torch_order.py",),
    ),
    mutant(
        "collectives/torch_backend/work.py",
        "for tensor in (*self.tensors, *self.inputs):",
        "for tensor in self.tensors:",
        ("test_torch_order.py",),
    ),
    mutant(
        "collectives/torch_backend/work.py",
        "with torch.cuda.stream(self.stream) if self.stream else nullcontext():",
        "with nullcontext():",
        ("test_torch_order.py",),
    ),
    mutant(
        "collectives/torch_backend/work.py",
        "            follow(self.after, self.device)\n            return\n",
        "            return\n",
        ("test_torch_order.py",),
    ),
    mutant(
        "collectives/torch_backend/work.py",
        "return self.over.is_set() and is_past(self.after)",
        "return self.over.is_set()",
        ("test_torch_order.py",),
    ),
    mutant(
        "hostfiles/link_mpi.py",
        'Path(sys.prefix, "lib", names[0])',
        'Path(sys.prefix, "lib", names[1])',
        ("test_link_mpi.py", "by_the_name"),
    ),
]

DIVIDED = [
    mutant(
        "parallelism/data/units.py",
        'return self if self.undivided is None or shard_of(param, "ep") else self.undivided',
        "return self",
        ("test_experts_training.py", "plain_mixture and 2-ranks", 2),
    ),
    mutant(
        "parallelism/data/replica.py",
        '{"op": "avg", **reduction}',
        "reduction",
        ("test_data_parallel.py", "whole_batch and 2-ranks", 2),
    ),
    mutant(
        "parallelism/data/averaging.py",
        "        self._queue.wait()\n        self._begin()",
        "        self._queue.wait()",
        ("test_data_parallel.py", "whole_batch and 2-ranks", 2),
    ),
    mutant(
        "parallelism/buffers/arena.py",
        "comm.broadcast(self.parameters, root=0)",
        "comm.broadcast(self.parameters, root=comm.size - 1)",
        ("test_data_parallel.py", "start_from and 2-ranks", 2),
    ),
    mutant(
        "parallelism/buffers/autograd.py",
        "Conjugate.apply(x, same, axis.all_reduce)",
        "Conjugate.apply(x, same, same)",
        ("test_autograd.py", "2-ranks", 2),
    ),
    mutant(
        "parallelism/tensor/layers.py",
        "num_real = min(max(vocab_size - begin, 0), logits.shape[-1])",
        "num_real = logits.shape[-1]",
        ("test_tensor_parallel.py", "every_gradient and 2-ranks", 2),
    ),
    mutant(
        "parallelism/sequence/token_shards.py",
        "return Pair(everything, slice(None, half), causal=False)",
        "return Pair(everything, slice(half, None), causal=False)",
        ("test_sequence_parallel.py", "every_gradient and 2-ranks and plain and ring and not documents", 2),
    ),
    mutant(
        "parallelism/sequence/ring_attention.py",
        "dkv += coming_home.wait()",
        "coming_home.wait()",
        ("test_sequence_parallel.py", "every_gradient and 2-ranks and plain and ring and not documents", 2),
    ),
    mutant(
        "parallelism/sequence/sequence_parallel.py",
        "lambda gradient: size * gradient",
        "lambda gradient: gradient",
        ("test_sequence_parallel.py", "every_gradient and 2-ranks and plain and ring and not documents", 2),
    ),
    mutant(
        "parallelism/buffers/tensor_collectives.py",
        "counts[(self.rank + 1) % self.size]",
        "counts[(self.rank - 1) % self.size]",
        ("test_sequence_parallel.py", "every_gradient and 4-ranks and plain-ring and not documents", 4),
    ),
    mutant(
        "parallelism/numerics/pointwise_kernels.py",
        "(s + x[i] * slope * SLOPE * (ONE + F(3) * square))",
        "(s + x[i] * slope * SLOPE * (ONE + square))",
        ("test_pointwise.py", "gelus_are"),
    ),
    mutant(
        "parallelism/numerics/pointwise.py",
        "rows(cos), rows(-sin), tokens(out)",
        "rows(cos), rows(sin), tokens(out)",
        ("test_pointwise.py", "rotated_heads"),
    ),
    mutant(
        "training/parallel/staged.py",
        "counts=rank_speeds[mesh.pp.rank] == 1",
        "counts=True",
        ("test_train.py", "slower_rank and search", 2),
    ),
    mutant(
        "parallelism/pipeline/layer_times.py",
        'np.array([seconds]), op="max"',
        'np.array([seconds]), op="min"',
        ("test_train.py", "speeds_of", 4),
    ),
    mutant(
        "parallelism/pipeline/balance.py", "sums[begin]) / speed)", "sums[begin]))", ("test_partition.py", "no_cut")
    ),
    mutant(
        "parallelism/pipeline/schedule/search.py",
        "costs_of(home), limits)",
        "costs_of(homes[0]), limits)",
        ("test_pipeline_search.py", "ranks_of_stages"),
    ),
    mutant(
        "training/fork_server.py",
        "            ready.sort(",
        "            sorted(ready, ",
        ("test_forked.py", "two_processes"),
    ),
    mutant("training/fork_server.py", "    threading._shutdown()", "    pass", ("test_forked.py", "script_ends")),
    mutant("training/fork_server.py", "    atexit._run_exitfuncs()", "    pass", ("test_forked.py", "script_ends")),
    mutant(
        "training/parallel/staged.py",
        "        fuse(model)\n",
        "        pass\n",
        ("test_train.py", "in_one_pass and 2-ranks", 2),
    ),
    mutant(
        "parallelism/numerics/dropout.py",
        "torch.arange(q.shape[1], device=q.device) + self.rank * q.shape[1]",
        "torch.arange(q.shape[1], device=q.device)",
        ("test_sequence_parallel.py", "dropout_is_the_same and 2-ranks and ulysses", 2),
    ),
    mutant(
        "parallelism/mesh.py",
        "if not missing and count != world_size:",
        "if not missing and count > world_size:",
        ("test_mesh.py", "multiply"),
    ),
    mutant(
        "parallelism/numerics/clipping.py",
        "*(mesh.coords[axis] for axis in shards_of(p)), ",
        "",
        ("test_precision_training.py", "split_layers_and_stages and float16 and not bfloat16", 4),
    ),
    mutant(
        "parallelism/data/sampler.py",
        "self.part = slice(ends[self.rank], ends[self.rank + 1])",
        "self.part = slice(self.rank, None, len(lengths))",
        ("test_sampler.py", "equally_and_in_order"),
    ),
    mutant(
        "parallelism/data/sampler.py",
        "key=[self.seed, self.epoch]",
        "key=[self.seed, 0]",
        ("test_sampler.py", "epochs_differ"),
    ),
    mutant(
        "parallelism/numerics/exact.py",
        "if peak > self.peak.numpy() or math.isnan(peak):",
        "if not peak <= self.peak.numpy():",
        ("test_exact.py", "not_finite"),
    ),
    mutant(
        "parallelism/numerics/exact.py",
        "self.quanta.masked_fill_(~fit, torch.nan)",
        "self.quanta",
        ("test_reproducible.py", "outgrows", 2),
    ),
    mutant(
        "parallelism/numerics/exact.py",
        "+ HEADROOM_BITS - self.bits",
        "- self.bits",
        ("test_reproducible.py", "outgrows", 2),
    ),
    mutant(
        "parallelism/numerics/exact.py",
        "if self.is_clear and self.total is not None:",
        "if self.total is None:",
        ("test_exact.py", "with_strides"),
    ),
    mutant(
        "parallelism/numerics/exact.py",
        "if self.waiting is None and not self.observe:",
        "if not self.observe:",
        ("test_exact.py", "moves_to_its_home"),
    ),
    mutant(
        "parallelism/numerics/exact_kernels.py",
        "rounded if replaces else total[i] + rounded",
        "total[i] + rounded",
        ("test_exact.py", "moves_to_its_home"),
    ),
    mutant(
        "parallelism/sequence/part_attention.py",
        "if keys <= number]",
        "if number <= keys]",
        ("test_reproducible_sequences.py", "kinds_in_a_ring", 2),
    ),
    mutant(
        "parallelism/sequence/part_attention.py",
        "totals[keys].add_(of_keys) if keys in totals else of_keys",
        "of_keys",
        ("test_sequence_parallel.py", "by_parts_is_that_of_the_whole"),
    ),
    mutant(
        "parallelism/numerics/exact_kernels.py",
        "rounded = np.int64(np.rint(np.float64(gradient[i]) * scale))",
        "rounded = np.int64(np.float64(gradient[i]) * scale)",
        ("test_exact.py", "rounded_fractions_in_any_order"),
    ),
    mutant(
        "parallelism/numerics/clipping.py",
        "before[key], total[key]",
        "0, total[key]",
        ("test_clipping.py", "pieces_have", 2),
    ),
    mutant(
        "parallelism/pipeline/pipeline_parallel.py",
        "first = int(numbers[: mesh.dp.rank].sum())",
        "first = 0",
        ("test_pipeline.py", "handed_over", 4),
    ),
    mutant(
        "parallelism/tensor/tiles.py",
        "return tree_sum(ranks.all_to_all(x).unflatten(0, (ranks.size, -1)).unbind())",
        "return ranks.all_to_all(x).unflatten(0, (ranks.size, -1)).sum(0)",
        ("test_reproducible.py", "tiles and not llama", 4),
    ),
    mutant(
        "parallelism/tensor/layers.py",
        "lambda x: x.contiguous().view_as(x), Tensor.contiguous",
        "lambda x: x.view_as(x), lambda x: x.view_as(x)",
        ("test_reproducible.py", "llama_in_tiles", 4),
    ),
    mutant(
        "parallelism/placement.py",
        "return self.own_tiles if self.sequence else self.tiles",
        "return self.own_tiles",
        ("test_reproducible.py", "tensor_parallelism_in_tiles and not zero", 2),
    ),
    mutant(
        "training/parallel/run.py",
        "by_sample=bool(config.tiles)",
        "by_sample=False",
        ("test_reproducible.py", "sequence_parallel_mode", 4),
    ),
    mutant(
        "training/loop.py",
        "(run.num_micro_batches if config.reproducible else len(batches))",
        "len(batches)",
        ("test_reproducible.py", "data_parallelism", 3),
    ),
    mutant(
        "parallelism/step/local_parameters.py",
        "(rounding_of(param) or several)",
        "several",
        ("test_reproducible.py", "one_micro_batch", 3),
    ),
    mutant(
        "parallelism/buffers/gradients.py",
        "home.add_(gradient)",
        "home.copy_(gradient)",
        ("test_deferred.py", "weights_get"),
    ),
    mutant(
        "parallelism/numerics/recomputation.py",
        "position.samples, position.positions = samples, positions",
        "position.samples, position.positions = now",
        ("test_recompute.py", "pipelines_with_dropout and gpipe"),
    ),
    mutant(
        "parallelism/numerics/non_finite.py",
        "self._first[0] = own * self.size + self.rank",
        "self._first[0] = own * self.size",
        ("test_finite.py", "losses_come_before and 3-ranks", 3),
    ),
    mutant(
        "parallelism/numerics/non_finite.py",
        "torch.where(finite, self.good_steps + 1, 0.0)",
        "self.good_steps + finite",
        ("test_precision_training.py", "loss_scale_grows"),
    ),
    mutant(
        "parallelism/numerics/non_finite.py",
        "self.good_steps = torch.where(grows, 0.0, good_steps)",
        "self.good_steps = good_steps",
        ("test_precision_training.py", "loss_scale_grows"),
    ),
    mutant(
        "parallelism/numerics/clipping.py",
        "torch.where(scale < 1, scale, 1.0)",
        "scale.clamp(max=1.0)",
        ("test_finite.py", "norms_beyond", 1),
    ),
    mutant(
        "parallelism/numerics/clipping.py",
        "torch.where(scale < 1, scale, 1.0)",
        "min(scale, torch.ones_like(scale))",
        ("test_step_reads.py", "a_step and bfloat16", 1),
    ),
    mutant(
        "parallelism/numerics/non_finite.py",
        'skipped = by_scale if self.policy == "ignore" else ~is_good',
        "skipped = ~is_good",
        ("test_finite.py", "done_all_the_same", 2),
    ),
    mutant(
        "parallelism/numerics/non_finite.py",
        "by_scale = ~is_good & (kind != LOSS) & self.scale.can_fall\n        self.scale.update(is_good)",
        "self.scale.update(is_good)\n        by_scale = ~is_good & (kind != LOSS) & self.scale.can_fall",
        ("test_finite.py", "scale_is_blamed", 2),
    ),
    mutant(
        "parallelism/buffers/transfer.py",
        "self.ended.wait()",
        "",
        ("test_transfer.py", "of_a_gpu"),
    ),
    mutant(
        "parallelism/buffers/transfer.py",
        "elapsed_time(self.event) / 1e3",
        "elapsed_time(self.event)",
        ("test_transfer.py", "as_its_events_say"),
    ),
    mutant(
        "parallelism/numerics/squares.cu",
        "square >> limb",
        "square >> (limb + 1)",
        ("test_device_squares.py", "rounded_fractions"),
    ),
    mutant(
        "parallelism/data/replica.py",
        "move_buffers(own.model, device)",
        "pass",
        ("test_placement.py", "num_experts", 1),
    ),
    mutant(
        "parallelism/sequence/partial_attention.py",
        "log.contiguous()",
        "log",
        ("test_fused_attention.py", "as_it_lies"),
    ),
    mutant(
        "parallelism/tensor/sharding_plan.py",
        "rank, sequence) if module.p else module",
        "rank, sequence)",
        ("test_compile.py", "one_graph", 1),
    ),
    mutant(
        "parallelism/buffers/transfer.py",
        "self.x.copy_(x, non_blocking=True)",
        "self.x.copy_(x, non_blocking=False)",
        ("test_transfer.py", "of_a_gpu"),
    ),
    mutant(
        "parallelism/buffers/transfer.py",
        "x.pin_memory().to(device, non_blocking=True)",
        "x.to(device, non_blocking=True)",
        ("test_transfer.py", "leaves"),
    ),
    mutant(
        "parallelism/numerics/master_weights.py",
        "originals[name].reshape(-1)[self.spans[name]] if name in originals else param.data.view(-1)",
        "param.data.view(-1)",
        ("test_precision_training.py", "before_they_were_rounded", 1),
    ),
]

PIPELINES = [
    mutant(
        "parallelism/pipeline/schedule/basic.py",
        "last = range(2 * num_ranks - 1, 0, -2)",
        "last = range(2 * num_ranks + 1, 1, -2)",
        ("test_pipeline_schedule.py", "interleaved_is_that_of_torch"),
    ),
    mutant(
        "parallelism/pipeline/schedule/zero_bubble.py",
        "if micro_batch >= rank else",
        "if micro_batch > rank else",
        ("test_pipeline_schedule.py", "is_proved and zb_h1"),
    ),
    mutant(
        "parallelism/pipeline/schedule/proof.py",
        "if alive > peak:",
        "if alive > peak + 1:",
        ("test_pipeline_schedule.py", "damage_is_found"),
    ),
    mutant(
        "parallelism/pipeline/schedule/price.py",
        "now_s = max(now_s, come_s)",
        "now_s = come_s",
        ("test_pipeline_price.py", "played_by_hand"),
    ),
    mutant(
        "parallelism/pipeline/balance.py",
        "lambda others, time: others + time**2",
        "lambda others, time: others + time",
        ("test_partition.py", "cheaper_dearest"),
    ),
    mutant(
        "parallelism/pipeline/driver.py",
        "(torch.ones_like(y) * self.weights[micro_batch]).to(y.dtype)",
        "torch.full_like(y, 1 / len(self.weights))",
        ("test_pipeline.py", "count_by_their_targets", 2),
    ),
    mutant(
        "parallelism/data/replica.py",
        "self.own.tied.sum_up()",
        "pass",
        ("test_pipeline.py", "plain_model and 2-ranks and 1f1b", 2),
    ),
    mutant(
        "parallelism/data/averaging.py",
        "self._passes[param] * self.own.num_micro_batches",
        "self._passes[param]",
        ("test_pipeline.py", "ranks_beside and 1f1b and 4-ranks", 4),
    ),
    mutant(
        "parallelism/step/local_parameters.py",
        "and (rounding_of(param) or several):",
        "and rounding_of(param):",
        ("test_same_bits.py", "pipelines_beside and 1f1b and 2-ranks", 2),
    ),
    mutant(
        "parallelism/numerics/clipping.py",
        "[first.get(name, name), ",
        "[name, ",
        ("test_pipeline.py", "norm_counts_tied", 2),
    ),
]

ZERO = [
    mutant(
        "parallelism/data/replica.py",
        "run(self.across)",
        "run([])",
        ("test_zero.py", "groups_share_and_replicate and 6-ranks", 6),
    ),
    mutant(
        "parallelism/data/replica.py",
        "with self.waiting():\n            run(self.gathering)",
        "with self.waiting():\n            run([])",
        ("test_zero.py", "sgd and 2-ranks", 2),
    ),
    mutant(
        "parallelism/zero/gradients.py",
        "finish(self.buffer)",
        "pass",
        ("test_zero.py", "sgd and 2-ranks", 2),
    ),
    mutant(
        "parallelism/buffers/gradients.py",
        "total.add_(gradient)",
        "total.copy_(gradient)",
        ("test_zero.py", "micro_batches_add_up and 2-ranks", 2),
    ),
    mutant(
        "parallelism/zero/parameters.py",
        "return 1 + index % 2 if index else 0",
        "return 1 if index else 0",
        ("test_zero.py", "gathered_at_a_time and 2-ranks", 2),
    ),
]

CHECKPOINTS = [
    mutant(
        "parallelism/checkpoint/checkpoints.py",
        "for bound in x.aminmax())",
        "for bound in x.aminmax()[:1])",
        ("test_checkpoint.py", "not_finite", 2),
    ),
    mutant(
        "parallelism/checkpoint/shards.py",
        "if piece.blocks(block) != [piece.checksums[number]]:",
        "if not piece.checksums:",
        ("test_checkpoint_parts.py", "flipped_byte"),
    ),
    mutant(
        "parallelism/checkpoint/shards.py",
        "if crc32(head(self.path, self.entry.header_bytes)) != self.entry.header_checksum:",
        "if not self.entry.header_checksum:",
        ("test_checkpoint_parts.py", "flipped_byte"),
    ),
    mutant(
        "parallelism/checkpoint/shards.py",
        "    sync(path)\n    entry = ShardEntry(",
        "    entry = ShardEntry(",
        ("test_checkpoint_parts.py", "on_the_disk_before"),
    ),
    mutant(
        "parallelism/checkpoint/reading.py",
        "if sealed(values) != text:",
        "if not values:",
        ("test_checkpoint_parts.py", "flipped_byte or index_that_is_none"),
    ),
    mutant(
        "parallelism/checkpoint/folders.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        ("test_checkpoint.py", "two_runs_write", 2),
    ),
    mutant(
        "parallelism/checkpoint/extent.py",
        "(there < start + count)",
        "(there <= start + count)",
        ("test_checkpoint_parts.py", "two_have_in_common or others_read"),
    ),
    mutant(
        "parallelism/checkpoint/checkpoints.py",
        "while paths and whole < keep:",
        "while paths and whole < keep - 1:",
        ("test_checkpoint_parts.py", "several_are_kept"),
    ),
    mutant(
        "parallelism/checkpoint/hashes.py",
        "for part in {key: part for parts in of_ranks for key, part in parts.items()}.values():",
        "for part in [part for parts in of_ranks for part in parts.values()]:",
        ("test_checkpoint_parts.py", "hash_is_the_same"),
    ),
    mutant(
        "parallelism/checkpoint/hashes.py",
        "yield index + (here - begins)[run], index + (there - begins)[run]",
        "yield index + (here - begins)[run], index + (here - begins)[run]",
        ("test_hashes.py", "any_shards and torch"),
    ),
    mutant(
        "parallelism/checkpoint/hashes.py",
        "[*tensor, *total]",
        "[tensor[0], *total]",
        ("test_hashes.py", "names_kinds"),
    ),
    mutant(
        "parallelism/numerics/pointwise_kernels.py",
        "x = mix(there + i, np.int64(bits[here + i]))",
        "x = mix(here + i, np.int64(bits[here + i]))",
        ("test_hashes.py", "any_shards and compiled"),
    ),
]

PLANNER = [
    mutant(
        "parallelism/planner/counts.py",
        "split = attention_params(self.model) + mlps",
        "split = 2 * attention_params(self.model) + mlps",
        ("test_planner.py", "bytes_of_each_layout and 1f1b"),
    ),
    mutant(
        "parallelism/planner/memory.py",
        "precision.gradient / (owners if stage >= 2 else 1)",
        "precision.gradient / (owners if stage >= 1 else 1)",
        ("test_planner.py", "mixed_precision_is_as_published"),
    ),
    mutant(
        "parallelism/planner/step.py",
        "if zero_stage in (1, 2):",
        "if zero_stage == 1:",
        ("test_planner.py", "gather_what_they_have_updated"),
    ),
    mutant(
        "parallelism/planner/replicas.py",
        'return self.owners.seconds("reduce_scatter", num_params * self.gradient_bytes)',
        'return self.owners.seconds("all_reduce", num_params * self.gradient_bytes)',
        ("test_planner.py", "zero or hand or pipeline"),
    ),
]

MODELS = [
    mutant(
        "models/attention.py",
        "documents[:, None, :]).tril()[:, None]",
        "documents[:, None, :])[:, None]",
        ("test_gpt.py", "documents_and_positions"),
    ),
    mutant(
        "models/decoder.py",
        'num_residuals = 2 * n_layer if name.endswith("c_proj.weight") else 1',
        "num_residuals = 1",
        ("test_gpt.py", "follow_gpt2"),
    ),
    mutant(
        "models/rotary.py",
        "second * cos + first * sin",
        "second * cos - first * sin",
        ("test_llama.py", "complex_numbers or formulas"),
    ),
    mutant(
        "training/weights/families.py",
        '("mlp.gate_proj", "mlp.up_proj")',
        '("mlp.up_proj", "mlp.gate_proj")',
        ("test_llama.py", "formulas"),
    ),
    mutant(
        "training/weights/gpt2.py",
        'constant("layer_norm_epsilon", 1e-5)',
        'constant("layer_norm_epsilon", 1e-6)',
        ("test_families.py", "bad_sizes and gpt2"),
    ),
    mutant(
        "models/attention.py",
        ".tril().triu(1 - self.window)",
        ".tril().triu(-self.window)",
        ("test_families.py", "formulas and mistral"),
    ),
    mutant(
        "models/rotary.py",
        "factor *= (0.1 * math.log(config.rope_factor) + 1) ** 2",
        "factor *= 0.1 * math.log(config.rope_factor) + 1",
        ("test_families.py", "formulas and yarn"),
    ),
    mutant(
        "models/mixture.py",
        "if not self.has_softmax:",
        "if True:",
        ("test_mixture.py", "softmax"),
    ),
    mutant(
        "parallelism/tensor/layers.py",
        "(autograd.copy(param, self.axis.ranks) for param in params)",
        "params",
        ("test_families.py", "qwen3 and tp2", 4),
    ),
    mutant(
        "training/weights/hf.py",
        "if file_shape != config_shape:",
        'if file_shape == "absent":',
        ("test_hf.py", "lacks or shapes or another"),
    ),
    mutant(
        "training/data/tokens.py",
        "return together[:, :-1], together[:, 1:]",
        "return together[:, :-1], together[:, :-1]",
        ("test_data.py", "window"),
    ),
    mutant(
        "training/data/token_files.py",
        "if num_tokens != length:",
        "if num_tokens < length:",
        ("test_data.py",),
    ),
    mutant(
        "training/data/token_files.py",
        "first = bisect_right(self.ends, self.start)",
        "first = bisect_right(self.ends, self.start) * 0",
        ("test_text_files.py", "many_files"),
    ),
    mutant(
        "training/data/token_files.py",
        "max(self.start - begin, 0)",
        "0",
        ("test_text_files.py", "many_files"),
    ),
    mutant(
        "training/data/token_files.py",
        " < vocab_size <= 1 << 8 * ids.itemsize",
        " < vocab_size",
        ("test_data.py", "without_a_header"),
    ),
    mutant(
        "training/data/token_files.py",
        "int(ids.min()) < 1 << 16 <= int(ids.max())",
        "True",
        ("test_data.py", "ambiguous"),
    ),
    mutant(
        "training/data/nanogpt.py",
        'raise pickle.UnpicklingError(f"it names {module}.{name}")',
        "return super().find_class(module, name)",
        ("test_data.py", "not_run"),
    ),
    mutant(
        "training/data/text_files.py",
        'if beginning(path).lstrip().startswith(b"["):',
        "if False:",
        ("test_text_files.py", "what_they_are"),
    ),
    mutant(
        "training/settings/config.py",
        "None if shape is None else presets.weights_preset(vars(shape))",
        "None",
        ("test_init_from.py", "the_shape"),
    ),
    mutant(
        "training/data/samples.py",
        "first_sample = step * len(self.windows)",
        "first_sample = 0",
        ("test_samples.py", "dropout"),
    ),
    mutant(
        "training/compare.py",
        "if each >= step), default=None)",
        "), default=None)",
        ("test_compare.py", "first_element"),
    ),
    mutant(
        "training/compare.py",
        'self.hashes[step].hash == whole.get("hash")',
        'whole.get("hash")',
        ("test_compare.py", "first_element"),
    ),
    mutant(
        "training/loop.py",
        "if run.hashes and run.hashes.step != iteration:",
        "if run.hashes:",
        ("test_hashes.py", "checkpoints_are_hashed", 1),
    ),
    mutant(
        "training/reports/jsonl.py",
        '"a" if facts.first > 1 else "w"',
        '"w"',
        ("test_report.py",),
    ),
    mutant(
        "training/optim/optimizer.py",
        'if p.dim() < 2], "weight_decay": 0.0}',
        'if p.dim() < 2], "weight_decay": weight_decay}',
        ("test_optimizer.py",),
    ),
    mutant(
        "training/optim/optimizer.py",
        "[1 - skipped] * len(steps) if skipped is not None else 1",
        "1",
        ("test_optimizer.py", "skipped"),
    ),
    mutant(
        "training/optim/optimizer.py",
        "found_inf=skipped",
        "found_inf=None",
        ("test_optimizer.py", "skipped"),
    ),
    mutant(
        "training/optim/optimizer.py",
        "[1 - skipped] * len(steps) if skipped is not None else 1",
        "1 - skipped if skipped is not None else 1",
        ("test_step_reads.py", "a_step and bfloat16", 1),
    ),
]

TRAINING = [
    mutant(
        "training/reports/pending.py",
        "meter.peak_flops_per_s and flops_per_s / meter.peak_flops_per_s",
        "meter.peak_flops_per_s and tokens_per_s / meter.peak_flops_per_s",
        ("test_peak_rate.py", "mfu"),
    ),
    mutant(
        "training/reports/peak_rate.py",
        "rate, source = listed / num_sharing,",
        "rate, source = listed,",
        ("test_peak_rate.py", "share_counts_once", 2),
    ),
    mutant(
        "training/reports/peak_rate.py",
        "return count * 2 * size**3",
        "return 2 * size**3",
        ("test_peak_rate.py", "work_by_its_time"),
    ),
    mutant("training/reports/summary.py", "steps[1:] or steps", "steps", ("test_report.py", "summary")),
    mutant(
        "training/loop.py",
        "mean_loss(run, windows) for path, windows in",
        "mean_loss(run, run.val_windows) for path, windows in",
        ("test_validation_files.py", "each_file", 1),
    ),
    mutant(
        "training/reports/profile.py",
        'BACKWARD: "backward"',
        'BACKWARD: "forward"',
        ("test_training_report.py", "last_steps and 1-ranks", 1),
    ),
    mutant(
        "training/reports/torch_events.py",
        'event["args"]["Bytes"]\n',
        "0\n",
        ("test_profile.py", "a_counter", 1),
    ),
    mutant(
        "training/reports/torch_events.py",
        '{**event, "ts": event["ts"] - ahead_us}',
        "{**event}",
        ("test_profile.py", "passes_collectives and dp", 2),
    ),
    mutant(
        "collectives/runtime/reports/run_times.py",
        "        progress.started.remove(times)\n",
        "",
        ("test_run_times.py", "afterwards", 1),
    ),
    mutant(
        "training/reports/pending.py",
        "        if not step.readback.is_late:\n",
        "        if True:\n",
        ("test_step_reads.py", "next_one and 1-ranks", 1),
    ),
    mutant(
        "training/reports/pending.py",
        "        if not step.readback.is_late:\n            self.flush()",
        "",
        ("test_step_reads.py", "next_one and 1-ranks", 1),
    ),
    mutant(
        "training/parallel/saving.py",
        "            before()\n            self.checkpoints",
        "            self.checkpoints",
        ("test_step_reads.py", "before_what_comes", 1),
    ),
    mutant(
        "training/loop.py",
        "run.optimizer.step(verdict.skipped)",
        "run.optimizer.step()",
        ("test_step_reads.py", "stops_for", 2),
    ),
    mutant(
        "parallelism/pipeline/driver.py",
        "self.losses[micro_batch] = y.double()",
        "self.losses[micro_batch] = torch.tensor(float(y.detach()), dtype=torch.float64)",
        ("test_step_reads.py", "any_layout and pp", 4),
    ),
    mutant(
        "training/parallel/device.py",
        "node.index(comm.rank) % torch.cuda.device_count()",
        "comm.rank % torch.cuda.device_count()",
        ("test_training_device.py", "in_turn"),
    ),
    mutant(
        "training/optim/muon.py",
        "param.grad.lerp(mean, momentum)",
        "mean",
        ("test_optimizer.py", "muon_is_torchs"),
    ),
    mutant(
        "training/optim/muon.py",
        "old.copy_(new if skipped is None else torch.where(skipped.bool(), old, new))",
        "old.copy_(new)",
        ("test_optimizer.py", "skipped"),
    ),
    mutant(
        "training/optim/learning_rate.py",
        "max(begin, max_iters - (decay_iters or math.ceil(max_iters / 5)))",
        "max_iters - (decay_iters or math.ceil(max_iters / 5))",
        ("test_learning_rate.py",),
    ),
    mutant(
        "parallelism/zero/matrices.py",
        "return self.shard.whole(shards) if self.shard else shards[0]",
        "return shards[0]",
        ("test_optimizers.py", "muon_is_that and stage", 4),
    ),
    mutant(
        "training/settings/checks.py",
        ": use a multiple of {together}, such as {nearest}, or another micro_batch_size",
        "",
        ("test_refusals.py", "settings and global_batch_size"),
    ),
    mutant(
        "training/parallel/run.py",
        "num_targets * ranks / total",
        "torch.ones_like(num_targets) / len(num_targets)",
        ("test_chat.py", "all_answers and accumulated", 4),
    ),
    mutant(
        "training/loop.py",
        "loss_sum = (run.pipeline.step_losses * num_targets).sum()",
        "loss_sum = run.pipeline.step_losses.sum() * num_targets.mean()",
        ("test_chat.py", "all_answers and accumulated", 4),
    ),
    mutant(
        "training/parallel/validation.py",
        "number = windows.num_targets(part)",
        "number = len(part)",
        ("test_chat.py", "all_answers and accumulated", 4),
    ),
    mutant(
        "training/data/packing.py",
        "np.where(is_answer[1:], ids[1:], CrossEntropy.ignored)",
        "ids[1:]",
        ("test_chat.py", "hold_each_conversation"),
    ),
    mutant(
        "training/data/conversations.py",
        "inside[common[0] : common[-1] + 1] = True",
        "inside[common[0] : common[-1]] = True",
        ("test_chat.py", "learns_the_answers"),
    ),
    mutant(
        "training/data/chat_template.py",
        "begin, turn = self.text(messages[:number], tools, prompts=True)",
        "begin, turn = self.text(messages[:number], tools, prompts=False)",
        ("test_chat.py", "learns_the_answers"),
    ),
    mutant(
        "training/lora/adapters.py",
        "part = layer.weight.split(rows)[target.number]",
        "part = layer.weight.split(rows)[0]",
        ("test_lora.py", "product_of_its_matrices"),
    ),
    mutant(
        "training/lora/adapters.py",
        "return self.B(self.A(x)) * self.scale",
        "return self.B(self.A(x))",
        ("test_lora.py", "product_of_its_matrices"),
    ),
    mutant(
        "parallelism/tensor/layers.py",
        "return between_layers(F.linear, self.axis, x, self.weight)",
        "return F.linear(x, self.weight)",
        ("test_lora.py", "one_process and sequence-parallel", 4),
    ),
    mutant(
        "training/parallel/validation.py",
        "mine, size = selection[dp.rank :: dp.size]",
        "mine, size = selection[:: dp.size]",
        ("test_train.py", "those_of_one_process and 2-ranks", 2),
    ),
    mutant(
        "training/parallel/saving.py",
        "loader.load(self.shards.state(self.optimizer), path, self.same)",
        "self.checkpoints.load(self.shards.state(self.optimizer), path)",
        ("test_train.py", "cannot_go_on and 1-ranks", 1),
    ),
    mutant(
        "training/loop.py",
        "if iteration == config.max_iters or iteration % config.eval_interval == 0:",
        "if iteration % config.eval_interval == 0:",
        ("test_train.py", "those_of_one_process and 2-ranks", 2),
    ),
]

SUPERVISION = [
    mutant(
        "parallelism/checkpoint/snapshots.py",
        "following[index % len(following)]",
        "rank",
        ("test_snapshots.py", "on_two_hosts", 2),
    ),
    mutant(
        "parallelism/checkpoint/snapshots.py",
        "if is_sound(folder, entry)",
        "if (folder / entry.file).exists()",
        ("test_snapshots.py", "no_damage", 1),
    ),
    mutant(
        "parallelism/checkpoint/snapshots.py",
        "return path if path.exists() else path.with_name(name + UNFINISHED)",
        "return path",
        ("test_snapshots.py", "one_index", 2),
    ),
    mutant(
        "parallelism/checkpoint/snapshots.py",
        "key=lambda item: number_of(Path(item[0])), reverse=True",
        "key=lambda item: number_of(Path(item[0]))",
        ("test_snapshots.py", "last_two", 1),
    ),
    mutant(
        "parallelism/checkpoint/snapshots.py",
        "if (needed := (KEEP + 1) * here) > free",
        "if (needed := KEEP * here) > free",
        ("test_snapshots.py", "too_little", 1),
    ),
    mutant(
        "parallelism/checkpoint/snapshots.py",
        "shutil.rmtree(self.directory, ignore_errors=True)",
        "pass",
        ("test_snapshots.py", "leaves_nothing", 1),
    ),
    mutant(
        "parallelism/checkpoint/snapshots.py",
        "missing = sorted(file for file in needed if self.node not in self._holders[file])",
        "missing: list[str] = []",
        ("test_snapshots.py", "comes_back", 2),
    ),
    mutant(
        "training/parallel/saving.py",
        "if config.resume != AUTO:",
        "if True:",
        ("test_survival.py", "training_goes"),
    ),
    mutant(
        "training/supervise.py",
        "self.folders.append(snapshot_folder(memory, checkpoints))",
        "pass",
        ("test_supervise.py", "lost_host"),
    ),
    mutant(
        "training/fork_server.py",
        "os.kill(key.data.pid, signal.SIGKILL)",
        "pass",
        ("test_forked.py", "outlives"),
    ),
    mutant(
        "training/fork_server.py",
        "ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)",
        "pass",
        ("test_forked.py", "outlives"),
    ),
    mutant(
        "training/fork_server.py",
        "load(name)",
        "pass",
        ("test_forked.py", "has_imported"),
    ),
    mutant(
        "training/forked.py",
        "os.kill(pid, number)",
        "pass",
        ("test_forked.py", "signals_reach"),
    ),
    mutant(
        "training/forked.py",
        "os._exit(number)",
        "os._exit(0)",
        ("test_forked.py", "bad_input"),
    ),
    mutant(
        "collectives/job/launch.py",
        "with end_after(environment.start_limit_s()):",
        "with end_after(0):",
        ("test_survival.py", "before_mpi"),
    ),
    mutant(
        "collectives/runtime/reports/watchdog.py",
        "self.progress.failure = deaths",
        "pass",
        ("test_survival.py", "symmetric"),
    ),
    mutant("collectives/communicator.py", "part._base = part.mpi", "pass", ("test_survival.py", "a_part_shrinks")),
    mutant(
        "collectives/job/launch.py",
        "(RankFailure if environment",
        "(CommunicationError if environment",
        ("test_survival.py", "symmetric"),
    ),
    mutant("training/recovery.py", ", resume=AUTO)", ")", ("test_survival.py", "training_goes")),
    mutant(
        "training/recovery.py",
        "if are_whole(names, (weights for _, _, weights in of_ranks)):",
        "if True:",
        ("test_remains.py", "part_of_the_state", 4),
    ),
    mutant(
        "training/parallel/remains.py",
        "names == lengths.keys() and ",
        "",
        ("test_remains.py", "part_of_the_state", 4),
    ),
    mutant(
        "training/parallel/remains.py",
        "in {each for weights in of_ranks for each in weights}",
        "in (each for weights in of_ranks for each in weights)",
        ("test_remains.py", "ranks_that_hold_it", 4),
    ),
    mutant("training/loop.py", "run.saving.offered = 0", "pass", ("test_remains.py", "ranks_that_hold_it", 4)),
    mutant(
        "training/loop.py",
        "run.saving.offer(iteration)",
        "run.saving.offer(iteration - 1)",
        ("test_survival.py", "done_again"),
    ),
    mutant(
        "training/loop.py",
        "iteration < config.max_iters and ",
        "",
        ("test_survival.py", "last_step"),
    ),
    mutant(
        "training/parallel/saving.py",
        "self.exact.exponents = self.exponents",
        "pass",
        ("test_remains.py", "exponents", 2),
    ),
    mutant(
        "training/parallel/run.py",
        "self.saving.out_dir = comm.broadcast_object(self.out_dir)",
        "self.saving.out_dir = self.out_dir",
        ("test_survival.py", "done_again"),
    ),
    mutant(
        "collectives/job/environment.py",
        'os.environ.setdefault("OMPI_MCA_coll", "^han")',
        "pass",
        ("test_survival_hosts.py", "several_hosts"),
    ),
    mutant(
        "collectives/runtime/reports/watchdog.py",
        "kill_process(each.process, each.started)",
        "pass",
        ("test_survival.py", "is_stopped"),
    ),
    mutant("training/recovery.py", 'config.layout == "auto"', "False", ("test_survival.py", "planned_again")),
    mutant(
        "training/settings/layout.py",
        "if comm.broadcast_object(fits)",
        "if True",
        ("test_planner.py", "ranks_left", 3),
    ),
    mutant("training/recovery.py", "global_batch_size=batch, ", "", ("test_survival.py", "training_goes")),
    mutant(
        "training/settings/layout.py",
        "-math.prod(lengths)",
        "math.prod(lengths)",
        ("test_settings.py", "of_fewer_ranks"),
    ),
    mutant(
        "training/settings/layout.py",
        "range(len(nodes), 0, -1)",
        "range(1, len(nodes) + 1)",
        ("test_settings.py", "of_fewer_ranks"),
    ),
    mutant(
        "training/supervise.py",
        "failures = 1 if job.step > reached else failures + 1",
        "failures += 1",
        ("test_supervise.py", "counted_anew"),
    ),
    mutant(
        "training/supervise.py",
        "checkpoints = [path for path in checkpoints if path not in self.older]",
        "pass",
        ("test_supervise.py", "written_itself"),
    ),
    mutant(
        "training/supervision/job.py",
        "self.step, heard_s = newest, time.monotonic()",
        "self.step = newest",
        ("test_supervise.py", "begins_in_time"),
    ),
    mutant(
        "training/supervision/job.py",
        "self.process.returncode == 0 and has_ended(self.heartbeat)",
        "self.process.returncode == 0",
        ("test_supervise.py", "not_come_to_its_end"),
    ),
    mutant(
        "training/supervision/heartbeat.py",
        "any(comm.rank == ranks[0] for ranks in comm.topology.nodes)",
        "comm.rank == 0",
        ("test_supervise.py", "first_rank_of_each_host"),
    ),
    mutant(
        "training/supervision/hosts.py",
        "if answers.get(host, True)][: self.number]",
        "if answers.get(host, True)]",
        ("test_supervise.py", "spare_takes_over"),
    ),
]

ORDER = ("test_device_order.py", "", 3)
GUARDED = ("test_device_direct.py", "context or device_each or closes", 3)
KERNELS = ("test_device_kernels.py", "", 3)
PROGRAMS, PROGRAMS_CU = "collectives/arrays/cuda_programs.py", "collectives/arrays/cuda_programs.cu"
CUDA, ON_DEVICE = "collectives/arrays/cuda.py", "collectives/runtime/backends/on_device.py"
DEVICE_MEMORY, MESSAGES = "collectives/arrays/device_memory.py", "collectives/runtime/backends/messages.py"
ON_IT = "        with self.on_device():\n"
ANYWHERE = "        if True:\n"
WAIT = "        self.runtime.streamWaitEvent(self.stream.ptr, event.ptr)"

CALLS = ("test_device_calls.py", "2-ranks", 2)
DEVICES = [
    mutant(
        "collectives/runtime/backends/devices.py",
        "self.plan.before = [*([(here.x, x)] if self.is_read else []), *self.before]",
        "self.plan.before = self.plan.before or [(here.x, x)]",
        CALLS,
    ),
    mutant(
        "collectives/runtime/backends/devices.py",
        "self.plan.after = [*self.after, *([(result, source)] if self.is_written else [])]",
        "self.plan.after = [*([(result, source)] if self.is_written else []), *self.after]",
        ("test_device_calls.py", "lie_elsewhere and staged and 2-ranks", 2),
    ),
    mutant(
        "collectives/runtime/backends/devices.py",
        "self.before, self.after, self.plan.only = self.plan.before, self.plan.after, None",
        "self.before, self.after = self.plan.before, self.plan.after",
        ("test_device_calls.py", "from_anywhere and 2-ranks", 2),
    ),
    mutant(
        "collectives/runtime/backends/devices.py",
        "if key not in self.pairs or self.pairs[key][0].nbytes < nbytes:",
        "if key not in self.pairs:",
        ("test_device_calls.py", "several_lengths and 2-ranks", 2),
    ),
    mutant(
        "collectives/runtime/backends/devices.py",
        "            (nbytes,) = self.context.agreement.highest([nbytes])\n",
        "            pass\n",
        ("test_device_calls.py", "more_than_the_others and 2-ranks", 2),
    ),
    mutant(
        "collectives/runtime/dispatch.py",
        "windows = Windows() if call.moves else self.windows",
        "windows = self.windows",
        ("test_device_calls.py", "symmetric_on_some and 2-ranks", 2),
    ),
    mutant(
        "collectives/runtime/call/signature.py",
        "home = (address, key) if key else None",
        "home = None",
        ("test_device_calls.py", "symmetric_arrays and 2-ranks", 2),
    ),
    mutant(
        "collectives/runtime/call/signature.py",
        "return (DEVICE, device, dtype, size, home), address, key",
        "return (DEVICE, device.device_name, dtype, size, home), address, key",
        ("test_device_calls.py", "of_two_libraries and 2-ranks", 2),
    ),
    # Records and waits.
    mutant(CUDA, "self.runtime.eventRecord(event.ptr, self.current_stream())", "pass", ORDER),
    mutant(
        CUDA,
        "self.current_stream())\n            self.runtime.streamWaitEvent(self.stream.ptr, event.ptr)",
        "self.current_stream())",
        ORDER,
    ),
    mutant(CUDA, "event.record(self.stream)", "pass", ORDER),
    mutant(CUDA, "self.runtime.streamWaitEvent(self.current_stream(), event.ptr)", "pass", ORDER),
    mutant(CUDA, "self.runtime.eventRecord(event.ptr, self.stream.ptr)", "pass", ORDER),
    mutant(
        CUDA,
        f"wait_for(self, event: Any) -> None:\n{ON_IT}    {WAIT}",
        "wait_for(self, event: Any) -> None:\n        pass",
        ORDER,
    ),
    mutant(CUDA, "self.stream.synchronize()", "pass", ORDER),
    mutant(CUDA, "return torch.cuda.current_stream(self.index).cuda_stream", "return 0", ("test_cuda.py",)),
    # The stream on which kernels run.
    mutant(CUDA, "work(self.stream)", "work()", ORDER),
    mutant(CUDA, "divide(x, divisor, self.stream)", "divide(x, divisor)", ORDER),
    mutant(CUDA, "cast(target, source, self.stream)", "cast(target, source)", ("test_precision.py", "device", 3)),
    # Devices.
    *(
        mutant(CUDA, f"{definition}\n{ON_IT}", f"{definition}\n{ANYWHERE}", GUARDED, ORDER)
        for definition in (
            "    def begin(self) -> None:",
            "    def record(self) -> Event:",
            "    def end(self, event: Any) -> None:",
            "    def synchronize(self) -> None:",
            "    def launch(self, work: cuda_kernels.Launch) -> None:",
            "    def mark(self, event: Any) -> None:",
            "    def wait_for(self, event: Any) -> None:",
            "    def shared_event(self) -> Any:",
            '    def open_event(self, handle: bytes) -> "OpenedEvent":',
            "    def open_memory(self, handle: bytes) -> int:",
            "    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype) -> Any:",
            "    def allocate(self, nbytes: int) -> Any:",
        )
    ),
    mutant(
        CUDA,
        f"    {ON_IT}                self.runtime.memcpyAsync",
        f"    {ANYWHERE}                self.runtime.memcpyAsync",
        GUARDED,
    ),
    # Opened handles are closed, and not too early.
    mutant(CUDA, "self.runtime.ipcCloseMemHandle(address)", "pass", GUARDED),
    mutant(CUDA, "self.runtime.eventDestroy(self.ptr)", "pass", GUARDED),
    mutant(DEVICE_MEMORY, "self.device.close_memory(address)", "pass", GUARDED),
    mutant(DEVICE_MEMORY, "self.device.synchronize()\n        for window", "for window", ORDER),
    mutant(
        DEVICE_MEMORY,
        "self.device.close_memory(address)\n        self.agree_max([0])",
        "self.device.close_memory(address)",
        ("test_device_direct.py", "memory or closes", 3),
    ),
    mutant(
        DEVICE_MEMORY,
        "self.device.synchronize()\n        return super().allocate(nbytes)",
        "return super().allocate(nbytes)",
        ORDER,
    ),
    # Detection of the devices' properties.
    mutant(DEVICE_MEMORY, ", buffer)\n        self.device.synchronize()", ", buffer)", ORDER),
    mutant(
        DEVICE_MEMORY,
        "buffer.dtype))\n            self.device.synchronize()\n",
        "buffer.dtype))\n",
        ORDER,
    ),
    mutant(
        DEVICE_MEMORY,
        "        self.agree_max([0])\n        failure = failure or",
        "        failure = failure or",
        ORDER,
    ),
    # Barriers.
    mutant(ON_DEVICE, "self.device.synchronize()\n        else", "pass\n        else", ORDER),
    # Waits between devices.
    mutant(PROGRAMS_CU, "*program.runs = runs + 1;", "{}", KERNELS),
    mutant(PROGRAMS_CU, "while (static_cast<short>(load_acquire", "if (static_cast<short>(load_acquire", KERNELS),
    mutant(PROGRAMS_CU, "runs % program.num_turns * program.num_steps", "0", KERNELS),
    mutant(PROGRAMS_CU, "+ 1 == gridDim.x", ">= 0", KERNELS),
    mutant(PROGRAMS_CU, "channel.state[BLOCKS] = 0;", "", KERNELS),
    mutant(PROGRAMS_CU, "channel.state[BARRIERS] = number;", "", KERNELS),
    mutant(ON_DEVICE, "last.outs.append(out)", "pass", KERNELS),
    mutant(PROGRAMS, "self.runtime.streamWaitEvent(stream, channel.last[1].ptr)", "pass", KERNELS),
    mutant(DEVICE_MEMORY, "shared or len(self.ranks) > MOST_RANKS", "False", KERNELS),
    mutant(ON_DEVICE, "self.device.mark(self.signals.own[turn])", "pass", ORDER),
    mutant(ON_DEVICE, "yield from self.arrival.run(self.device)", "yield from ()", ORDER),
    mutant(ON_DEVICE, "for peer in self.peers:", "for peer in self.peers[1:]:", ORDER),
    mutant(ON_DEVICE, "                yield from self.barrier()", "                pass", ORDER),
    mutant(ON_DEVICE, "steps.append(BARRIER)", "pass", ORDER),
    mutant(
        ON_DEVICE,
        "lease, turn)\n            registers",
        "lease, 0)\n            registers",
        ORDER,
    ),
    # The host's waits before MPI reads or writes memory.
    mutant(MESSAGES, "self.ready.pop(index).synchronize()", "self.ready.pop(index)", ORDER),
    mutant(MESSAGES, "        if self.plain:\n            device.synchronize()", "", ORDER),
    mutant("collectives/runtime/backends/native_mpi.py", "        device.synchronize()\n", "", ORDER),
    mutant(
        "collectives/runtime/backends/point_to_point.py",
        "self.memory)\n        device.synchronize()",
        "self.memory)",
        ORDER,
    ),
    mutant("collectives/runtime/plan.py", "            self.device.end(last)", "            pass", ORDER),
    mutant(
        "collectives/runtime/plan.py",
        "        device, times = self.device, self._progress.times\n        device.begin()",
        "        device, times = self.device, self._progress.times",
        ORDER,
    ),
]

AWARE, PLAN = "collectives/job/cuda_aware.py", "collectives/runtime/plan.py"
WATCHDOG = "collectives/runtime/reports/watchdog.py"
COMPARATOR, DISPATCH = "collectives/runtime/comparator.py", "collectives/runtime/dispatch.py"
DECISION = ("test_cuda_aware.py",)
HEARD = ("test_device_failures.py", "hear_of and ring-cudaMemcpyAsync or that_failed")
NAMED = ("test_device_failures.py", "named")
UNHEARD = ("test_device_failures.py", "unheard")
DIFFER = ("test_device_disagreement.py", "2-ranks", 2)
BINDING_FAILURES = ("test_binding_failures.py",)
AGREEMENT = "collectives/runtime/agreement.py"

DEVICE_CHECKS = [
    # Device memory passed to MPI.
    mutant(AWARE, "    if not supported:\n", "    if supported is False:\n", DECISION),
    mutant(AWARE, "    if failure is None:\n", "    if False:\n", DECISION),
    mutant(
        AWARE,
        "    if failure:\n        return CudaAwareness(False",
        "    if failure:\n        return CudaAwareness(True",
        DECISION,
    ),
    mutant(AWARE, "and not failed", "", DECISION),
    mutant(AWARE, "[platform.node(), name]", "[name]", DECISION),
    mutant(AWARE, "launched_rank() == 0", "launched_rank() >= 0", DECISION),
    mutant("collectives/doctor.py", "not supported or is_launched()", "not supported", DECISION),
    # Device errors and hangs.
    mutant(PLAN, "            self._progress.tell(", "            str(", HEARD),
    mutant(
        "collectives/runtime/progress.py",
        "                if self.failure or (is_helper",
        "                if (is_helper",
        ("test_device_failures.py", "hear_of"),
    ),
    mutant(PLAN, "            progress.on_devices[id(self)] = self", "            pass", NAMED),
    mutant(PLAN, "        self._num_runs += 1", "        pass", NAMED),
    mutant(PLAN, "with self._progress.inside(self):", "if True:", NAMED),
    mutant(ON_DEVICE, "self.num_runs += 1\n        return True", "return True", NAMED),
    mutant(WATCHDOG, "        overdue |= self.on_device(self.clock_s - limit_s).keys()\n", "", NAMED),
    mutant(WATCHDOG, "and (self.waits or self.on_device(self.failed_s))", "and self.waits", HEARD),
    mutant(CUDA, "return status != NOT_READY", "return True", NAMED),
    # Comparison of calls by devices, or by hosts at device barriers.
    mutant(PROGRAMS_CU, "same &= load_relaxed", "load_relaxed", DIFFER),
    mutant(PROGRAMS_CU, "channel.state[DIFFERED] = 1;", "", DIFFER),
    mutant(PROGRAMS_CU, "store_relaxed(channel.failure, program.number);", "", DIFFER),
    mutant(PROGRAMS_CU, "this_thread() == 0 && program.key)", "this_thread() == 0)", DIFFER),
    mutant(PROGRAMS_CU, "first = number % 2 * channel.num_ranks;", "first = 0;", DIFFER),
    mutant(PROGRAMS, "self.captured if captured else self.channel", "self.channel", DIFFER),
    mutant(PROGRAMS, "memsetAsync(flag, 0,", "memsetAsync(flag, 1,", DIFFER),
    mutant(ON_DEVICE, "use(number, NOWHERE", "use(0, NOWHERE", DIFFER),
    mutant(ON_DEVICE, "self.parts[self.next]", "self.parts[0]", ORDER),
    mutant(ON_DEVICE, "| number &", "| 0 &", DIFFER),
    mutant(ON_DEVICE, "        if self.channel.failure[0]:\n", "        if False:\n", DIFFER),
    mutant(ON_DEVICE, "        self.channel.recover()\n", "", DIFFER),
    mutant(ON_DEVICE, "    if run := calls.differed():", "    if False:", UNHEARD),
    mutant(
        "collectives/runtime/comparator.py",
        '            self.context.agreement.check("free", "", late=late)',
        "            pass",
        UNHEARD,
    ),
    mutant(COMPARATOR, "            self.kernels.gate()\n", "            pass\n", DIFFER),
    mutant(
        "collectives/runtime/dispatch.py",
        "compared=not isinstance(mismatch, LateMismatchError)",
        "compared=True",
        DIFFER,
    ),
    mutant(AGREEMENT, "            late.calls.number = late.number", "            pass", DIFFER),
    mutant(AGREEMENT, "        if is_late:\n", "        if False:\n", DIFFER),
    mutant(
        AGREEMENT,
        "return plan().copy()",
        "return plan()",
        ("test_disagreement.py", "few_plans and 2-ranks", 2),
    ),
    mutant(
        AGREEMENT,
        "if len(self.plans) == MOST_PLANS:",
        "if False:",
        ("test_disagreement.py", "few_plans and 2-ranks", 2),
    ),
    # Errors of a single rank while it binds a call.
    mutant("collectives/runtime/backends/bound.py", "        progress.tell(words)\n", "", BINDING_FAILURES),
    mutant(
        "collectives/runtime/dispatch.py",
        "        with telling(self.progress, call.entry):\n            return self.binder.plan(",
        "        if True:\n            return self.binder.plan(",
        BINDING_FAILURES,
    ),
    mutant(
        "collectives/arrays/memory.py",
        "for rank, words in enumerate(failures) if words",
        "for rank, words in enumerate(failures)",
        BINDING_FAILURES,
    ),
    # Staging buffers, blocks, and paths without Numba.
    mutant(MESSAGES, "if key not in self.buffers:", "if True:", ("test_device.py", "near_lengths", 2)),
    mutant(
        MESSAGES,
        "key = kind, position, dtype, nbytes",
        "key = kind, dtype, nbytes",
        ("test_device.py", "every_coll", 3),
    ),
    mutant(
        "collectives/runtime/backends/devices.py",
        "return self.messages.plan(call, choice, self.messages.staging_on(call))",
        "return self.messages.plan(call, choice)",
        ("test_device.py", "near_lengths", 2),
    ),
    mutant(PROGRAMS, "environment.device_blocks() or chosen", "chosen", ("test_device_kernels.py", "the_blocks", 2)),
    mutant(PROGRAMS, "num_sharing == 1", "num_sharing", ("test_device_kernels.py", "divide_it", 2)),
    mutant(
        "collectives/arrays/cuda_kernels.py",
        "environment.device_blocks() or num_multi",
        "num_multi",
        ("test_cuda.py", "blocks"),
    ),
    mutant(
        "collectives/runtime/setup.py",
        "failure = failure or compiler.failure()",
        "failure = ''",
        ("test_on_cuda.py", "numba"),
    ),
    mutant(
        "collectives/runtime/chooser.py",
        "self.context.has_numba or by_themselves",
        "True",
        ("test_on_cuda.py", "numba"),
    ),
]

HEALTH = [
    mutant(
        "training/health/gradient_check.py",
        "if (sum(pieces) - each.added.get(name, 0)) % MODULUS:",
        "if False:",
        ("test_corruption.py", "test_a_wrong_bit and sum and 2-ranks", 2),
    ),
    mutant(
        "training/health/gradient_check.py",
        "if (each.first.get(name, 0) - following.replayed.get(name, 0)) % MODULUS:",
        "if False:",
        ("test_corruption.py", "always_computes and 2-ranks", 2),
    ),
    mutant(
        "training/health/gradient_check.py",
        "self._replay(2)",
        "self._replay(1)",
        ("test_corruption.py", "always_computes and 2-ranks", 2),
    ),
    mutant(
        "training/health/gradient_check.py",
        "if (total - sum(other.summed.get((name, start), 0) for other in of_ranks)) % MODULUS:",
        "if False:",
        ("test_corruption.py", "test_a_wrong_bit and message and 2-ranks", 2),
    ),
    mutant(
        "training/health/corruption.py",
        "exact.exponents, voided = exponents, wrong",
        "voided = wrong",
        ("test_corruption.py", "computed_again and message and 2-ranks", 2),
    ),
    mutant(
        "parallelism/pipeline/pipeline_parallel.py",
        "        self.listeners = listeners\n        self.zero_grad()",
        "        self.listeners = listeners",
        ("test_corruption.py", "change_no_bit and 4-ranks", 4),
    ),
    mutant(
        "training/health/judge.py",
        "self.slower_since_s.get(rank, self.now_s - slow_s[rank])",
        "self.slower_since_s.get(rank, self.now_s)",
        ("test_health.py", "first_slow_step"),
    ),
    mutant(
        "training/health/judge.py",
        "self.now_s - self.slower_since_s[rank] >= self.lasting_s",
        "True",
        ("test_health.py", "for_a_second"),
    ),
    mutant(
        "training/health/judge.py",
        'kind = "slow" if cpu_ratio - 1 > (ratio - 1) / 2 else "load"',
        'kind = "load"',
        ("test_health.py", "slow_rank_is_named"),
    ),
    mutant(
        "training/health/judge.py",
        "middle_rank = (times.shape[1] - 1) // 2",
        "middle_rank = times.shape[1] // 2",
        ("test_health.py", "of_two_ranks"),
    ),
    mutant(
        "training/health/judge.py",
        "len(self.ranks_of) > 1 and not findings and may_be_slow",
        "len(self.ranks_of) > 1 and may_be_slow",
        ("test_health.py", "links_are_not_measured"),
    ),
    mutant(
        "training/health/links.py",
        "max(by_others[pair], by_past[pair]) >= SLOW",
        "by_others[pair] >= SLOW",
        ("test_health.py", "beside_its_past"),
    ),
    mutant(
        "parallelism/data/load.py",
        "replicas[index].end_s(numbers[index] + 1), index",
        "replicas[index].end_s(numbers[index]), index",
        ("test_health.py", "micro_batches_go"),
    ),
    mutant(
        "parallelism/planner/place.py",
        "return values.min(1).reshape",
        "return values.max(1).reshape",
        ("test_planner_cluster.py", "cannot_move"),
    ),
    mutant(
        "parallelism/planner/place.py",
        "network = self.network_of(np.concatenate((source[crossing], dest[crossing])))",
        "network = self.network_of(source[crossing])",
        ("test_planner_cluster.py", "slowest_link"),
    ),
    mutant(
        "parallelism/planner/place.py",
        "self.by_levels(*key) + self.sync_s",
        "self.by_levels(*key)",
        ("test_planner_cluster.py", "wait_for_each_other"),
    ),
    mutant(
        "parallelism/planner/place.py",
        "widest = nodes[np.lexsort([-span for span in spans])[0]].tolist()",
        "widest = nodes[0].tolist()",
        ("test_planner_scaling.py", "most_nodes"),
    ),
    mutant(
        "parallelism/planner/replicas.py",
        "return cost.sum(1) * self.setting.overlaps",
        "return cost.sum(1)",
        ("test_planner_cluster.py", "shows_where"),
    ),
    mutant(
        "parallelism/planner/memory.py",
        "shard.activations > most[key].activations",
        "shard.activations < most[key].activations",
        ("test_planner_scaling.py", "no_pipeline_rank"),
    ),
    mutant(
        "parallelism/planner/search.py",
        "larger = machine._replace(nodes=in_nodes(ranks, len(machine.nodes[0])))",
        "larger = machine",
        ("test_planner_scaling.py", "fits_no_layout"),
    ),
    mutant(
        "parallelism/planner/scaling.py",
        "own = machine._replace(nodes=nodes)",
        "own = machine",
        ("test_planner_scaling.py", "another_number"),
    ),
    mutant(
        "parallelism/planner/division.py",
        "Division(max(each, key=",
        "Division(min(each, key=",
        ("test_planner_cluster.py", "replicas_get or cannot_move"),
    ),
    mutant(
        "parallelism/planner/memory.py",
        "fullest = of_limits.index(max(of_limits))",
        "fullest = 0",
        ("test_planner_cluster.py", "fits_into_its_host"),
    ),
    mutant(
        "collectives/schedule/network.py",
        "gate, between, *outer = (Link(alpha, beta / factor) for",
        "gate, between, *outer = (Link(alpha, beta) for",
        ("test_planner_cluster.py", "machine_of_a_cluster"),
    ),
    mutant(
        "parallelism/planner/ranks.py",
        "for parity in range(2):",
        "for parity in range(1):",
        ("test_planner_cluster.py", "taken_for_slow"),
    ),
    mutant(
        "parallelism/pipeline/balance.py",
        "if min(seconds) / each >= EQUAL",
        "if min(seconds) / each > 0",
        ("test_planner_cluster.py", "noise"),
    ),
    mutant(
        "parallelism/pipeline/pipeline_parallel.py",
        "self.schedule, self.first_micro_batch = schedule, first_micro_batch",
        "self.schedule = schedule",
        ("test_reproducible.py", "move_between and 3-ranks", 3),
    ),
    mutant(
        "training/parallel/run.py",
        "self.sampler.cut([number * self.config.micro_batch_size for number in numbers])",
        "pass",
        ("test_reproducible.py", "move_between and 3-ranks", 3),
    ),
    mutant(
        "collectives/runtime/backends/kernels.py",
        "frame[LATEST] = peer",
        "frame[LATEST] = 1",
        ("test_waits.py", "come_late", 4),
    ),
]

MUTANTS = [
    *ALGORITHMS,
    *RUNTIME,
    *ON_COMPARISON,
    *DEVICES,
    *DEVICE_CHECKS,
    *CHECKS,
    *TOOLS,
    *DIVIDED,
    *PIPELINES,
    *ZERO,
    *CHECKPOINTS,
    *PLANNER,
    *MODELS,
    *TRAINING,
    *SUPERVISION,
    *HEALTH,
]
