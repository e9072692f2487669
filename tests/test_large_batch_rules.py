"""The remarks of Goyal et al. 2017 (arXiv 1706.02677, sections 3 and 5.1), where large batches quietly go wrong."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import Tensor, nn  # noqa: E402

from hpcdl.data import part, shares  # noqa: E402
from hpcdl.torch.decay import decay_groups  # noqa: E402
from hpcdl.torch.schedules import GradualWarmup, linear_scaled_lr  # noqa: E402

# Powers of two and small integers: every sum and product here is exact, unless a test says otherwise.
START = 8.0
GRADIENTS = (4.0, 2.0, 8.0, 1.0, -4.0, 2.0)
RATES = (0.5, 0.5, 0.125, 0.125, 0.25, 0.25)  # falls, and rises
MOMENTUM = 0.5


def torchs_sgd(
    rates: Iterable[float], momentum: Callable[[int], float], *, weight_decay: float = 0.0, k: float = 1.0
) -> list[float]:
    """Where torch.optim.SGD takes a weight whose loss is k times a sum over GRADIENTS, at each step's rate."""
    weight = nn.Parameter(torch.tensor(START, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.0, momentum=momentum(0), weight_decay=weight_decay)
    path = []
    for step, (rate, gradient) in enumerate(zip(rates, GRADIENTS, strict=True)):
        optimizer.param_groups[0].update(lr=rate, momentum=momentum(step))
        optimizer.zero_grad()
        (k * gradient * weight).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        path.append(weight.item())
    return path


# ---- R1: scaling the loss is not scaling the rate ------------------------------------------------------------------


@pytest.mark.parametrize("weight_decay", [0.0, 0.25])
def test_r1_a_loss_times_k_is_a_rate_times_k_only_without_weight_decay(weight_decay: float) -> None:
    k = 4.0
    of_rate = torchs_sgd([k * rate for rate in RATES], lambda step: MOMENTUM, weight_decay=weight_decay)
    of_loss = torchs_sgd(RATES, lambda step: MOMENTUM, weight_decay=weight_decay, k=k)
    assert (of_loss == of_rate) == (weight_decay == 0)


def test_r1_the_decay_is_what_a_scaled_loss_leaves_behind() -> None:
    """w - lr (k g + d w) lacks (k - 1) lr d w of w - k lr (g + d w)."""
    rate, decay, k = 0.5, 0.25, 4.0
    first = [
        torchs_sgd([r] * 6, lambda step: 0.0, weight_decay=decay, k=scale)[0] for r, scale in ((rate, k), (k * rate, 1))
    ]
    assert first[0] - first[1] == (k - 1) * rate * decay * START


# ---- R2: momentum correction ---------------------------------------------------------------------------------------


def rate_inside(*, corrected: bool) -> list[float]:
    """v = m v + lr g, w -= v: the form with the rate in the buffer, in which old steps keep their rates."""
    weight, velocity, before = START, 0.0, RATES[0]
    path = []
    for rate, gradient in zip(RATES, GRADIENTS, strict=True):
        momentum = MOMENTUM * rate / before if corrected else MOMENTUM
        velocity = momentum * velocity + rate * gradient
        weight, before = weight - velocity, rate
        path.append(weight)
    return path


def test_r2_the_form_with_the_rate_inside_is_torchs_only_with_the_correction() -> None:
    assert rate_inside(corrected=True) == torchs_sgd(RATES, lambda step: MOMENTUM)
    assert rate_inside(corrected=False) != torchs_sgd(RATES, lambda step: MOMENTUM)


def test_r2_torchs_sgd_has_no_use_for_the_correction() -> None:
    """Its buffer holds gradients alone, so that a new rate holds for all of them at once."""
    correct = torchs_sgd(RATES, lambda step: MOMENTUM)
    corrected = torchs_sgd(RATES, lambda step: MOMENTUM * RATES[step] / RATES[max(step - 1, 0)])
    assert corrected[:2] == correct[:2]
    assert corrected[2] != correct[2]  # the first step at another rate


def test_r2_a_warm_up_leaves_the_momentum_alone() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=linear_scaled_lr(0.1, 8192), momentum=0.9)
    warmup = GradualWarmup(torch.optim.lr_scheduler.StepLR(optimizer, 3), 6, start_factor=1 / 32)
    for _ in range(9):
        optimizer.step()
        warmup.step()
        assert optimizer.param_groups[0]["momentum"] == 0.9


