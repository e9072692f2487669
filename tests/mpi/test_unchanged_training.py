"""torch's own ways to train on several ranks: over the backend hpcdl they compute what they do over gloo.

The last file of its ranks, by its name: gloo's groups and their threads stay (see `over_both`), and with 3 ranks on 2
cores a test with many barriers behind them has taken 60 s instead of 6.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook  # noqa: E402
from torch.distributed.algorithms.join import Join  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import hpcdl.torch  # noqa: E402

pytestmark = [pytest.mark.ranks(2, 3, 4), pytest.mark.filterwarnings("ignore")]

BACKENDS = ("hpcdl", "gloo")
kept: list[Any] = []
State = dict[str, Tensor]


class Groups:
    """Default groups, one after the other."""

    def __init__(self, comm: MPI.Intracomm, folder: str) -> None:
        self.comm, self.folder, self._made = comm, folder, 0

    def init(self, backend: str) -> None:
        self._made += 1
        dist.init_process_group(
            backend,
            store=dist.FileStore(f"{self.folder}/store-{self._made}", self.comm.size),
            rank=self.comm.rank,
            world_size=self.comm.size,
            timeout=timedelta(seconds=30),
        )

    def over_both(self, train: Callable[[], State]) -> tuple[State, State]:
        """What training gives over either."""
        results = []
        for backend in BACKENDS:
            self.init(backend)
            torch.manual_seed(0)
            results.append(train())
            # One of gloo's must not end on its own thread, where the last callback of a future may have held it.
            kept.append(dist.group.WORLD)
            dist.destroy_process_group()
        return results[0], results[1]


@pytest.fixture
def groups(comm: MPI.Intracomm, tmp_path: Path) -> Iterator[Groups]:
    yield Groups(comm, comm.bcast(str(tmp_path)))
    if dist.is_initialized():
        dist.destroy_process_group()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """This rank's."""
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + dist.get_rank())).double()
    return x, x[:, :2] * 2


def steps(model: nn.Module, optimizer: Any, n: int = 4) -> State:
    """Train, and give what was learnt."""
    for step in range(n):
        x, y = batch(step)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


def assert_equal(ours: State, theirs: State, tolerance: float = 1e-12) -> None:
    """Of the 16 digits of float64 a few are lost: the two add in other orders."""
    assert ours.keys() == theirs.keys()
    for name, each in ours.items():
        assert torch.allclose(each, theirs[name], rtol=tolerance, atol=tolerance), name


# ---- DistributedDataParallel ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["plain", "many buckets", "views", "static", "unused"])
def test_ddp_learns_the_same(groups: Groups, way: str) -> None:
    options: dict[str, Any] = {
        "plain": {},
        "many buckets": {"bucket_cap_mb": 1e-4},
        "views": {"gradient_as_bucket_view": True},
        "static": {"static_graph": True},
        "unused": {"find_unused_parameters": True},
    }[way]

    def train() -> State:
        model = DistributedDataParallel(network(), **options)
        return steps(model, torch.optim.Adam(model.parameters(), lr=0.01))

    ours, theirs = groups.over_both(train)
    assert_equal(ours, theirs)


def test_ddp_accumulates_without_synchronising(groups: Groups) -> None:
    def train() -> State:
        model = DistributedDataParallel(network())
        for step in range(4):
            x, y = batch(step)
            with model.no_sync() if step < 3 else nullcontext():
                (model(x) - y).square().mean().backward()
        return {name: each.grad.clone() for name, each in model.named_parameters()}

    assert_equal(*groups.over_both(train))


def test_ddp_adds_up_sparse_gradients(groups: Groups) -> None:
    def train() -> State:
        table = nn.Embedding(12, 3, sparse=True)
        model = DistributedDataParallel(nn.Sequential(table, nn.Linear(3, 1)))
        model(torch.tensor([dist.get_rank(), 3, 3])).sum().backward()
        assert table.weight.grad.is_sparse
        return {"table": table.weight.grad.to_dense()}

    assert_equal(*groups.over_both(train), tolerance=1e-6)


def power() -> Any:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)


def bf16(state, bucket):  # type: ignore[no-untyped-def] # torch refuses annotations that are strings
    """DDP refuses torch's own by its name on a CPU, whatever the backend."""
    return default_hooks.bf16_compress_hook(state, bucket)


HOOKS: dict[str, tuple[Callable[[], Any], Any, float]] = {
    "allreduce": (lambda: None, default_hooks.allreduce_hook, 1e-5),
    # Rounded to 16 bits before the sum and, over hpcdl, once behind it: by a few parts in a thousand.
    "fp16": (lambda: None, default_hooks.fp16_compress_hook, 2e-3),
    "bf16": (lambda: None, bf16, 2e-2),
    "PowerSGD": (power, powerSGD_hook.powerSGD_hook, 1e-5),
    "PowerSGD in fp16": (power, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), 5e-2),
}


def learn_by(hook: Any, state: Any, cap_mb: float) -> State:
    model = DistributedDataParallel(network().float(), bucket_cap_mb=cap_mb)
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        x, y = (each.float() for each in batch(step))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


@pytest.mark.parametrize("name", HOOKS)
def test_ddps_communication_hooks(groups: Groups, name: str) -> None:
    state, hook, tolerance = HOOKS[name]
    ours, theirs = groups.over_both(lambda: learn_by(hook, state(), 25))
    assert_equal(ours, theirs, tolerance)


