"""Horovod's calls, compared with NumPy's and torch's results."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mpi_tests.helpers.reference import inputs, reduced
from mpi_tests.helpers.torch_world import world

pytestmark = pytest.mark.sizes(1, 2, 3, 4)

NAMES = {"Average": "avg", "Sum": "sum", "Min": "min", "Max": "max", "Product": "prod"}
DTYPES = ("float32", "float64", "float16", "int32", "int64", "uint8")
BATCH, WIDTH, STEPS = 12, 6, 4


@pytest.fixture
def hvd(mpi_comm):
    import collectives.horovod.torch as hvd

    hvd.init(mpi_comm)
    yield hvd
    hvd.shutdown()


def tensors(size, shape, dtype="float32", op="sum"):
    """Return every rank's input."""
    count = int(np.prod(shape))
    return [torch.from_numpy(x).reshape(shape) for x in inputs(size, count, dtype, op)]


def refusal(hvd, begin):
    """Return the error message that all ranks raise; check that the next call works."""
    with pytest.raises(hvd.HorovodInternalError) as caught:
        begin()
    texts = hvd.allgather_object(str(caught.value))
    assert texts == texts[:1] * hvd.size()
    assert "\n" not in texts[0]
    return texts[0]


# --- calls ---


def test_ranks(hvd, mpi_comm):
    assert (hvd.rank(), hvd.size()) == (mpi_comm.rank, mpi_comm.size)
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (hvd.rank(), hvd.size(), 0, 1)
    assert hvd.is_initialized()
    assert hvd.is_homogeneous()
    assert hvd.mpi_built()
    assert hvd.mpi_enabled()
    assert not hvd.gloo_built()
    assert hvd.nccl_built() == 0


@pytest.mark.parametrize("op", NAMES)
def test_allreduce(hvd, op):
    for dtype in DTYPES:
        for shape in ((), (0,), (3,), (2, 3, 4)):
            xs = tensors(hvd.size(), shape, dtype, NAMES[op])
            want = reduced([x.numpy() for x in xs], NAMES[op])
            own = xs[hvd.rank()].clone()
            actual = hvd.allreduce(own, op=getattr(hvd, op))
            assert (actual.dtype, tuple(actual.shape)) == (own.dtype, shape)
            assert np.array_equal(actual, want), (dtype, shape)
            assert torch.equal(own, xs[hvd.rank()])
            assert hvd.allreduce_(own, op=getattr(hvd, op)) is own
            assert np.array_equal(own, want), (dtype, shape)


def test_allreduce_is_of_the_average_unless_told_otherwise(hvd):
    xs = tensors(hvd.size(), (5,))
    assert torch.equal(hvd.allreduce(xs[hvd.rank()]), sum(xs) / hvd.size())
    assert torch.equal(hvd.allreduce(xs[hvd.rank()], average=False), sum(xs))


@pytest.mark.parametrize(("dtype", "wide"), [("float32", np.float64), ("int32", np.float64), ("float16", np.float32)])
def test_factors_before_and_after(hvd, dtype, wide):
    xs = [x.numpy() for x in tensors(hvd.size(), (7,), dtype)]
    before = [(wide(0.5) * x.astype(wide)).astype(dtype) for x in xs]
    want = (wide(3) * reduced(before, "sum").astype(wide)).astype(dtype)
    own = torch.from_numpy(xs[hvd.rank()])
    for grouped in ([own], [own, own.clone()]):
        actual = hvd.grouped_allreduce(grouped, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
        assert all(np.array_equal(x, want) for x in actual)


def test_tensors_with_gaps(hvd):
    for in_place, matrix in enumerate(torch.arange(24.0).view(2, 4, 3)):
        own = (matrix + hvd.rank()).t()
        whole = own.t()
        actual = hvd.allreduce_(own, op=hvd.Sum) if in_place else hvd.allreduce(own, op=hvd.Sum)
        want = matrix * hvd.size() + sum(range(hvd.size()))
        assert torch.equal(actual, want.t())
        assert torch.equal(whole, want if in_place else matrix + hvd.rank())


def test_groups_of_several_dtypes(hvd):
    xs = [
        tensors(hvd.size(), shape, dtype) for shape, dtype in (((3,), "float32"), ((2, 2), "int64"), ((4,), "float32"))
    ]
    own = [each[hvd.rank()].clone() for each in xs]
    for actual in (hvd.grouped_allreduce(own, op=hvd.Sum), hvd.grouped_allreduce_(own, op=hvd.Sum)):
        assert all(torch.equal(x, sum(each)) for x, each in zip(actual, xs, strict=True))
    assert all(torch.equal(x, sum(each)) for x, each in zip(own, xs, strict=True))


def test_compression_to_16_bits(hvd):
    xs = [x / 7 for x in tensors(hvd.size(), (100,))]
    actual = hvd.allreduce(xs[hvd.rank()], compression=hvd.Compression.fp16, op=hvd.Sum)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, sum(x.half().float() for x in xs).half().float())
    assert torch.equal(hvd.allreduce(torch.tensor([3]), compression=hvd.Compression.fp16), torch.tensor([3]))


