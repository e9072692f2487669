"""LARS moves each layer by what You et al. write, and is an optimiser of torch like any other."""

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import Tensor, nn  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402

from hpcdl.torch import lars  # noqa: E402
from hpcdl.torch.lars import LARS  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several only wait for each other, on so little work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def never(_: Tensor) -> bool:
    return False


def parameter(values: Any, gradient: Any = None, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    made = nn.Parameter(torch.as_tensor(values, dtype=dtype))
    if gradient is not None:
        made.grad = torch.as_tensor(gradient, dtype=dtype)
    return made


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)


def backward(net: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    like = next(net.parameters())
    images = torch.randn(7, 5, generator=generator, dtype=torch.float64).to(like.dtype)
    net.zero_grad()
    loss: Tensor = net(images).square().mean()
    loss.backward()
    return loss


def by_hand(
    weights: list[list[float]],
    gradients: list[list[list[float]]],
    rates: list[float],
    *,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    trust: float = 0.001,
    eps: float = 1e-8,
) -> list[list[float]]:
    """You et al. 2017, algorithm 1, in plain Python: one gradient a weight and step."""
    weights = [list(each) for each in weights]
    momenta = [[0.0] * len(each) for each in weights]
    for step, rate in enumerate(rates):
        for w, v, g in zip(weights, momenta, gradients[step], strict=True):
            of_w, of_g = math.hypot(*w), math.hypot(*g)
            ratio = trust * of_w / (of_g + weight_decay * of_w + eps) if of_w > 0 and of_g > 0 else 1.0
            for place in range(len(w)):
                v[place] = momentum * v[place] + rate * ratio * (g[place] + weight_decay * w[place])
                w[place] -= v[place]
    return weights


def test_three_steps_with_a_changing_rate_are_those_of_the_paper() -> None:
    w = parameter([[3.0], [4.0]])
    optimiser = LARS([w], lr=10.0, momentum=0.5, weight_decay=0.25, trust_coefficient=0.125, eps=0.75)
    steps = [([[6.0], [8.0]], 10.0), ([[0.0], [1.0]], 2.0), ([[-3.0], [4.0]], 0.5)]
    # |w| = 5, |g| = 10: ratio 0.125 * 5 / (10 + 1.25 + 0.75) = 0.625 / 12, v = 10 * 0.625 / 12 * (6.75, 9)
    a = 10 * 0.625 / 12
    v1 = (a * 6.75, a * 9.0)
    w1 = (3 - v1[0], 4 - v1[1])
    n = math.sqrt(w1[0] ** 2 + w1[1] ** 2)
    b = 2 * 0.125 * n / (1 + 0.25 * n + 0.75)
    v2 = (0.5 * v1[0] + b * 0.25 * w1[0], 0.5 * v1[1] + b * (1 + 0.25 * w1[1]))
    w2 = (w1[0] - v2[0], w1[1] - v2[1])
    n = math.sqrt(w2[0] ** 2 + w2[1] ** 2)
    c = 0.5 * 0.125 * n / (5 + 0.25 * n + 0.75)
    v3 = (0.5 * v2[0] + c * (-3 + 0.25 * w2[0]), 0.5 * v2[1] + c * (4 + 0.25 * w2[1]))
    expected = [w1, w2, (w2[0] - v3[0], w2[1] - v3[1])]
    for (gradient, rate), after in zip(steps, expected, strict=True):
        w.grad = torch.tensor(gradient, dtype=torch.float64)
        optimiser.param_groups[0]["lr"] = rate
        optimiser.step()
        # Float64 and another order of the same operations.
        assert w.flatten().tolist() == pytest.approx(after, rel=1e-14)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
@pytest.mark.parametrize("block", [1, 7, 10**6])
@pytest.mark.parametrize("long", [1, 10**6])
def test_many_layers_at_once_move_as_each_would_by_hand(
    monkeypatch: pytest.MonkeyPatch, momentum: float, weight_decay: float, block: int, long: int
) -> None:
    monkeypatch.setattr(lars, "BLOCK", block)
    monkeypatch.setattr(lars, "LONG", long)
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 4), (1, 1), (5,), (2, 3, 2, 2), (), (7, 1), (0, 3), (4, 6)]
    starts = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    gradients = [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes] for _ in range(4)]
    rates = [30.0, 10.0, 20.0, 5.0]
    weights = [nn.Parameter(each.clone()) for each in starts]
    optimiser = LARS(weights, lr=1, momentum=momentum, weight_decay=weight_decay, exclude=never, eps=0.5)
    for rate, given in zip(rates, gradients, strict=True):
        optimiser.param_groups[0]["lr"] = rate
        for weight, gradient in zip(weights, given, strict=True):
            weight.grad = gradient
        optimiser.step()
    expected = by_hand(
        [each.flatten().tolist() for each in starts],
        [[each.flatten().tolist() for each in step] for step in gradients],
        rates,
        momentum=momentum,
        weight_decay=weight_decay,
        eps=0.5,
    )
    for weight, values in zip(weights, expected, strict=True):
        assert weight.flatten().tolist() == pytest.approx(values, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_decay_the_scale_of_the_gradient_does_not_matter(dtype: torch.dtype) -> None:
    ends = []
    for scale in 1.0, 2.0**-9, 2.0**9:
        net = network(dtype)
        before = net[0].weight.detach().clone()
        optimiser = LARS([net[0].weight, net[3].weight], lr=100.0, eps=0)
        for step in range(4):
            backward(net, step)
            for each in net.parameters():
                each.grad *= scale
            optimiser.step()
        assert not torch.equal(net[0].weight, before)
        ends.append(net[0].weight.detach())
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


def test_layers_of_different_size_move_by_the_same_share_of_their_norms() -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(scale * torch.randn(6, 5)) for scale in (1e-3, 1.0, 1e3)]
    starts = [each.detach().clone() for each in weights]
    for each, scale in zip(weights, (1e3, 1e-2, 1e-5), strict=True):
        each.grad = scale * torch.randn(6, 5)
    LARS(weights, lr=20.0, trust_coefficient=0.01, eps=0).step()
    for each, start in zip(weights, starts, strict=True):
        assert ((each.detach() - start).norm() / start.norm()).item() == pytest.approx(0.2, rel=1e-4)