@pytest.mark.parametrize("name", HOOKS)
def test_ddps_communication_hooks_on_several_buckets(groups: Groups, name: str) -> None:
    """PowerSGD calls collectives from callbacks, which in gloo meet those of the next bucket, and end the program."""
    state, hook, tolerance = HOOKS[name]
    if "PowerSGD" not in name:
        ours, theirs = groups.over_both(lambda: learn_by(hook, state(), 2e-4))
        assert_equal(ours, theirs, tolerance)
        return
    results = []
    for _ in range(2):
        groups.init("hpcdl")
        torch.manual_seed(0)
        results.append(learn_by(hook, state(), 2e-4))
        for each in results[-1].values():
            every = [torch.empty_like(each) for _ in range(groups.comm.size)]
            dist.all_gather(every, each)
            assert all(torch.equal(one, each) for one in every)
        dist.destroy_process_group()
    assert all(torch.equal(each, results[1][name]) for name, each in results[0].items())


def test_join_lets_ranks_have_different_numbers_of_batches(groups: Groups) -> None:
    def train() -> State:
        model = DistributedDataParallel(network())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        with Join([model, optimizer]):
            return steps(model, optimizer, 3 + dist.get_rank())

    def state_of_the_last() -> State:
        state = train()
        dist.barrier()
        for each in state.values():
            dist.broadcast(each, dist.get_world_size() - 1)
        return state

    assert_equal(*groups.over_both(state_of_the_last))


def test_the_zero_redundancy_optimizer(groups: Groups) -> None:
    def train() -> State:
        model = DistributedDataParallel(network())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        state = steps(model, optimizer)
        optimizer.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            moments = optimizer.state_dict()["state"]
            state |= {f"moment {number}": each["exp_avg"] for number, each in moments.items()}
        return state

    assert_equal(*groups.over_both(train))


def test_synchronised_batch_normalisation(groups: Groups) -> None:
    """torch's own takes CUDA tensors only; what DDP does with the buffers is tested here."""

    def train() -> State:
        model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double())
        return steps(model, torch.optim.SGD(model.parameters(), lr=0.1))

    ours, theirs = groups.over_both(train)
    if groups.comm.rank == 0:  # the running statistics of the others are their own behind the last step
        assert_equal(ours, theirs)


# ---- sharded -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reshard", [True, False])
def test_fully_sharded_parameters(groups: Groups, reshard: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    def train() -> State:
        model = network()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        state = steps(model, torch.optim.Adam(model.parameters(), lr=0.01))
        return {name: each.full_tensor() for name, each in state.items()}

    assert_equal(*groups.over_both(train))


def test_fully_sharded_parameters_in_16_bits(groups: Groups) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def train() -> State:
        model = network().float()
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            x, y = (each.float() for each in batch(step))
            (model(x) - y).square().mean().backward()
            optimizer.step()
        return {name: each.full_tensor() for name, each in model.state_dict().items()}

    assert_equal(*groups.over_both(train), tolerance=1e-5)


def test_distributed_tensors_multiply(groups: Groups) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    groups.init("hpcdl")
    mesh = init_device_mesh("cpu", (groups.comm.size,))
    one = torch.arange(48.0).reshape(8, 6) % 5
    other = torch.arange(42.0).reshape(6, 7) % 3
    for mine in (Shard(0), Shard(1), Replicate()):
        for theirs in (Shard(0), Shard(1), Replicate()):
            product = distribute_tensor(one, mesh, [mine]) @ distribute_tensor(other, mesh, [theirs])
            assert torch.equal(product.full_tensor(), one @ other)
            assert torch.equal(product.redistribute(mesh, [Shard(1)]).full_tensor(), one @ other)


def test_tensor_parallel_layers(groups: Groups) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    groups.init("hpcdl")
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2)).double()
    model = copy.deepcopy(alone)
    mesh = init_device_mesh("cpu", (groups.comm.size,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(5, 6).double()
    result, expected = model(x), alone(x)
    result.square().mean().backward()
    expected.square().mean().backward()
    assert torch.allclose(result, expected, rtol=1e-12)
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine.grad.full_tensor(), theirs.grad, rtol=1e-10)


def test_a_pipeline(groups: Groups) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    groups.init("hpcdl")
    torch.manual_seed(0)
    size, me = groups.comm.size, groups.comm.rank
    layers = [nn.Linear(6, 6).double() for _ in range(size)]
    stage = PipelineStage(layers[me], me, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(8, 6).double(), torch.randn(8, 6).double()
    if me == 0:
        schedule.step(x)
    else:
        schedule.step(target=y) if me == size - 1 else schedule.step()
    alone = nn.Sequential(*(copy.deepcopy(layer) for layer in layers))
    alone.zero_grad()
    nn.functional.mse_loss(alone(x), y).backward()
    assert torch.allclose(layers[me].weight.grad, alone[me].weight.grad, rtol=1e-10)


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def test_a_distributed_checkpoint_comes_back(groups: Groups) -> None:
    from torch.distributed.fsdp import fully_shard

    folder = os.path.join(groups.folder, "checkpoint")
    groups.init("hpcdl")
    mesh = init_device_mesh("cpu", (groups.comm.size,))

    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = network()
        fully_shard(model, mesh=mesh)
        return model

    saved, loaded = made(0), made(1)
    dcp.save({"model": saved.state_dict(), "step": 7}, checkpoint_id=folder)
    state = {"model": loaded.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=folder)
    loaded.load_state_dict(state["model"])
    assert state["step"] == 7
    for mine, theirs in zip(loaded.parameters(), saved.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor())
    dcp.async_save({"model": saved.state_dict()}, checkpoint_id=f"{folder}-2").result()
    assert os.path.exists(f"{folder}-2/.metadata")


assert hpcdl.torch