def test_allgather(hvd):
    for shape in ((), (2,), (2, 3)):
        xs = [torch.full((rank, *shape), float(rank)) for rank in range(1, hvd.size() + 1)]
        assert torch.equal(hvd.allgather(xs[hvd.rank()]), torch.cat(xs))
    empty = [torch.full((rank, 2), rank) for rank in range(hvd.size())]  # the first has no rows
    actual = hvd.grouped_allgather([empty[hvd.rank()], xs[hvd.rank()].transpose(1, 2)])
    assert torch.equal(actual[0], torch.cat(empty))
    assert torch.equal(actual[1], torch.cat(xs).transpose(1, 2))


def test_broadcast(hvd):
    for root in range(hvd.size()):
        for shape in ((), (3,), (2, 3)):
            xs = tensors(hvd.size(), shape)
            own = xs[hvd.rank()].clone()
            assert torch.equal(hvd.broadcast(own, root), xs[root])
            assert torch.equal(own, xs[hvd.rank()])
            assert hvd.broadcast_(own, root) is own
            assert torch.equal(own, xs[root])


def test_alltoall(hvd):
    size, rank = hvd.size(), hvd.rank()
    equal = torch.arange(2 * size) + 100 * rank
    want = torch.cat([torch.arange(2 * rank, 2 * rank + 2) + 100 * r for r in range(size)])
    assert torch.equal(hvd.alltoall(equal), want)
    rows = [[(s + d) % 3 for d in range(size)] for s in range(size)]  # rows from s to d
    xs = [torch.arange(2.0 * sum(each)).view(-1, 2) + 100 * s for s, each in enumerate(rows)]
    want = torch.cat([x.split(each)[rank] for x, each in zip(xs, rows, strict=True)])
    for splits in (rows[rank], torch.tensor(rows[rank], dtype=torch.int32)):
        actual, received = hvd.alltoall(xs[rank], splits)
        assert torch.equal(actual, want)
        assert received.dtype == torch.int32
        assert received.tolist() == [each[rank] for each in rows]


@pytest.mark.parametrize("op", NAMES)
def test_reducescatter(hvd, op):
    for num_rows in (0, 1, 2 * hvd.size() + 1):
        xs = tensors(hvd.size(), (num_rows, 3), op=NAMES[op])
        want = np.array_split(reduced([x.numpy() for x in xs], NAMES[op]), hvd.size())[hvd.rank()]
        own = xs[hvd.rank()].clone()
        for actual in hvd.grouped_reducescatter([own, own], op=getattr(hvd, op)):
            assert np.array_equal(actual, want)
        scaled = hvd.reducescatter(own, op=getattr(hvd, op), prescale_factor=2.0, postscale_factor=0.5)
        assert op == "Product" or np.allclose(scaled, want)
        assert torch.equal(own, xs[hvd.rank()])