@pytest.mark.parametrize("eps", [0, 1e-8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_norm_of_zero_means_ratio_one(eps: float, dtype: torch.dtype) -> None:
    still, born = parameter([[3.0, 4.0]], [[0.0, 0.0]], dtype), parameter([[0.0, 0.0]], [[2.0, -4.0]], dtype)
    both = parameter([[0.0]], [[0.0]], dtype)
    LARS([still, born, both], lr=0.5, eps=eps).step()
    assert still.tolist() == [[3.0, 4.0]] and born.tolist() == [[-1.0, 2.0]] and both.tolist() == [[0.0]]


def test_a_gradient_of_zero_still_decays_at_ratio_one() -> None:
    w = parameter([[4.0, 8.0]], [[0.0, 0.0]])
    LARS([w], lr=0.5, weight_decay=0.25).step()
    assert w.tolist() == [[3.5, 7.0]]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_weights_move_as_in_float32(dtype: torch.dtype, momentum: float) -> None:
    """Their norm, 300 * sqrt(300,000) = 164,000, is beyond float16, as is its square beyond anything close to it."""
    torch.manual_seed(0)
    start = (300 * torch.sign(torch.randn(300, 1000))).to(dtype)
    gradient = (1e-5 * torch.randn(300, 1000)).to(dtype)
    ends = []
    for wide in dtype, torch.float32:
        w = parameter(start.clone(), gradient.clone(), wide)
        optimiser = LARS([w], lr=20.0, momentum=momentum, weight_decay=1e-4)
        optimiser.step()
        ends.append(w.detach())
        for state in optimiser.state.values():
            assert state["momentum_buffer"].dtype == wide
    assert ends[0].isfinite().all() and not torch.equal(ends[0], start)
    assert torch.equal(ends[0], ends[1].to(dtype))


def test_the_norm_of_ten_million_elements_is_right_to_six_digits() -> None:
    x = torch.randn(2500, 4000, generator=torch.Generator().manual_seed(0))
    found = lars._norms([x, x[:2, :3]]).double()
    for norm, of in zip(found, (x, x[:2, :3]), strict=True):
        assert norm.item() == pytest.approx(torch.linalg.vector_norm(of, dtype=torch.float64).item(), rel=1e-6)


def test_types_may_be_mixed_in_a_group() -> None:
    types = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32]
    start, gradient = torch.full((300, 300), 300.0), torch.full((300, 300), 5.0)
    alone, together = ([parameter(start.clone(), gradient, each) for each in types] for _ in range(2))
    for each in alone:
        LARS([each], lr=30.0, weight_decay=0.01).step()
    LARS(together, lr=30.0, weight_decay=0.01).step()
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other) and 280 < one[0, 0].item() < 295


