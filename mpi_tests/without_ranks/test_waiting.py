"""Waiting ranks spin, then yield the core, then sleep, whatever number of ranks was counted at the start."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from collectives.runtime import progress as waiting
from collectives.runtime.backends import kernels
from collectives.runtime.backends.shared_memory import BRIEF_SPINS, SPINS, YIELDS, Program
from collectives.runtime.progress import Progress


class Late:
    """A condition that becomes true after polls of the durations `times`, and makes progress at the times `moves`."""

    def __init__(self, clock, times, moves=()):
        self.clock, self.times, self.moves, self.num_barriers = clock, iter(times), moves, 0

    def test(self):
        self.num_barriers += self.clock.now_s in self.moves
        self.clock.now_s += next(self.times, math.inf)
        return self.clock.now_s == math.inf

    spin = test


class Clock:
    def __init__(self, monkeypatch):
        self.now_s, self.done = 0.0, []
        monkeypatch.setattr(waiting.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(waiting.time, "sleep", lambda s: self.done.append(f"sleep {1e3 * s:g} ms"))
        monkeypatch.setattr(waiting.system, "yield_core", lambda: self.done.append("yield"))


@pytest.mark.parametrize("is_timed", [False, True])
@pytest.mark.parametrize("oversubscribed", [False, True])
def test_a_wait_spins_then_yields_then_sleeps(monkeypatch, oversubscribed, is_timed):
    clock = Clock(monkeypatch)
    late = Late(clock, [2e-5, 2e-5, 2e-5, 5e-3, 15e-3, 12.0])
    Progress(oversubscribed).wait(late, deadline_s=60.0 if is_timed else math.inf)
    first = ["yield", "yield"] if oversubscribed else []
    assert clock.done == [*first, "yield", "yield", f"sleep {1e3 * 20.06e-3 / 64:g} ms", "sleep 1 ms"]


def test_who_finds_the_core_taken_sleeps_for_a_while(monkeypatch):
    """A yield to a computing process returns late."""
    clock = Clock(monkeypatch)
    progress = Progress(oversubscribed=True)

    def computed_by_others():
        clock.done.append("yield")
        clock.now_s += 3e-3

    monkeypatch.setattr(waiting.system, "yield_core", computed_by_others)
    monkeypatch.setattr(waiting, "MOST_NAPS", 2)
    for _ in range(7):
        progress.relax(0.0)
    nap = "sleep 0.02 ms"
    assert clock.done == ["yield", nap, nap, "yield", nap, nap, "yield"]


def test_what_moves_on_is_waited_for_anew(monkeypatch):
    clock = Clock(monkeypatch)
    Progress(oversubscribed=False).wait(Late(clock, [0.5, 1e-5], moves=[0.5]))
    assert clock.done == ["sleep 1 ms"]


def channel_of(own, other, counted):
    """Return the channel of two ranks, this one first, with these slots and counts of waits."""
    slots, waits = (np.array([each.ctypes.data for each in two], np.int64) for two in ((own, other), counted))
    return SimpleNamespace(slots=slots, waits=waits, state=np.zeros(kernels.STATE_LENGTH, np.int64))


@pytest.mark.parametrize("oversubscribed", [False, True])
def test_a_program_spins_once_in_a_meeting_then_yields(oversubscribed):
    own, other, counted = np.zeros(16, np.int64), np.zeros(16, np.int64), np.zeros((2, 2), np.int64)
    channel = channel_of(own, other, counted)
    program = Program(np.array([kernels.BARRIER, 2], np.int64), channel, np.dtype("float32"), oversubscribed, binding=7)
    for _ in range(3):
        channel.state[kernels.NAPS] = 0  # whatever the duration of its last yield
        assert not program.spin()
        assert program.frame[kernels.SPUN] == (0 if oversubscribed else SPINS)
    assert not counted.any()
    other[8:10] = 1, 7  # the cache line of odd barriers: this barrier, in the same program
    assert program.spin()
    number, nanoseconds = counted[1]  # of waits for the other rank
    assert number == 1
    assert nanoseconds > 0
    channel.state[kernels.NAPS] = 0
    assert not program.test()
    assert program.frame[kernels.SPUN] == BRIEF_SPINS


def test_a_program_whose_core_is_taken_spins_briefly():
    own, other, counted = np.zeros(16, np.int64), np.zeros(16, np.int64), np.zeros((2, 2), np.int64)
    channel = channel_of(own, other, counted)
    program = Program(np.array([kernels.BARRIER, 2], np.int64), channel, np.dtype("float32"), False, binding=7)
    channel.state[kernels.NAPS] = YIELDS + 1
    assert not program.spin()
    assert (program.frame[kernels.SPUN], channel.state[kernels.NAPS]) == (kernels.BRIEF, 1)
    assert kernels.BRIEF < SPINS
    channel.state[kernels.NAPS] = 0
    assert not program.spin()
    assert program.frame[kernels.SPUN] == SPINS