def test_gradients(hvd):
    """The loss is the sum over ranks of the result times the rank's weights; averages follow Horovod."""
    size, rank = hvd.size(), hvd.rank()
    rows = 2 * size

    def gradients(call, weights):
        x = torch.ones(rows, requires_grad=True)
        (call(x) * weights[rank]).sum().backward()
        return x.grad

    whole = tensors(size, (rows,))
    mean = sum(whole) / size
    assert torch.equal(gradients(lambda x: hvd.allreduce(x, op=hvd.Sum), whole), sum(whole))
    assert torch.equal(gradients(hvd.allreduce, whole), mean)
    assert torch.equal(gradients(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0), whole), 2 * sum(whole))
    assert torch.equal(gradients(lambda x: hvd.broadcast(x, size - 1), whole), mean * (rank == size - 1))
    assert torch.equal(gradients(hvd.alltoall, whole), torch.cat([w.chunk(size)[rank] for w in whole]))
    parts = tensors(size, (2,))
    assert torch.equal(gradients(hvd.reducescatter, parts), torch.cat(parts))
    assert torch.equal(gradients(lambda x: hvd.reducescatter(x, op=hvd.Sum), parts), size * torch.cat(parts))
    longer = tensors(size, (sum(range(1, size + 1)),))
    want = (sum(longer) / size).split([*range(1, size + 1)])[rank]
    x = torch.ones(rank + 1, requires_grad=True)
    (hvd.allgather(x) * longer[rank]).sum().backward()
    assert torch.equal(x.grad, want)


# --- the order of calls ---


def test_calls_in_different_orders_are_matched_by_name(hvd):
    names = [f"tensor {i}" for i in range(5)]
    order = names[hvd.rank() :] + names[: hvd.rank()]
    handles = {name: hvd.allreduce_async(torch.tensor([names.index(name)]), name=name, op=hvd.Sum) for name in order}
    for name in reversed(order):
        assert hvd.synchronize(handles[name]).tolist() == [names.index(name) * hvd.size()]


def test_poll_waits_for_no_one(hvd, mpi_comm):
    handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
    if hvd.rank() == 0 and hvd.size() > 1:
        assert not hvd.poll(handle)
        assert not hvd.poll(handle)
    mpi_comm.Barrier()  # the other ranks wait here until then
    other = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle).tolist() == hvd.synchronize(other).tolist() == [hvd.size()]


def test_what_is_no_handle(hvd):
    for use in (hvd.synchronize, hvd.poll):
        with pytest.raises(ValueError, match=r"^handle 99999 is not of a call: pass what an asynchronous function"):
            use(99999)


def test_a_call_that_is_only_polled_is_in_nobodys_way(hvd):
    if hvd.rank() == 0:
        hvd.poll(hvd.allreduce_async(torch.ones(1), name="only here"))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).tolist() == [hvd.size()]
    if hvd.rank() == 0:
        hvd.poll(hvd.allreduce_async(torch.ones(1), name="nor this"))
    assert hvd.join() in range(hvd.size())
    if hvd.rank() == 0:
        hvd.poll(hvd.allreduce_async(torch.ones(1), name="nor that, before shutdown"))


def test_a_call_ends_while_others_wait_for_theirs(hvd):
    first, second = ("late", "early") if hvd.rank() == 0 else ("early", "late")
    handles = {first: hvd.allreduce_async(torch.ones(1), name=first, op=hvd.Sum)}
    hvd.barrier()
    handles[second] = hvd.allreduce_async(torch.ones(1), name=second, op=hvd.Sum)
    assert hvd.synchronize(handles["early"]).tolist() == hvd.synchronize(handles["late"]).tolist() == [hvd.size()]
    assert hvd.poll(handles["late"])


def test_the_same_name_twice_at_a_time(hvd):
    first = hvd.allreduce_async(torch.ones(1), name="twice")
    with pytest.raises(ValueError, match="allreduce 'twice' has been called before"):
        hvd.allreduce_async(torch.ones(1), name="twice")
    assert hvd.synchronize(first).tolist() == [1]


def test_ranks_that_have_joined_add_zeros(hvd):
    size, rank = hvd.size(), hvd.rank()
    for step in range(rank + 1):  # the last rank has the most data
        active = size - step
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [active] * 3
        means = hvd.grouped_allreduce([torch.ones(2), torch.ones(1, dtype=torch.float64)])
        assert torch.allclose(torch.cat(means), torch.full((3,), active / size, dtype=torch.float64))
        hvd.barrier()
    assert hvd.join() == size - 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).tolist() == [size]