def test_long_and_strided_parameters_move_as_contiguous_ones() -> None:
    torch.manual_seed(0)
    start, gradient = torch.randn(40, 30, 30, 30), torch.randn(40, 30, 30, 30)
    assert start.numel() > lars.BLOCK
    ends = []
    for memory in torch.contiguous_format, torch.channels_last:
        w = nn.Parameter(start.clone(memory_format=memory))
        w.grad = gradient.clone(memory_format=memory)
        optimiser = LARS([w], lr=1000.0)
        optimiser.step()
        optimiser.step()
        assert optimiser.state[w]["momentum_buffer"].stride() == w.stride()
        ends.append(w.detach())
    assert not torch.equal(ends[0], start)
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-6)


def test_an_inf_or_nan_is_not_hidden() -> None:
    for bad in math.inf, math.nan:
        w = parameter([[1.0, 2.0]], [[bad, 1.0]])
        LARS([w], lr=1.0).step()
        assert not w.isfinite().all()


# Groups and rates


def test_biases_have_plain_momentum_without_decay_at_a_hundredth_of_the_rate() -> None:
    w, b = parameter([[3.0, 4.0]], [[0.0, 5.0]]), parameter([8.0, 2.0], [4.0, -2.0])
    optimiser = LARS([b, w], lr=50.0, momentum=0.5, weight_decay=0.5)
    adapted, excluded = optimiser.param_groups
    assert adapted["params"] == [w] and excluded["params"] == [b]
    assert (adapted["lr"], adapted["weight_decay"], adapted["trust_coefficient"]) == (50.0, 0.5, 0.001)
    assert (excluded["lr"], excluded["weight_decay"], excluded["trust_coefficient"]) == (0.5, 0, None)
    optimiser.step()
    assert b.tolist() == [6.0, 3.0]
    optimiser.step()  # v = 0.5 (2, -1) + 0.5 (4, -2)
    assert b.tolist() == [3.0, 4.5]


@pytest.mark.parametrize("rate", [0.0, 0.25, 60.0])
def test_the_rate_of_what_is_excluded_can_be_given(rate: float) -> None:
    w, b = parameter([[3.0]]), parameter([8.0], [4.0])
    LARS([w, b], lr=50.0, exclude_lr=rate).step()
    assert b.tolist() == [8.0 - 4 * rate]


def test_what_is_excluded_can_be_chosen() -> None:
    w, v, b = parameter([[3.0]]), parameter([[4.0]]), parameter([8.0])
    adapted, excluded = LARS([w, v, b], lr=1.0, exclude=lambda each: each is v).param_groups
    assert adapted["params"] == [w, b] and excluded["params"] == [v]
    (only,) = LARS([w, v, b], lr=1.0, exclude=never).param_groups
    assert only["params"] == [w, v, b]
    (only,) = LARS([b], lr=1.0).param_groups
    assert only["trust_coefficient"] is None


