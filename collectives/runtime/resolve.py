"""The path of every call: check its arguments, agree on it with the other ranks, choose an algorithm, bind it.

Bound calls are cached by signature: the collective, its options, and of each array dtype, length and kind of memory,
but not its address.  A later call of the same signature runs the bound one on its own arrays.  At the first barrier of
a run the ranks compare what they have bound; where that differs, all of them resolve their calls again, together, which
reports a mismatch.  Arrays on devices are copied to persistent buffers, unless they are in symmetric memory: then the
call is bound to these arrays.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from operator import mul
from textwrap import shorten
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, cast

from collectives import algorithms
from collectives.algorithms import Access
from collectives.arrays.addresses import address_of
from collectives.arrays.device import host
from collectives.arrays.memory import Windows
from collectives.job.errors import CommunicationError, InputError, LoneInputError
from collectives.job.launch import refuse_after_fork
from collectives.runtime.agreement import NUM_FACTS
from collectives.runtime.backends.binding import (
    Binder,
    BufferedPlan,
    Choice,
    DeviceBuffers,
    KeyComparison,
    MessageBinder,
)
from collectives.runtime.backends.messages import StagingBuffers
from collectives.runtime.backends.native_mpi import check_native, native_plan
from collectives.runtime.call.arguments import REFUSALS, Arguments
from collectives.runtime.call.operands import Operands, call_facts, local_facts, operands_of
from collectives.runtime.call.packed import Fused, PackedCall, is_strided, pack_fused, pack_strided
from collectives.runtime.call.signature import Signature, Signed, Unsigned, address_of_result, hashable, sign
from collectives.runtime.call.started import NOWHERE, Predecessor, StartedCall
from collectives.runtime.lazy import Lazy
from collectives.runtime.plan import FAILURES, FREED, LateMismatchError, MismatchError, Plan, run_now
from collectives.runtime.reports.call_log import Call, Place, caller
from collectives.schedule.spec import COLLECTIVES, spec_of

if TYPE_CHECKING:
    from collectives.runtime.backends.channel import Channel
    from collectives.runtime.backends.on_device import DeviceProgram, KernelCalls, KernelProgram
    from collectives.runtime.backends.shared_memory import Program
    from collectives.runtime.compared import Headers, ProgramComparison
    from collectives.runtime.context import Context

MOST_BOUND = 4096  # signatures whose bound calls are cached
MOST_BOUND_ON_DEVICES = 256  # the same for arrays on devices
MOST_PLACES = 8  # addresses for which messages of one signature are bound
LONGEST_WORDS = 500  # of an error that is sent to other ranks
OPTIONS = {name: spec.options for name, spec in COLLECTIVES.items()}


Runs = Callable[[Any], Any]  # of a plan


class Request(NamedTuple):
    """A call as it is made: the arguments of `Resolver.run`."""

    collective: str
    x: Any
    out: Any
    options: tuple
    run: Runs = run_now
    note: str = ""
    place: Place | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        arguments = {"out": self.out} if "out" in COLLECTIVES[self.collective].takes else {}
        return arguments | dict(zip(OPTIONS[self.collective], self.options, strict=True))


class Resolved(NamedTuple):
    """A call on which the ranks agree: its arguments on this rank, and its algorithm."""

    a: Arguments
    operands: Operands
    choice: Choice | None  # None for the MPI library's own
    fused: Fused | None
    number: int  # of its binding: the same on all ranks
    all_move: bool = False  # whether all ranks' arrays are copied to buffers


class Bound:
    """The binding of calls of one signature.

    `number` is unique, and the same on all ranks.  A direct program takes any addresses of arrays; a schedule of
    messages is bound to them, by `rebind`.  `new` makes a call's result, where that is a new array.
    """

    def __init__(self, number: int, call: Call, plan: Plan | None, resolved: Resolved):
        a, o = resolved.a, resolved.operands
        self.number, self.call, self.plan = number, call, plan
        self.program: Program | None = plan.only if plan and a.device is host() else None
        self.rebind: Callable[[tuple[int, ...]], Plan] | None = None
        self.buffered: BufferedPlan | None = None  # takes any arrays on devices
        self.comparing: DeviceProgram | KernelProgram | None = None  # on a device: compares at the first barrier
        self.places: dict[tuple[int, ...], Plan] = {}  # plans by addresses
        self.has_result = o.result is not None
        self.returns_x = o.result is a.x and a.x is not a.out  # on ranks without a result, for any `out`
        self.has = o.source is not None, o.out is not None
        is_new = self.has_result and o.result is not a.x and o.result is not a.out
        self.new: Callable[[Any], Any] | None = o.new if is_new else None
        self.is_plain = self.has_result and self.new is None and all(self.has)

    def place(self, x: Any, out: Any, addresses: tuple, keys: tuple) -> tuple[Any, tuple, tuple]:
        """Return the result's array, and the addresses and windows of a call's two arrays, 0 for none."""
        result = x if out is None or self.returns_x else out
        if self.new is not None and out is None:
            result = self.new(x)
            addresses, keys = (addresses[0], address_of_result(result)), (keys[0], 0)
        elif not all(self.has):
            addresses, keys = (tuple(map(mul, self.has, pair)) for pair in (addresses, keys))
        return result if self.has_result else None, addresses, keys


class Resolver:
    """Resolver of the calls of one communicator, with a cache of bound calls."""

    def __init__(self, context: Context):
        self.context, self.calls, self.check = context, context.calls, context.check
        self.memory, self.windows = context.memory.of_host, context.windows
        self.progress, self.agreement = context.progress, context.agreement
        self.binder, self.buffers = Binder(context), DeviceBuffers(context)
        self.agreement.gate = self.gate
        self.bound: dict[Signature, Bound] = {}
        self.bound_on_devices: dict[Signature, Bound] = {}
        self.num_bound = 0
        self.by_messages = len(context.topology.nodes) > 1 or not context.has_numba  # whether these compare calls
        self.staging: dict[str, StagingBuffers] = {}  # of calls, which run one after the other, by device
        self.kernels: KernelCalls | None = None  # once there are calls that devices compare
        self.latest: Callable[[], Plan | None] = lambda: None
        self.turn: int | None = None  # the thread that resolves a started call
        self.plans: weakref.WeakSet[Plan] = weakref.WeakSet()  # of the caller

    # --- calls ---

    def run(
        self,
        collective: str,
        x: Any,
        out: Any,
        options: tuple,
        run: Runs = run_now,
        note: str = "",
        place: Place | None = None,
        at_once: bool = True,
    ) -> Any:
        """Run a collective once, and return the result's array.

        `options` are the values of its other arguments besides `out`, in the order of `OPTIONS`.  `run` runs a plan to
        its end, a bound call only if it does not end `at_once`; ranks must also agree in `note`; `place` is the line
        that makes the call, by default that which calls the library.
        """
        try:
            signed = sign(self.memory, collective, x, out, (*options, note) if note else options)
            signature, addresses, keys, on_host, _ = signed
            cache = self.bound if on_host else self.bound_on_devices
            try:
                bound = cache.get(signature)
            except TypeError:  # an option is a list
                bound = cache.get(hashable(signature))
        except Unsigned:
            return self.run_unsigned(Request(collective, x, out, options, run, note, place), at_once)
        if bound is None:
            return self.run_first(Request(collective, x, out, options, run, note, place), signed)
        call, calls = bound.call, self.calls
        call.number = calls.number = number = calls.number + 1
        call.place = place = place or caller(sys._getframe(2))
        calls.record.ring.append((call, number, place))
        result = x if out is None else out
        if not bound.is_plain:
            result, addresses, keys = bound.place(x, out, addresses, keys)
        try:
            program = bound.program
            if program is None:
                self.execute(bound, addresses, keys, run)
            else:
                if keys != program.keys:
                    program.lie_in(keys)
                if not at_once or self.progress.started or not program.launch(number * self.check, *addresses):
                    self.execute(bound, addresses, keys, run)
        except MismatchError as mismatch:
            calls.number -= 1
            calls.record.ring.pop()
            call.under_way = False
            request = Request(collective, x, out, options, run, note, place)
            return self.run_first(request, signed, compared=not isinstance(mismatch, LateMismatchError))
        return result

    def execute(self, bound: Bound, addresses: tuple[int, ...], keys: tuple[int, ...], run: Runs) -> None:
        """Run a bound call on arrays at two addresses in two windows, as a call that has been entered.

        Raises: MismatchError on all ranks if one of them would run another one; then nothing is done.
        """
        call, plan = bound.call, bound.plan
        call.under_way = True  # so that its run is not counted again
        self.drain(run)
        number = call.number * self.check
        if bound.program is not None:
            bound.program.use(number, addresses, keys)
        else:
            if bound.comparing is None:
                self.compare(bound.number, number, run)
            else:
                bound.comparing.use(call, self.check)
            plan = bound.buffered.on(addresses) if bound.buffered else plan or self.plan_at(bound, addresses)
            plan.prepare()
        assert plan is not None
        plan.call = call
        run(plan)
        call.under_way = False

    def plan_at(self, bound: Bound, place: tuple[int, ...]) -> Plan:
        """Return the plan of a schedule of messages for arrays at two addresses."""
        plan = bound.places.get(place)
        if plan is None:
            assert bound.rebind is not None
            if len(bound.places) == MOST_PLACES:
                del bound.places[next(iter(bound.places))]
            with self.telling(bound.call):
                plan = bound.places[place] = bound.rebind(place)
        return plan

    def run_first(self, request: Request, signed: Signed, compared: bool = False) -> Any:
        """Resolve a call, cache its binding by signature, and run it."""
        with Call(self.calls, request.collective) as call:
            call.place = request.place or call.place
            resolved = self.resolve(call, request, compared, moves=signed[-1])
            with self.telling(call):
                bound = self.bind_call(call, signed, resolved)
            call.name = bound.call.name
            o = resolved.operands
            places = [tuple(map(of, (o.source, o.out))) for of in (address_of, self.windows.key_of)]
            self.execute(bound, places[0], places[1], request.run)
        return o.result

    def run_unsigned(self, request: Request, at_once: bool) -> Any:
        """Run a call on fused arrays, or one without a signature."""
        packed, failure = self.pack(request)
        if failure:
            self.refuse(request.collective, failure, request.run, request.place)
        if packed:
            result = packed.result(self.run(*packed.request, at_once))
            packed.end()
            return result
        plan = self.plan_once(request)
        request.run(plan)
        plan.free()
        return plan.result

    def pack(self, request: Request) -> tuple[PackedCall | None, str]:
        """Return a call on fused or strided arrays of the host as one on contiguous arrays, None for others.

        If its arrays are wrong, return why.
        """
        fused = request.x if isinstance(request.x, Fused) else None
        if fused is not None and fused.failure:
            return None, fused.failure
        try:
            if fused is not None:
                return pack_fused(request, self.context.rank) if fused.device is host() else None, ""
            if is_strided(request.x) or is_strided(request.out):
                return pack_strided(request, self.context.rank), ""
        except REFUSALS as error:
            return None, f"{request.collective}: {error}"
        return None, ""

    def refuse(self, collective: str, failure: str, run: Runs = run_now, place: Place | None = None) -> None:
        """Refuse a call on all ranks.  Raises: InputError on each of them."""
        with Call(self.calls, collective) as call:
            call.place = place or call.place
            self.refuse_call(call, failure, run)

    def refuse_call(self, call: Call, failure: str, run: Runs = run_now) -> None:
        """Refuse a call that has been entered, as `refuse`."""
        if not self.check:
            raise LoneInputError(failure)
        self.agreement.check("", failure, (), call, partial(self.gate, run))

    def start(self, collective: str, x: Any, out: Any, options: tuple) -> Plan:
        """Start a collective, for the caller to wait for, without waiting for the other ranks."""
        return self.plan_later(Request(collective, x, out, options)).start()

    def sign_start(self, request: Request) -> Signed | None:
        """Return a call's signature, if there are bindings of it that run without further agreement."""
        is_native = request.options[-1] == "mpi"  # waits inside MPI
        is_uneven = request.arguments.get("send_counts") is not None  # ranks exchange counts first
        if is_native or is_uneven:
            return None
        options = (*request.options, request.note) if request.note else request.options
        try:
            signed = sign(self.memory, request.collective, request.x, request.out, options)
            return (hashable(signed[0]), *signed[1:]) if signed[3] else None
        except Unsigned:
            return None

    def plan_once(self, request: Request) -> Plan:
        """Make a plan for one run, counted as this call.  Collective."""
        with Call(self.calls, request.collective) as call:
            call.place = request.place or call.place
            resolved = self.resolve(call, request)
            with self.telling(call):
                plan = self.bind(resolved)
        call.name, call.under_way = plan.name, True  # until the plan has ended: its run is not counted again
        plan.call = call
        return plan

    def begin_bound(self, request: Request) -> Plan | None:
        """Start a call if it has been bound, and the ranks need not agree on it."""
        signed = self.sign_start(request)
        return self.plan_later(request, signed).start() if signed and signed[0] in self.bound else None

    def plan_later(self, request: Request, signed: Signed | None = None) -> StartedCall:
        """Make a plan for one run, counted as this call: a new one is agreed on when it runs."""
        signed, packed, failure = signed or self.sign_start(request), None, ""
        if signed is None:
            packed, failure = self.pack(request)
            if packed:
                request, signed = packed.request, self.sign_start(packed.request)
        bound = self.bound.get(signed[0]) if signed else None
        call = bound.call.of_plan(bound.call.name) if bound else Call(self.calls, request.collective)
        call.enter(place=request.place)  # under way until it has ended: its run is not counted again
        plan = StartedCall(self, request, signed, bound, call, self.latest(), packed, failure)
        self.latest = weakref.ref(plan)
        return plan

    def drain(self, run: Runs = run_now) -> None:
        """Wait for the started calls, unless for one of them, in its turn: programs on one channel run one by one."""
        latest = self.latest()
        if latest is not None and latest.is_under_way and self.turn != get_ident():
            run(Predecessor(latest))

    def plan(self, collective: str, x: Any, arguments: dict[str, Any]) -> Plan:
        """Make a plan to be run often."""
        with Call(self.calls, f"plan {collective}") as call:
            resolved = self.agree(call, collective, x, arguments)
            with self.telling(call):
                plan = self.bind_short(resolved) or self.bind(resolved)
        plan.call = call.of_plan(plan.name)
        self.plans.add(plan)
        if plan.only:
            self.calls.record.expect_short_runs(plan.call)
        return plan

    def free(self) -> None:
        """Free the bound calls, the plans and their memory, once started ones have ended.  Collective."""
        self.drain()
        for plan in list(self.plans):
            plan.join()
            plan.free(FREED)
        if self.kernels:
            self.agreement.check("free", "")  # after which none runs, and no mismatch is unreported
        self.bound.clear()
        self.bound_on_devices.clear()
        self.staging.clear()
        self.buffers.pairs.clear()
        if "headers" in self.__dict__:
            self.headers.free()
        self.kernels = None
        for name in ("comparison", "headers", "channel"):
            self.__dict__.pop(name, None)

    # --- resolving ---

    def resolve(self, call: Call, request: Request, compared: bool = False, moves: bool = False) -> Resolved:
        """Agree on a call; `compared`: the ranks have already found that their bindings differ."""
        run = None if compared else request.run
        return self.agree(call, request.collective, request.x, request.arguments, request.note, run, moves)

    def agree(
        self,
        call: Call,
        collective: str,
        x: Any,
        arguments: dict[str, Any],
        note: str = "",
        run: Runs | None = run_now,
        moves: bool = False,
    ) -> Resolved:
        """Check a call, agree on it with the other ranks, and choose its algorithm.  Collective.

        `run` waits for the others; None if all are known to have arrived.  `moves`: the call will use buffers.

        Raises: InputError on every rank where one has wrong arguments, or not all make the same call.
        """
        if run is not None:
            self.drain(run)
        description = failure = ""
        facts = [0] * NUM_FACTS
        if isinstance(x, Fused) and x.buffer is None:
            self.allocate(x, call)
        fused = x if isinstance(x, Fused) else None
        algorithm = arguments.pop("algorithm", "auto")
        try:
            a = self.arguments(collective, fused.buffer if fused else x, algorithm, arguments)
            if fused:
                fused.check(collective, a.out, a.rank == a.root)
                note = f" of {fused}"
            description = call.describe(collective, a.describe(algorithm) + note, a.flat, a.lengths)
            operands = operands_of(a) if a.send_counts is None else None
            windows = Windows() if moves else self.windows
            facts = [*local_facts(a, operands, windows), not moves, self.num_bound + 1]
        except REFUSALS as error:
            failure = f"{collective}: {error}"
        if failure and not self.check:
            raise LoneInputError(failure)
        late = self.gate(run)
        if self.check:
            facts = self.agreement.check(description, failure, facts, call, lambda: late)
        elif late:
            raise LoneInputError(f"{late.entry()}: ranks run different collectives")
        self.num_bound, all_move = facts.pop(), not facts.pop()
        operands = operands or self.exchange_counts(a)
        choice = None
        if algorithm != "mpi":
            choice = self.binder.choose(a, algorithm, call_facts(a.spec, facts, on_buffers=all_move))
        return Resolved(a, operands, choice, fused, self.num_bound, all_move)

    def allocate(self, fused: Fused, call: Call) -> None:
        """Give fused arrays of a call a buffer that the ranks of a node can access, where possible.  Collective.

        Raises: InputError on every rank where arrays are incompatible, or ranks' lengths differ.
        """
        self.agreement.check(str(fused), fused.failure, call=call if self.check else None)
        fused.buffer = self.context.memory.empty(fused.device, len(fused), fused.dtype)

    def arguments(self, collective: str, x: Any, algorithm: str, arguments: dict[str, Any]) -> Arguments:
        """Check a call's arguments as far as one rank can."""
        takes = spec_of(collective).takes
        if strange := [name for name in arguments if name not in takes]:
            raise ValueError(f"takes no {strange[0]}: it takes {', '.join(takes)}")
        a = Arguments(collective, self.context.rank, self.context.size, x, **arguments)
        if algorithm == "mpi":
            check_native(a)
        elif algorithm != "auto":
            algorithms.check(algorithms.find(collective, algorithm), self.context.size, equal=a.send_counts is None)
        a.check_algorithm(algorithm)
        return a

    def exchange_counts(self, a: Arguments) -> Operands:
        """Exchange the counts of an all-to-all of uneven chunks.  Collective.

        Raises: InputError on every rank where one's counts or result do not fit.
        """
        assert a.send_counts is not None
        incoming, failure, operands = self.agreement.exchange(a.send_counts), "", None
        try:
            if a.recv_counts not in (None, incoming):
                raise ValueError(
                    f"{a.collective}: recv_counts={a.recv_counts}, but {incoming} is sent: pass that, or omit it"
                )
            a.recv_counts = incoming
            operands = operands_of(a)
        except REFUSALS as error:
            failure = str(error) or type(error).__name__
        self.agreement.check(f"counts of {a.collective}", failure)
        assert operands is not None
        return operands

    # --- binding ---

    @contextmanager
    def telling(self, call: Call) -> Iterator[None]:
        """Bind a call's resources; an error on this rank is sent to the others, which would wait in vain.

        Raises: CommunicationError.
        """
        try:
            yield
        except (InputError, *FAILURES):  # raised on all ranks, or sent to the others already
            raise
        except Exception as error:
            words = f"{call.entry()}: {shorten(f'{type(error).__name__}: {error}', LONGEST_WORDS)}"
            self.progress.tell(words)
            raise CommunicationError(words) from error

    def bind(self, resolved: Resolved, staging: StagingBuffers | None = None) -> Plan:
        """Make a plan for the arrays of a call.  Collective."""
        a, o, choice, fused, *_ = resolved
        if choice is None:
            plan = native_plan(a, o, self.context.mpi, self.progress)
        else:
            plan = self.binder.plan(a, o, choice, staging)
        if fused:
            plan.enclose(*fused.copies(a.collective, a.rank == a.root), fused.arrays)
        return plan

    def bind_short(self, resolved: Resolved) -> Plan | None:
        """Make a plan of a short collective between nodes, as one program; None for others.  Collective."""
        a, o, choice, fused, *_ = resolved
        if fused or not self.carries(choice, a):
            return None
        from collectives.runtime.compared import Headers  # it imports the compiler

        headers = Headers(self.context, self.binder)
        plan = headers.plan(a, choice.row, binding=1)
        plan.only.use(0, (address_of(o.source), address_of(o.out)), NOWHERE)
        plan.only.messages += headers.arrivals.values()
        plan.result, plan.keep = o.result, (o.source, o.out)
        return plan

    def carries(self, choice: Choice | None, a: Arguments) -> TypeGuard[Choice]:
        """Return whether the vector of an agreed call travels along with the headers by which nodes compare calls."""
        if choice is None or not self.by_messages or not self.context.has_numba:
            return False
        return self.headers.carry(a, choice)

    def bind_moved(self, resolved: Resolved, staging: StagingBuffers, a: Arguments) -> Plan:
        """Make a plan like that of a call for other device arrays, which compares calls where possible.  Collective."""
        resolved = resolved._replace(a=a, operands=operands_of(a))
        if (place := self.where_devices_compare(resolved)) is None:
            return self.bind(resolved, staging)
        assert resolved.choice is not None
        return self.binder.direct(a, resolved.operands, resolved.choice, place, resolved.number)

    def where_devices_compare(self, resolved: Resolved) -> Channel | KernelCalls | None:
        """Return the place where calls bound on devices are compared: kernels, or the hosts' channel.  Collective.

        Kernels are launched before other ranks' answers, and so only for calls that all ranks bind in the same way: not
        if one has an `out` of its own, or counts that the others do not know.
        """
        a, choice = resolved.a, resolved.choice
        if choice is None or choice.shared is None or choice.row.access < Access.STAGED:
            return None
        if not choice.shared.has_barriers:
            return self.channel
        if a.send_counts is not None or {"root", "out"} <= set(a.spec.takes):
            return None
        if self.kernels is None:
            self.kernels = self.binder.programs(choice.shared).kernel_calls()
        return self.kernels

    def bind_call(self, call: Call, signed: Signed, resolved: Resolved) -> Bound:
        """Bind the calls of a signature, and cache the binding.  Collective."""
        o, choice, number = resolved.operands, resolved.choice, resolved.number
        a = resolved.a.lent(None if o.out is o.source else o.out)  # so that no array of the caller's is kept alive
        collective = a.collective
        plan = rebind = buffered = None
        signature, _, _, on_host, moves = signed
        staging = self.staging.setdefault(a.device.place, StagingBuffers(a.device))
        if choice is not None and choice.row.access >= Access.STAGED and on_host:
            plan = self.binder.direct(a, operands_of(a), choice, self.channel, number)
        elif self.carries(choice, a):
            plan = self.headers.plan(a, choice.row, number)
        elif on_host:
            messages = choice and MessageBinder(self.context, collective, choice, self.binder, staging)
            rebind = partial(self.rebind, a, messages)
        elif moves:
            is_shared = resolved.all_move and choice is not None and choice.shared is not None
            buffers = self.buffers.pair(a, o, is_shared)
            buffered = BufferedPlan(a, buffers, partial(self.bind_moved, resolved, staging))
        else:
            plan = self.bind_moved(resolved, staging, a)
        name = f"{collective} {choice.row.name if choice else 'mpi'}"
        bound = Bound(number, call.of_plan(name), plan, resolved)
        bound.rebind, bound.buffered = rebind, buffered
        device_plan = buffered.plan if buffered else plan
        if device_plan and not on_host and self.where_devices_compare(resolved):
            bound.comparing = cast("DeviceProgram | KernelProgram", device_plan.rounds[0])
        bound.call.number = call.number
        cache, most = (self.bound, MOST_BOUND) if on_host else (self.bound_on_devices, MOST_BOUND_ON_DEVICES)
        if len(cache) >= most:
            del cache[next(iter(cache))]
        cache[hashable(signature)] = bound
        return bound

    def rebind(self, a: Arguments, messages: MessageBinder | None, place: tuple[int, ...]) -> Plan:
        """Make a plan like that of `a` for arrays at two other addresses."""
        a = a.moved(place)
        operands = operands_of(a)
        return messages.plan(a, operands) if messages else native_plan(a, operands, self.context.mpi, self.progress)

    # --- comparing the ranks' bindings ---

    def compare(self, binding: int, number: int, run: Runs) -> None:
        """Wait for the other ranks, and compare all bindings' numbers; 0 without a binding.  Collective.

        Raises: MismatchError on all ranks where these or the numbers of calls differ.
        """
        self.comparison.use(number, binding)
        run(self.comparison)

    def gate(self, run: Runs | None = run_now) -> Call | None:
        """Tell ranks that would run a bound call that this one has to agree first.  Collective.

        `run` waits for the others; None if all are known to have arrived.  Returns the earlier call in which this
        rank's device has found a mismatch, if any.
        """
        if self.kernels:
            self.kernels.gate()
        if run is not None:
            self.drain(run)
            with suppress(MismatchError):
                self.compare(0, 0, run)
        return self.kernels.settle() if self.kernels else None

    @Lazy
    def headers(self) -> Headers:
        """Make the headers by which ranks of several nodes compare calls.  Collective."""
        from collectives.runtime.compared import Headers  # it imports the compiler

        return Headers(self.context, self.binder)

    @Lazy
    def comparison(self) -> ProgramComparison | KeyComparison:
        """Make a plan that only compares calls.  Collective."""
        if not self.context.has_numba:
            return KeyComparison(self.context)
        from collectives.runtime.compared import ProgramComparison  # it imports the compiler

        program = self.headers.comparison() if self.by_messages else self.binder.programs(None).gate(self.channel)
        return ProgramComparison(program, self.progress)

    @Lazy
    def channel(self) -> Channel:
        """Make the channel of all calls, which run one after the other.  Collective."""
        from collectives.runtime.backends.channel import Channel

        context = self.context
        others = [rank for rank in range(context.size) if rank != context.rank]
        channel = Channel(self.memory, self.binder.world_ranks, [context.rank, *others])
        self.agreement.highest([0])  # all have cleared their slots
        return channel


refuse_after_fork(Resolver)