@pytest.mark.sizes(2, 3)
def test_what_zeros_are_no_part_of_is_refused_once_a_rank_has_joined(hvd):
    if hvd.rank() == 0:
        assert hvd.join() == hvd.size() - 1
        return
    for call in (lambda x: hvd.allreduce(x, op=hvd.Min), hvd.allgather, lambda x: hvd.broadcast(x, 1)):
        with pytest.raises(hvd.HorovodInternalError, match="rank 0 has joined, and zeros are no part of it"):
            call(torch.ones(2))
    hvd.join()


# --- parameters, states, objects ---


def test_objects(hvd):
    own = {"rank": hvd.rank(), "values": [1.5] * hvd.rank()}
    every = [{"rank": rank, "values": [1.5] * rank} for rank in range(hvd.size())]
    assert hvd.allgather_object(own) == every
    for root in range(hvd.size()):
        assert hvd.broadcast_object(own, root) == every[root]


@pytest.mark.parametrize("form", ["state_dict", "named_parameters", "parameters"])
def test_parameters(hvd, form):
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    torch.manual_seed(hvd.size() - 1)
    want = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).state_dict()
    params = getattr(model, form)()
    hvd.broadcast_parameters(params if form == "state_dict" else [*params], root_rank=hvd.size() - 1)
    assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_the_state_of_an_optimizer(hvd, kind):
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1 * (hvd.rank() + 1))
    if hvd.rank() == 0:  # rank 0 resumes
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    want = hvd.broadcast_object(optimizer.state_dict())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    actual = optimizer.state_dict()
    assert actual["param_groups"] == want["param_groups"]
    assert [*actual["state"]] == [*want["state"]]
    for number, state in actual["state"].items():
        assert all(
            torch.equal(torch.as_tensor(x), torch.as_tensor(want["state"][number][key])) for key, x in state.items()
        )


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_new_optimizers_state_is_filled_and_sent(hvd, wrapped):
    model = new_model()
    model[0].bias.requires_grad_(False)
    values = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (1 + hvd.rank()), weight_decay=0.5)
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=hvd.size() - 1)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * hvd.size())
    for param, value in zip(model.parameters(), values, strict=True):
        assert torch.equal(param, value)
        if not param.requires_grad:
            assert param not in optimizer.state
            continue
        assert not param.grad.any()
        assert not optimizer.state[param]["exp_avg"].any()
        assert optimizer.state[param]["exp_avg"].shape == param.shape


# --- optimizers ---


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return x, x.sum(1, keepdim=True)


def loss_of(model, step, rank=0, size=1):
    x, y = batch(step)
    return F.mse_loss(model(x[rank::size]), y[rank::size])