def test_groups_set_what_they_like() -> None:
    w, v, b, c = (parameter([[1.0]]), parameter([[1.0]]), parameter([1.0]), parameter([1.0]))
    groups = [
        {"params": [w, b], "lr": 2.0, "exclude_lr": 0.5, "momentum": 0.1},
        {"params": iter([v, c]), "exclude": lambda each: each is v, "weight_decay": 0.25, "eps": 1, "initial_lr": 40.0},
    ]
    optimiser = LARS(groups, lr=10.0, weight_decay=0.125)
    found = [
        (id(group["params"][0]), group["lr"], group["momentum"], group["weight_decay"], group["eps"])
        for group in optimiser.param_groups
    ]
    assert found == [
        (id(w), 2.0, 0.1, 0.125, 1e-8),
        (id(b), 0.5, 0.1, 0, 1e-8),
        (id(c), 10.0, 0.9, 0.25, 1),
        (id(v), 0.1, 0.9, 0, 1),
    ]
    assert [group.get("initial_lr") for group in optimiser.param_groups] == [None, None, 40.0, 0.4]
    assert not any("exclude" in group or "exclude_lr" in group for group in optimiser.param_groups)
    assert "exclude" in groups[1] and "lr" not in groups[1]  # as it was given: for another optimiser


def test_a_group_that_is_not_adapted_stays_as_it_is_given() -> None:
    w, b = parameter([[4.0]], [[1.0]]), parameter([8.0], [1.0])
    optimiser = LARS([{"params": [w, b], "trust_coefficient": None}], lr=0.5, weight_decay=0.25)
    assert len(optimiser.param_groups) == 1
    optimiser.step()
    assert w.tolist() == [[3.0]] and b.tolist() == [6.5]
    again = LARS(LARS([w, b], lr=50.0).param_groups, lr=7.0)  # the groups of one make another
    assert [group["lr"] for group in again.param_groups] == [50.0, 0.5]


def test_names_stay_with_their_parameters() -> None:
    net = network()
    try:
        optimiser = LARS(net.named_parameters(), lr=1.0)
    except TypeError:
        pytest.skip("this torch takes no named parameters")
    named = dict(net.named_parameters())
    assert [len(group["params"]) for group in optimiser.param_groups] == [2, 4]
    for group in optimiser.param_groups:
        assert [id(named[name]) for name in group["param_names"]] == list(map(id, group["params"]))


def test_parameters_can_be_added_later_whole_or_not_at_all() -> None:
    w, b, v, c = (parameter([[1.0]]), parameter([1.0]), parameter([[2.0]]), parameter([2.0]))
    optimiser = LARS([w, b], lr=3.0)
    optimiser.add_param_group({"params": [c, v], "lr": 5.0})
    assert [group["params"] for group in optimiser.param_groups] == [[w], [b], [v], [c]]
    assert [group["lr"] for group in optimiser.param_groups] == [3.0, 0.03, 5.0, 0.05]
    for wrong in {"params": [parameter([[1.0]]), b]}, {"params": [parameter([[1.0]])], "momentum": 1.5}:
        with pytest.raises(ValueError, match=r"more than one|momentum is 1.5"):
            optimiser.add_param_group(wrong)
        assert len(optimiser.param_groups) == 4


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimiser: lr_scheduler.LambdaLR(optimiser, lambda epoch: (epoch + 1) / 4),
        lambda optimiser: lr_scheduler.LinearLR(optimiser, start_factor=0.25, total_iters=3),
        lambda optimiser: lr_scheduler.MultiStepLR(optimiser, [2, 4]),
        lambda optimiser: lr_scheduler.SequentialLR(
            optimiser,
            [lr_scheduler.LinearLR(optimiser, 0.125, total_iters=2), lr_scheduler.CosineAnnealingLR(optimiser, 4)],
            [2],
        ),
    ],
    ids=["lambda", "warm-up", "steps", "warm-up then cosine"],
)
def test_schedulers_change_both_rates_alike(schedule: Callable[[LARS], Any]) -> None:
    optimiser = LARS([parameter([[1.0]], [[1.0]]), parameter([1.0], [1.0])], lr=32.0, exclude_lr=4.0)
    scheduler, seen = schedule(optimiser), set()
    for _ in range(5):
        adapted, excluded = (group["lr"] for group in optimiser.param_groups)
        assert adapted == pytest.approx(8 * excluded, rel=1e-12)
        seen.add(adapted)
        optimiser.step()
        scheduler.step()
    assert len(seen) > 1


