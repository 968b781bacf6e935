"""The threads that run a group's asynchronous calls: their order, their continuations, their time limits."""

import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from collectives.torch_backend import work
from collectives.torch_backend.group import Runner


@pytest.fixture
def queue():
    queue = work.CallQueue()
    yield queue
    queue.end()


def pending(execute):
    return work.Pending(execute, [], limit_s=60.0)


def test_continuations_may_wait_for_calls_behind_their_own(queue):
    """Each of four waits for the next one, like those of PowerSGD, which reduce the result of a reduction again."""
    order = []
    calls = [pending(lambda run, number=number: order.append(number)) for number in range(5)]
    ends = [call.get_future().then(lambda _, behind=behind: behind.over.wait(2)) for call, behind in pairwise(calls)]
    for call in calls:
        queue.add(call)
    assert [end.wait() for end in ends] == [True] * 4
    assert order == [0, 1, 2, 3, 4]


def test_a_continuation_may_make_calls(queue):
    second = pending(lambda run: None)
    first = pending(lambda run: None)
    end = first.get_future().then(lambda _: queue.add(second) or second.over.wait(2))
    queue.add(first)
    assert end.wait()


def test_calls_run_one_at_a_time(queue):
    alone = threading.Lock()

    def run(_):
        assert alone.acquire(blocking=False)
        time.sleep(1e-3)
        alone.release()

    calls = [pending(run) for _ in range(20)]
    for call in calls:
        queue.add(call)
    assert all(call.wait() for call in calls)


def test_the_future_is_complete_when_a_wait_returns(queue):
    """Its continuations may take longer: here they wait for the end of the test."""
    end, tensors = threading.Event(), [torch.ones(1)]
    call = work.Pending(lambda run: time.sleep(0.01), tensors, limit_s=60.0)
    call.get_future().add_done_callback(lambda _: end.wait(5))
    queue.add(call)
    call.wait()
    assert call.get_future().value() == tensors
    end.set()


def test_the_future_of_a_started_plan_is_complete_when_a_wait_returns(queue):
    """The thread that completes the future comes to it when a call before it has ended."""
    queue.add(pending(lambda run: time.sleep(0.05)))
    ended = iter([False])
    plan = SimpleNamespace(device=None, is_under_way=False, advance=lambda: None, done=lambda: next(ended, True))
    plan.wait = plan.join = lambda limit_s: None
    tensors = [torch.ones(1)]
    started = work.PlanWork(plan, tensors, 60.0, None, queue)
    future = started.get_future()
    started.wait()
    assert future.value() == tensors


def test_a_failure_is_the_future_s_too(queue):
    def fail(_):
        raise ValueError("seven")

    call = pending(fail)
    queue.add(call)
    with pytest.raises(ValueError, match="seven"):
        call.wait()
    with pytest.raises(RuntimeError, match="ValueError: seven"):  # of C++, which sees it, too
        call.get_future().wait()


@pytest.mark.parametrize("is_async", [False, True])
def test_time_runs_from_when_a_call_is_made(is_async):
    """A call that was queued for longer than its time limit gets no further time for its plan."""
    limits = []
    device = SimpleNamespace(is_async=False)
    plan = SimpleNamespace(device=device, run_only=lambda: False, begin=lambda: None, wait=limits.append)
    if is_async:
        call = pending(lambda run: None)
        call.awaited = True
        call.deadline_s = time.monotonic() - 1
        call.run_plan(plan)
    else:
        group, limited = SimpleNamespace(limit_of=lambda opts: opts.limit_s), SimpleNamespace(limit_s=9.0)
        Runner.run_plan(group, limited, time.monotonic() - 10, plan)
    assert limits == [0]