def trained_alone(num_passes=1, clip=None):
    """Return the parameters after steps on whole batches."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(num_passes):
            loss_of(model, num_passes * step + number).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return [*model.parameters()]


def distributed(hvd, model, **arguments):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **arguments)


def close(params, others, atol=1e-6):
    return all(torch.allclose(a, b, atol=atol) for a, b in zip(params, others, strict=True))


def groups(model):
    return [[model[4].weight, model[0].weight], [model[2].bias]]


@pytest.mark.parametrize(
    "settings", [{}, {"groups": 2}, {"groups": 0}, {"groups": groups}, {"gradient_predivide_factor": 4.0}]
)
def test_steps_are_those_of_the_whole_batch(hvd, settings, monkeypatch):
    monkeypatch.setattr("collectives.horovod.optimizer.BUCKET_BYTES", 200)  # 3 buckets
    model = new_model()
    settings = {key: value(model) if callable(value) else value for key, value in settings.items()}
    optimizer = distributed(hvd, model, **settings)
    assert isinstance(optimizer, torch.optim.SGD)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, hvd.rank(), hvd.size()).backward()
        optimizer.step()
    assert close(model.parameters(), trained_alone())


def test_sums_in_16_bits(hvd):
    model = new_model()
    optimizer = distributed(hvd, model, op=hvd.Sum, compression=hvd.Compression.fp16)
    for step in range(STEPS):
        optimizer.zero_grad()
        (loss_of(model, step, hvd.rank(), hvd.size()) / hvd.size()).backward()
        optimizer.step()
    alone = trained_alone()
    assert close(model.parameters(), alone, atol=0.01)
    assert not close(model.parameters(), alone, atol=1e-6)


def test_several_backward_passes_a_step(hvd):
    model = new_model()
    optimizer = distributed(hvd, model, backward_passes_per_step=3)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(3):
            loss_of(model, 3 * step + number, hvd.rank(), hvd.size()).backward()
        optimizer.step()
    assert close(model.parameters(), trained_alone(3), atol=1e-5)
    optimizer.set_backward_passes_per_step(1)
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    with pytest.raises(AssertionError, match="more than backward_passes_per_step=1 backward passes"):
        loss_of(model, 0).backward()
    with pytest.raises(AssertionError, match="gradients are being reduced"):
        optimizer.zero_grad()
    optimizer.step()


def test_gradients_that_are_clipped_before_the_step(hvd):
    model = new_model()
    optimizer = distributed(hvd, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, hvd.rank(), hvd.size()).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert close(model.parameters(), trained_alone(clip=0.5))
    loss_of(model, 0).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()


def test_an_optimizer_of_some_of_the_named_parameters(hvd):
    model = new_model()
    plain = torch.optim.SGD(model[4].parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    loss_of(model, 0, hvd.rank(), hvd.size()).backward()
    own = [param.grad.clone() for param in model[0].parameters()]
    optimizer.step()
    assert all(torch.equal(param.grad, old) for param, old in zip(model[0].parameters(), own, strict=True))
    whole = new_model()
    loss_of(whole, 0).backward()
    assert close([param.grad for param in model[4].parameters()], [param.grad for param in whole[4].parameters()])


def test_closures(hvd):
    model = new_model()
    optimizer = distributed(hvd, model)
    for step in range(STEPS):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, step, hvd.rank(), hvd.size())
            loss.backward()
            return loss

        assert optimizer.step(closure) > 0
    assert close(model.parameters(), trained_alone())


def test_parameters_that_only_some_ranks_reach(hvd):
    """Each rank's gradients appear in an order of its own; missing ones count as 0 in the mean."""
    layers = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(hvd.size() + 1)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers.parameters(), lr=1.0), layers.named_parameters())
    before = copy.deepcopy([*layers.parameters()])
    (layers[hvd.rank()](torch.ones(1, 2)).sum() * (hvd.rank() + 1)).backward()
    optimizer.step()
    steps = [old - new for old, new in zip(before, layers.parameters(), strict=True)]
    for rank, step in enumerate(steps[:-1]):
        assert torch.allclose(step, torch.full((2, 2), (rank + 1) / hvd.size()))
    assert not steps[-1].any()


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_gradients(hvd, sparse_as_dense):
    table = nn.Embedding(5, 2, sparse=True)
    before = table.weight.detach().clone()
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, sparse_as_dense=sparse_as_dense, op=hvd.Sum)
    table(torch.tensor([0, hvd.rank() + 1])).sum().backward()
    optimizer.step()
    assert table.weight.grad.is_sparse
    want = [hvd.size(), *[1] * hvd.size(), 0, 0, 0, 0][:5]
    assert torch.allclose((before - table.weight)[:, 0], torch.tensor(want, dtype=torch.float32))


def test_a_scheduler_made_before_the_optimizer_is_wrapped(hvd):
    model = new_model()
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step, hvd.rank(), hvd.size()).backward()
        plain._opt_called = True
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    want = new_model()
    for step, rate in enumerate((1.0, 0.5)):
        gradients = torch.autograd.grad(loss_of(want, step), [*want.parameters()])
        for param, gradient in zip(want.parameters(), gradients, strict=True):
            param.data -= rate * gradient
    assert close(model.parameters(), want.parameters(), atol=1e-5)


