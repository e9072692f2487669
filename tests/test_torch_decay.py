"""What is decayed is decayed, what is one-dimensional is not, and what is frozen is in no group."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

from hpcdl.torch.decay import decay_groups, one_dimensional  # noqa: E402

OPTIMISERS = [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop]


def model() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))


def test_biases_and_batch_norms_are_not_decayed_and_weights_are() -> None:
    net = model()
    decayed, rest = decay_groups(net, 0.5)
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.5, 0)
    assert list(map(id, decayed["params"])) == [id(net[0].weight), id(net[3].weight)]
    assert list(map(id, rest["params"])) == [id(each) for each in (net[0].bias, *net[1].parameters(), net[3].bias)]


def test_named_parameters_do_as_well_as_the_model() -> None:
    net = model()
    for given, whole in zip(decay_groups(net.named_parameters(), 0.5), decay_groups(net, 0.5), strict=True):
        assert list(map(id, given["params"])) == list(map(id, whole["params"]))
        assert given["weight_decay"] == whole["weight_decay"]


def test_a_number_by_itself_is_not_decayed() -> None:
    assert (
        one_dimensional(torch.zeros(())) and one_dimensional(torch.zeros(1)) and not one_dimensional(torch.zeros(1, 1))
    )


def test_frozen_parameters_are_left_out() -> None:
    net = model()
    net[0].requires_grad_(False)
    assert [len(group["params"]) for group in decay_groups(net, 0.5)] == [1, 3]


@pytest.mark.parametrize("kind", OPTIMISERS)
def test_an_optimiser_leaves_batch_norm_alone_where_the_gradient_is_zero(kind: type[torch.optim.Optimizer]) -> None:
    net = model()
    optimiser = kind(decay_groups(net, 0.25), lr=0.5)
    before = {name: each.detach().clone() for name, each in net.named_parameters()}
    for each in net.parameters():
        each.grad = torch.zeros_like(each)
    optimiser.step()
    moved = {name for name, each in net.named_parameters() if not torch.equal(each, before[name])}
    assert moved == {"0.weight", "3.weight"}


@pytest.mark.parametrize("kind", OPTIMISERS)
@pytest.mark.parametrize("bias", [False, True])
def test_optimisers_take_a_group_without_parameters(kind: type[torch.optim.Optimizer], bias: bool) -> None:
    net = nn.Linear(2, 2, bias=bias)
    net.weight.requires_grad_(not bias)
    groups = decay_groups(net, 0.1)
    assert sorted(len(group["params"]) for group in groups) == [0, 1]
    optimiser = kind(groups, lr=0.1)
    net(torch.ones(1, 2)).sum().backward()
    optimiser.step()


@pytest.mark.parametrize("decay", [-0.1, float("nan"), float("inf")])
def test_a_decay_that_is_none_is_refused_with_its_value(decay: float) -> None:
    with pytest.raises(ValueError, match=f"weight_decay is {decay}: "):
        decay_groups(model(), decay)


def test_a_lazy_module_is_refused_before_it_has_shapes() -> None:
    net = nn.LazyLinear(3)
    with pytest.raises(ValueError, match="run a batch through first"):
        decay_groups(net, 0.1)
    net(torch.ones(2, 4))
    assert [len(group["params"]) for group in decay_groups(net, 0.1)] == [1, 1]


def test_bare_parameters_are_refused() -> None:
    with pytest.raises(TypeError, match=r"not Parameters: give the model or model.named_parameters\(\)"):
        decay_groups(model().parameters(), 0.1)  # type: ignore[arg-type]


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="none of the 6 parameters"):
        decay_groups(model().requires_grad_(False), 0.1)