# ---- R3: the mean over the global batch ----------------------------------------------------------------------------

SAMPLES = 16
INPUTS = torch.arange(SAMPLES * 3, dtype=torch.float64).reshape(SAMPLES, 3) % 7 - 3
TARGETS = torch.arange(SAMPLES, dtype=torch.float64) % 5


def gradient(mine: NDArray[np.int64], divide: Callable[[Tensor], Tensor]) -> Tensor:
    """One rank's, of the squared errors that a small linear model makes on its samples."""
    weights = torch.tensor([1.0, -2.0, 1.0], dtype=torch.float64, requires_grad=True)
    divide((INPUTS[mine] @ weights - TARGETS[mine]).square()).backward()  # type: ignore[no-untyped-call]
    return weights.grad  # type: ignore[no-any-return]


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("size", [2, 3, 5, 7])
def test_r3_sums_over_the_global_batch_are_the_gradient_of_one_process(size: int, passes: int) -> None:
    for epoch in range(3):
        whole = next(shares(SAMPLES, epoch, seed=1, batch=8, rank=0, size=1))
        one = gradient(whole.indices, torch.mean)
        ranks = [next(shares(SAMPLES, epoch, seed=1, batch=8, rank=rank, size=size)) for rank in range(size)]
        assert {share.total for share in ranks} == {8}
        cuts = [share.indices[part(len(share.indices), each, passes)] for share in ranks for each in range(passes)]
        assert torch.equal(sum(gradient(cut, lambda losses: losses.sum() / 8) for cut in cuts), one)


def test_r3_a_mean_of_means_weighs_the_samples_of_short_shares_too_much() -> None:
    ranks = [next(shares(SAMPLES, 0, seed=1, batch=8, rank=rank, size=3)).indices for rank in range(3)]
    assert sorted(map(len, ranks)) == [2, 3, 3]
    of_means = sum(gradient(mine, torch.mean) for mine in ranks) / 3
    one = gradient(np.concatenate(ranks), torch.mean)
    assert not torch.allclose(of_means, one, rtol=0.01)


def test_r3_a_rank_without_samples_counts_with_zeros_where_a_mean_would_be_no_number() -> None:
    none = np.arange(0)
    assert (gradient(none, lambda losses: losses.sum() / 8) == 0).all()
    assert math.isnan((INPUTS[none] @ torch.ones(3, dtype=torch.float64)).mean().item())


# ---- R4: one shuffle -----------------------------------------------------------------------------------------------


def epoch_of(size: int, epoch: int, n: int = 100, batch: int = 12) -> list[list[int]]:
    """The global batches of an epoch, as the ranks' parts put together."""
    ranks = (shares(n, epoch, seed=7, batch=batch, rank=rank, size=size) for rank in range(size))
    return [
        [sample for share in together for sample in share.indices.tolist()] for together in zip(*ranks, strict=True)
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 16])
def test_r4_one_shuffle_is_cut_among_the_ranks(size: int) -> None:
    orders = []
    for epoch in range(3):
        batches = epoch_of(size, epoch)
        assert batches == epoch_of(1, epoch)  # the same global batches for any number of ranks
        orders.append([sample for batch in batches for sample in batch])
        assert sorted(orders[-1]) == list(range(100))  # every sample once an epoch
    assert orders[0] != orders[1] != orders[2] != orders[0]


# ---- section 5.1: what does not decay ------------------------------------------------------------------------------


def parameters_behind_zero_gradients(groups: Any) -> dict[str, Tensor]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(1.0)
            each.grad = torch.zeros_like(each)
    torch.optim.SGD(groups(model), lr=0.5, weight_decay=0.25).step()
    return {name: each.detach() for name, each in model.named_parameters()}


def test_batch_norms_and_biases_do_not_decay() -> None:
    after = parameters_behind_zero_gradients(lambda model: decay_groups(model, 0.25))
    for name, value in after.items():
        matrix = name in ("0.weight", "2.weight")
        assert (value == (1 - 0.5 * 0.25 if matrix else 1.0)).all(), name
    plain = parameters_behind_zero_gradients(lambda model: model.parameters())
    assert all((value == 1 - 0.5 * 0.25).all() for value in plain.values())