def test_ranks_that_run_out_of_data(hvd):
    """Rank r has r + 1 batches; gradients of joined ranks are 0."""
    size = hvd.size()
    model, want = new_model(), new_model()
    optimizer = distributed(hvd, model)
    alone = torch.optim.SGD(want.parameters(), lr=0.1, momentum=0.9)
    for step in range(size):
        alone.zero_grad()
        (sum(loss_of(want, 10 * step + rank) for rank in range(step, size)) / size).backward()
        alone.step()
        if step <= hvd.rank():
            optimizer.zero_grad()
            loss_of(model, 10 * step + hvd.rank()).backward()
            optimizer.step()
    last = hvd.join()
    assert last == size - 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    assert close(model.parameters(), want.parameters(), atol=1e-5)


def test_losses_are_those_of_ddp(hvd, mpi_comm):
    def losses(model, optimizer):
        values = []
        for step in range(STEPS):
            loss = loss_of(model, step, hvd.rank(), hvd.size())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        return values

    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    actual = losses(model, hvd.DistributedOptimizer(optimizer, model.named_parameters()))
    with world(mpi_comm, "gloo"):
        ddp = nn.parallel.DistributedDataParallel(new_model())
        assert actual == pytest.approx(losses(ddp, torch.optim.AdamW(ddp.parameters(), lr=0.01)), rel=1e-5)


# --- process sets ---


@pytest.mark.sizes(2, 3, 4)
def test_process_sets(hvd, mpi_comm):
    size, rank = hvd.size(), hvd.rank()
    even = hvd.add_process_set([*range(0, size, 2)])
    odd = hvd.ProcessSet([*range(1, size, 2)])
    assert (odd.process_set_id, odd.size(), odd.included()) == (None, None, bool(rank % 2))
    assert hvd.add_process_set(odd) is odd
    own, other = (odd, even) if rank % 2 else (even, odd)
    assert own.included()
    assert not other.included()
    assert own.rank() == rank // 2
    assert own.size() == len(own.ranks)
    assert hvd.allgather(torch.tensor([rank]), process_set=own).tolist() == own.ranks
    assert hvd.broadcast(torch.tensor(rank), own.ranks[-1], process_set=own) == own.ranks[-1]
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), process_set=even)
    model(torch.full((1, 1), float(rank))).backward()
    optimizer.step()
    assert model.weight.item() == 1 - (rank if rank % 2 else np.mean(even.ranks))
    with pytest.raises(ValueError, match=f"rank {rank} is not in it"):
        hvd.allreduce(torch.ones(1), process_set=other)
    assert hvd.remove_process_set(odd)
    assert not hvd.remove_process_set(odd)
    assert not hvd.remove_process_set(hvd.global_process_set)


# --- what cannot be ---


WRONG = {
    "rank 0: allreduce 'noname.1': op='mean' is unknown: use hvd.Average, Sum, Min, Max or Product": (
        lambda hvd, x: hvd.allreduce(x, op="mean")
    ),
    "rank 0: allreduce 'noname.1': op='sum' and average=True: pass op alone": (
        lambda hvd, x: hvd.allreduce(x, op="sum", average=True)
    ),
    "rank 0: allreduce 'noname.1': list: pass dense tensors": lambda hvd, x: hvd.allreduce_([1.0]),
    "rank 0: allreduce 'noname.1': tensor of layout torch.sparse_coo: pass dense tensors": (
        lambda hvd, x: hvd.allreduce(x.to_sparse())
    ),
    "rank 0: allgather 'noname.1': tensor of shape () has no rows: pass x.reshape(1)": (
        lambda hvd, x: hvd.allgather(torch.tensor(1.0))
    ),
    "rank 0: broadcast 'noname.1': root_rank=9 is out of range: use one of [0, 1]": lambda hvd, x: hvd.broadcast(x, 9),
    "rank 0: alltoall 'noname.1': 3 rows in splits of [1, 1]: pass splits with 2 numbers of rows, of 3 in all": (
        lambda hvd, x: hvd.alltoall(x)
    ),
    "rank 0: alltoall 'noname.1': 3 rows in splits of [4, -1]: pass splits with 2 numbers of rows, of 3 in all": (
        lambda hvd, x: hvd.alltoall(x, [4, -1])
    ),
    "rank 0: alltoall 'noname.1': 3 rows in splits of [1.0, 2.0]: pass splits with 2 numbers of rows, of 3 in all": (
        lambda hvd, x: hvd.alltoall(x, [1.0, 2.0])
    ),
    "rank 0: reducescatter 'noname.1': op='mean' is unknown: use hvd.Average, Sum, Min, Max or Product": (
        lambda hvd, x: hvd.reducescatter(x, op="mean")
    ),
}