def test_one_cycle_takes_a_rate_a_group_and_cycles_the_momentum_of_both() -> None:
    optimiser = LARS([parameter([[1.0]], [[1.0]]), parameter([1.0], [1.0])], lr=1.0)
    scheduler = lr_scheduler.OneCycleLR(optimiser, max_lr=[32.0, 0.25], total_steps=10)
    rates, momenta = [], []
    for _ in range(10):
        rates.append(tuple(group["lr"] for group in optimiser.param_groups))
        momenta.append(tuple(group["momentum"] for group in optimiser.param_groups))
        optimiser.step()
        scheduler.step() if len(rates) < 10 else None
    assert max(rates) == pytest.approx((32.0, 0.25))
    assert all(one == other for one, other in momenta) and len(set(momenta)) > 3


# A torch optimiser like any other


def copies(optimiser: LARS, net: nn.Module) -> list[tuple[LARS, nn.Module]]:
    """The optimiser with its network, as state_dict, deepcopy and pickle bring them back."""
    other = copy.deepcopy(net)
    loaded = LARS(other.parameters(), lr=1.0, momentum=0.1)
    loaded.load_state_dict(pickle.loads(pickle.dumps(optimiser.state_dict())))
    return [(loaded, other), copy.deepcopy((optimiser, net)), pickle.loads(pickle.dumps((optimiser, net)))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_is_saved_or_copied_goes_on_to_the_same_bits(dtype: torch.dtype) -> None:
    net = network(dtype)
    optimiser = LARS(net.parameters(), lr=30.0, weight_decay=0.01)
    for step in range(3):
        backward(net, step)
        optimiser.step()
    others = copies(optimiser, net)
    for each, model in [(optimiser, net), *others]:
        for step in range(3, 6):
            backward(model, step)
            each.step()
    for each, model in others:
        assert type(each) is LARS
        for ours, theirs in zip(net.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        each.add_param_group({"params": [parameter([[1.0]]), parameter([1.0])]})
        assert [group["trust_coefficient"] for group in each.param_groups] == [0.001, None, 0.001, None]


def test_its_state_loads_without_running_code(tmp_path: Any) -> None:
    net = network()
    optimiser = LARS(net.parameters(), lr=30.0)
    backward(net, 0)
    optimiser.step()
    torch.save(optimiser.state_dict(), tmp_path / "state")
    loaded = torch.load(tmp_path / "state", weights_only=True)
    assert [len(group["params"]) for group in loaded["param_groups"]] == [2, 4]
    assert all(set(state) == {"momentum_buffer"} for state in loaded["state"].values()) and len(loaded["state"]) == 6


def test_without_momentum_there_is_no_state() -> None:
    net = network()
    optimiser = LARS(net.parameters(), lr=30.0, momentum=0)
    backward(net, 0)
    optimiser.step()
    assert optimiser.state_dict()["state"] == {}


def test_a_closure_is_called_once_with_gradients_and_gives_the_loss() -> None:
    net, calls = network(), []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        return backward(net, 0)

    before = net[0].weight.detach().clone()
    loss = LARS(net.parameters(), lr=30.0).step(closure)  # type: ignore[call-overload]
    assert calls == [True] and isinstance(loss, Tensor) and loss.item() > 0
    assert not torch.equal(net[0].weight, before)
    assert LARS(net.parameters(), lr=30.0).step() is None


def test_a_parameter_without_gradient_stays_where_it_is() -> None:
    w, v, b = parameter([[3.0]], [[1.0]]), parameter([[4.0]]), parameter([8.0])
    optimiser = LARS([w, v, b], lr=100.0, weight_decay=0.5)
    optimiser.step()
    assert v.item() == 4.0 and b.item() == 8.0 and w.item() != 3.0
    assert v not in optimiser.state and b not in optimiser.state
    w.grad, after = None, w.item()
    optimiser.step()
    assert w.item() == after


def test_gradients_are_left_as_they_are() -> None:
    net = network()
    optimiser = LARS(net.parameters(), lr=30.0, weight_decay=0.01)
    backward(net, 0)
    before = [each.grad.clone() for each in net.parameters()]
    optimiser.step()
    assert all(torch.equal(each.grad, one) for each, one in zip(net.parameters(), before, strict=True))


def test_a_gradient_of_another_type_than_its_weight_is_taken() -> None:
    w = nn.Parameter(torch.tensor([[3.0, 4.0]]))
    try:
        w.grad_dtype = torch.bfloat16
        w.grad = torch.tensor([[0.0, 5.0]], dtype=torch.bfloat16)
    except (AttributeError, RuntimeError):
        pytest.skip("this torch wants one type for both")
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch wants one type for both")
    LARS([w], lr=1.0, trust_coefficient=0.5, eps=0).step()
    assert w.tolist() == [[3.0, 1.5]]


def test_a_sparse_gradient_is_refused_by_name_before_anything_moves() -> None:
    net = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2))
    optimiser = LARS([*net[1].parameters(), net[0].weight], lr=30.0)
    before = net[1].weight.detach().clone()
    net(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"parameter 1 of group 0 of shape \(4, 3\) has a sparse .*sparse=False"):
        optimiser.step()
    assert torch.equal(net[1].weight, before)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -0.1),
        ("lr", math.nan),
        ("lr", math.inf),
        ("momentum", 1.0),
        ("momentum", -0.5),
        ("weight_decay", -1e-4),
        ("trust_coefficient", 0),
        ("trust_coefficient", -0.001),
        ("eps", -1e-8),
        ("exclude_lr", -1),
    ],
)
def test_a_bad_value_is_refused_with_what_would_be_right(name: str, value: float) -> None:
    w = parameter([[1.0]])
    with pytest.raises(ValueError, match=f"^{name} is {value}: LARS takes a number (from 0 on|from 0 to|above 0)"):
        LARS([w], **{"lr": 1.0, name: value})
    with pytest.raises(ValueError, match=f"^{name} is {value}: "):
        LARS([{"params": [w], name: value}], lr=1.0)


@pytest.mark.parametrize(("name", "value"), [("lr", "0.1"), ("lr", torch.tensor(0.1)), ("lr", None), ("exclude", 1)])
def test_a_bad_type_is_refused_with_what_would_be_right(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name} is .*(LARS takes a number|must be a function)"):
        LARS([parameter([[1.0]])], **{"lr": 1.0, name: value})


def test_no_list_of_parameters_is_refused_as_by_torch() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        LARS([], lr=1.0)
    with pytest.raises(TypeError, match="an iterable of Tensors or dicts"):
        LARS(parameter([[1.0]]), lr=1.0)


def test_it_learns() -> None:
    torch.manual_seed(0)
    images, net = torch.randn(64, 5, dtype=torch.float64), network()
    labels = (images[:, 0] > 0).long() + (images[:, 1] > 0).long()
    optimiser = LARS(net.parameters(), lr=20.0)
    losses = []
    for _ in range(100):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(net(images), labels)
        loss.backward()
        losses.append(loss.item())
        optimiser.step()
    assert losses[-1] < losses[0] / 3