@pytest.mark.sizes(2)
@pytest.mark.parametrize("words", WRONG)
def test_wrong_arguments(hvd, words):
    assert refusal(hvd, lambda: WRONG[words](hvd, torch.ones(3))) == words


@pytest.mark.sizes(2, 3)
def test_what_ranks_must_agree_in(hvd):
    last = hvd.size() - 1
    is_last = hvd.rank() == last

    def sides(begin, first, other, middle="calls", end="make the same call on every rank"):
        verb = "" if middle == "for" else "calls "
        words = refusal(hvd, begin)
        assert words == f"ranks disagree: rank 0 {verb or 'waits for '}{first}, rank {last} {middle} {other}; {end}"

    x, longer = "allreduce 'x' of float32 (3,) on cpu, op=avg", "allreduce 'x' of float32 (4,) on cpu, op=avg"
    sides(lambda: hvd.allreduce(torch.ones(3 + is_last), name="x"), x, longer)
    both = [torch.ones(1), torch.ones(3 + is_last)]
    sides(lambda: hvd.grouped_allreduce(both, name="x"), x, longer)
    sides(lambda: hvd.allreduce(torch.ones(3), name="x", op=hvd.Sum if is_last else None), x, x.replace("avg", "sum"))
    sides(lambda: hvd.allreduce(torch.ones(3), name="x", prescale_factor=1 + is_last), x, f"{x}, prescale=2.0")
    root = "broadcast 'x' of float32 (3,) on cpu, root="
    sides(lambda: hvd.broadcast(torch.ones(3), int(is_last), name="x"), f"{root}0", f"{root}1")
    names = x.replace("'x'", "'a'"), x.replace("'x'", "'b'")
    end = "make both calls on all ranks"
    sides(lambda: hvd.allreduce(torch.ones(3), name="b" if is_last else "a"), *names, middle="for", end=end)
    description = "DistributedOptimizer 'noname.1' of weight: float32 ({}, 2) on cpu, op=avg"
    sides(lambda: distributed(hvd, nn.Linear(2, 2 + is_last)), description.format(2), description.format(3))
    wrong = refusal(hvd, lambda: hvd.allreduce([1] if is_last else torch.ones(3), name="x"))
    assert wrong == f"rank {last}: allreduce 'x': list: pass dense tensors"


@pytest.mark.sizes(2)
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0: use 1 or more"),
        ({"gradient_predivide_factor": 2.0, "op": "sum"}, "gradient_predivide_factor=2.0 with op=sum"),
        ({"groups": -1}, "groups=-1: use 0 or more, or lists of parameters"),
        ({"groups": [["weight"]]}, "groups must be lists of parameters, each parameter in one of them"),
        ({"named_parameters": [("a", None)]}, "named_parameters lacks 2 of 2 parameters"),
        ({"named_parameters": ["weight"]}, "named_parameters must contain pairs of a name and a parameter"),
        ({"op": "mean"}, "op='mean' is unknown"),
    ],
)
def test_optimizers_that_cannot_be(hvd, settings, words):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    assert words in refusal(hvd, lambda: hvd.DistributedOptimizer(optimizer, **settings))
    twice = [("same", param) for param in model.parameters()]
    assert "has 'same' more than once" in refusal(hvd, lambda: hvd.DistributedOptimizer(optimizer, twice))


@pytest.mark.sizes(2)
def test_process_sets_that_cannot_be(hvd, mpi_comm):
    from collectives import InputError

    for ranks, words in (
        ([0, 5], "pass one or more, each once, from 0 to 1"),
        ([], "pass one or more, each once, from 0 to 1"),
        ([0, 1], "has been added before"),
        ([hvd.rank()], "ranks disagree"),
    ):
        with pytest.raises(InputError, match=words):
            hvd.add_process_set(ranks)
    for wrong in (5, "ab", [0.5]):
        with pytest.raises(ValueError, match="pass a list of ranks, or a communicator of mpi4py"):
            hvd.ProcessSet(wrong)


def test_what_horovod_has_and_this_has_not(hvd):
    with pytest.raises(AttributeError, match=r"hvd\.elastic is not supported: write checkpoints"):
        hvd.elastic  # noqa: B018
    with pytest.raises(AttributeError, match=r"hvd\.Adasum is not supported: use hvd\.Average"):
        hvd.Adasum  # noqa: B018
    assert not hasattr(hvd, "start_timeline")
    assert not hasattr(hvd, "nonsense")


def test_before_init(mpi_comm):
    import collectives.horovod.torch as hvd

    assert not hvd.is_initialized()
    for call in (hvd.rank, hvd.size, hvd.local_rank, lambda: hvd.allreduce(torch.ones(1))):
        with pytest.raises(ValueError, match=r"call hvd\.init\(\) first"):
            call()
    hvd.init(mpi_comm, process_sets=[hvd.ProcessSet([0])] if mpi_comm.size > 1 else None)
    hvd.init()
    assert hvd.size() == mpi_comm.size
    hvd.shutdown()
    assert not hvd.is_initialized()


# --- batch normalization ---


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 2, 2)])
@pytest.mark.parametrize("fewest", [0, 2])
def test_batches_are_normalized_together(hvd, shape, momentum, fewest):
    """Losses, gradients and running statistics of batches of different sizes equal torch's on the whole batch."""
    rank, rows = hvd.rank(), [fewest + 2 * rank for rank in range(hvd.size())]
    dims = len(shape)
    norm = getattr(nn, f"BatchNorm{max(dims - 1, 1)}d")(3, momentum=momentum, dtype=torch.float64)
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    ours = hvd.SyncBatchNorm(3, momentum=momentum, dtype=torch.float64)
    ours.load_state_dict(norm.state_dict())
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        batches = [1000 + torch.randn(n, *shape, generator=generator, dtype=torch.float64) for n in rows]
        weights = [torch.randn(n, *shape, generator=generator, dtype=torch.float64) for n in rows]
        whole, own = torch.cat(batches).requires_grad_(), batches[rank].clone().requires_grad_()
        norm.zero_grad()
        ours.zero_grad()
        (norm(whole) * torch.cat(weights)).sum().backward()
        (ours(own) * weights[rank]).sum().backward()
        begin = sum(rows[:rank])
        assert torch.allclose(own.grad, whole.grad[begin : begin + rows[rank]], atol=1e-10)
        for mine, its in zip(ours.parameters(), norm.parameters(), strict=True):
            assert torch.allclose(hvd.allreduce(mine.grad, op=hvd.Sum), its.grad, atol=1e-9)
    for name, value in norm.state_dict().items():
        assert torch.allclose(ours.state_dict()[name], value, atol=1e-10), name
    ours.eval()
    norm.eval()
    assert torch.allclose(ours(own), norm(own), atol=1e-10)


def test_an_empty_batch_on_all_ranks_leaves_the_running_statistics(hvd):
    norm = hvd.SyncBatchNorm(3)
    norm(torch.randn(4, 3))
    mean, variance = norm.running_mean.clone(), norm.running_var.clone()
    x = torch.zeros(0, 3, requires_grad=True)
    y = norm(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 3)
    assert torch.equal(norm.running_mean, mean)
    assert torch.equal(norm.running_var, variance)
    assert not norm.weight.grad.any()


def test_one_value_a_channel_is_refused_on_all_ranks(hvd):
    norm = hvd.SyncBatchNorm(3)
    with pytest.raises(ValueError, match=r"one value a channel|more than 1 value per channel"):  # torch's, on one rank
        norm(torch.randn(1 if hvd.rank() == 0 else 0, 3))
    assert torch.equal(norm.running_mean, torch.zeros(3))
    assert torch.equal(norm.running_var, torch.ones(3))
    assert norm.eval()(torch.randn(1, 3)).isfinite().all()


def test_a_batch_without_channels_is_refused(hvd):
    with pytest.raises(ValueError, match=r"SyncBatchNorm of a tensor of 1 dims: pass \(batch, channels, ...\)"):
        hvd.SyncBatchNorm(3)(torch.ones(3))
