"""A warm-up leads up to the rates of any scheduler, which neither notices it nor differs behind it."""

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.optim import lr_scheduler  # noqa: E402

from hpcdl.torch.schedules import GradualWarmup, linear_scaled_lr  # noqa: E402

UPDATES, STEPS = 24, 8
RATES = (0.5, 0.3)  # of two groups


def optimizer(*rates: Any) -> Any:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or RATES]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda of: lr_scheduler.LambdaLR(of, lambda epoch: 1 / (1 + epoch)),
    "multiplicative": lambda of: lr_scheduler.MultiplicativeLR(of, lambda epoch: 0.9),
    "step": lambda of: lr_scheduler.StepLR(of, 3, 0.3),
    "multistep": lambda of: lr_scheduler.MultiStepLR(of, [2, 5, 12], 0.1),
    "constant": lambda of: lr_scheduler.ConstantLR(of, 0.3, 4),
    "linear": lambda of: lr_scheduler.LinearLR(of, 0.3, 1.0, 12),
    "exponential": lambda of: lr_scheduler.ExponentialLR(of, 0.9),
    "polynomial": lambda of: lr_scheduler.PolynomialLR(of, UPDATES, 2.0),
    "cosine": lambda of: lr_scheduler.CosineAnnealingLR(of, UPDATES),
    "restarts": lambda of: lr_scheduler.CosineAnnealingWarmRestarts(of, 5),
    "sequence": lambda of: lr_scheduler.SequentialLR(
        of, [lr_scheduler.ExponentialLR(of, 0.9), lr_scheduler.PolynomialLR(of, UPDATES)], [4]
    ),
    "chain": lambda of: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(of, 0.9), lr_scheduler.StepLR(of, 3, 0.3)]
    ),
    "cyclic": lambda of: lr_scheduler.CyclicLR(of, [0.1, 0.2], [0.7, 0.9], step_size_up=3, mode="triangular2"),
    "onecycle": lambda of: lr_scheduler.OneCycleLR(of, [0.7, 0.9], total_steps=UPDATES),
    "plateau": lambda of: lr_scheduler.ReduceLROnPlateau(of, factor=0.5, patience=0),
}
METRICS = [5.0, 4.0, 4.0, 3.0, 3.0, 3.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0] * 2  # a plateau now and then
every_scheduler = pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)


def course(scheduler: Any, every: int = 1, updates: int = UPDATES, begin: int = 0) -> Iterator[tuple[Any, ...]]:
    """Rates and momenta of each update; the scheduler is stepped once in `every`."""
    for update in range(begin, updates):
        groups = scheduler.optimizer.param_groups
        yield [float(group["lr"]) for group in groups], [group["momentum"] for group in groups]
        scheduler.optimizer.step()
        if (update + 1) % every == 0:
            inner = getattr(scheduler, "scheduler", scheduler)
            scheduler.step(*([METRICS[update]] if isinstance(inner, lr_scheduler.ReduceLROnPlateau) else []))


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    """torch's warnings of schedulers that are stepped wrongly are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # torch's SequentialLR gave some of its own an epoch once.
        warnings.filterwarnings("ignore", message="The epoch parameter in `scheduler.step")
        yield


# ---- linear scaling ------------------------------------------------------------------------------------------------


def test_the_rate_is_in_proportion_to_the_batch() -> None:
    assert linear_scaled_lr(0.1, 256) == 0.1
    assert linear_scaled_lr(0.1, 8192) == 3.2  # of Goyal et al. 2017
    assert linear_scaled_lr(0.1, 128) == 0.05
    assert linear_scaled_lr(0.1, 3, 3) == 0.1  # to the last bit, where 0.1 * 3 / 3 is not
    assert linear_scaled_lr(0.1, 1024, base_batch=32) == 3.2


@pytest.mark.parametrize("base", [0, -0.1, math.inf, math.nan])
def test_a_base_rate_that_is_none_is_refused(base: float) -> None:
    with pytest.raises(ValueError, match=f"batch of 128 is given as {base}"):
        linear_scaled_lr(base, 256, 128)


@pytest.mark.parametrize(("batch", "base_batch"), [(0, 256), (-1, 256), (256, 0), (math.nan, 256), (256, math.inf)])
def test_a_batch_of_no_sample_is_refused(batch: Any, base_batch: Any) -> None:
    with pytest.raises(ValueError, match=f"not {batch}, scaled from {base_batch}"):
        linear_scaled_lr(0.1, batch, base_batch)


# ---- the warm-up ---------------------------------------------------------------------------------------------------


@every_scheduler
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("start", [None, 1 / 32, 0, 1])
def test_each_rate_is_the_schedulers_times_a_factor_and_behind_the_warm_up_its_own(
    make: Callable[[Any], Any], every: int, start: float | None
) -> None:
    plain = list(course(make(optimizer()), every))
    warmed = list(course(GradualWarmup(make(optimizer()), STEPS, start_factor=start, every=every)))
    begin = 1 / STEPS if start is None else start
    for update, ((rates, momenta), (warm_rates, warm_momenta)) in enumerate(zip(plain, warmed, strict=True)):
        assert warm_momenta == momenta
        if update < STEPS:
            factor = begin + (1 - begin) * update / STEPS
            assert warm_rates == [rate * factor for rate in rates]
        else:
            assert warm_rates == rates


@every_scheduler
def test_the_wrapped_scheduler_does_not_notice(make: Callable[[Any], Any]) -> None:
    alone, wrapped = make(optimizer()), GradualWarmup(make(optimizer()), STEPS)
    for _ in zip(course(alone), course(wrapped), strict=True):
        assert wrapped.scheduler.get_last_lr() == alone.get_last_lr()
        assert wrapped.get_last_lr() == [group["lr"] for group in wrapped.optimizer.param_groups]
        assert vars(wrapped.scheduler).get("last_epoch") == vars(alone).get("last_epoch")


def test_the_ramp_is_goyals() -> None:
    """From the small batch's rate to k times it, as torch's LinearLR goes, which can only be alone."""
    k = 32
    ours = GradualWarmup(lr_scheduler.ConstantLR(optimizer(0.1 * k), 1.0), STEPS, start_factor=1 / k)
    ramp = [rates[0] for rates, _ in course(ours)]
    assert ramp[0] == 0.1 and ramp[STEPS:] == [0.1 * k] * (UPDATES - STEPS)
    increments = [after - before for before, after in pairwise(ramp[: STEPS + 1])]
    assert increments == pytest.approx([(0.1 * k - 0.1) / STEPS] * STEPS, rel=1e-13)
    torchs = lr_scheduler.LinearLR(optimizer(0.1 * k), 1 / k, 1.0, STEPS)
    assert ramp == pytest.approx([rates[0] for rates, _ in course(torchs)], rel=1e-13)


def test_epochs_count_from_the_beginning_of_the_training() -> None:
    decay = lr_scheduler.MultiStepLR(optimizer(1.0), [3], 0.5)  # in epochs, of 4 updates each
    rates = [rates[0] for rates, _ in course(GradualWarmup(decay, 8, every=4))]
    assert rates[8:] == [1.0] * 4 + [0.5] * 12


def test_a_warm_up_may_be_longer_than_a_decay_takes_to_come() -> None:
    decay = lr_scheduler.MultiStepLR(optimizer(1.0), [4], 0.5)
    rates = [rates[0] for rates, _ in course(GradualWarmup(decay, 8, start_factor=0))]
    assert rates[:9] == [0, 1 / 8, 2 / 8, 3 / 8, 2 / 8, 5 / 16, 6 / 16, 7 / 16, 0.5]


@every_scheduler
@pytest.mark.parametrize("steps", [0, 1])
def test_without_a_warm_up_it_is_the_scheduler(make: Callable[[Any], Any], steps: int) -> None:
    assert list(course(GradualWarmup(make(optimizer()), steps))) == list(course(make(optimizer())))


def test_a_metric_between_the_wrapped_schedulers_steps_is_not_looked_at() -> None:
    warmup = GradualWarmup(lr_scheduler.ReduceLROnPlateau(optimizer(1.0), factor=0.5, patience=0), 0, every=4)
    for metric in [9.0] * 3 + [5.0] + [0.0] * 3 + [4.0]:
        warmup.step(metric)
    assert vars(warmup.scheduler)["best"] == 4.0 and warmup.get_last_lr() == [1.0]
    warmup.step()
    warmup.step()
    warmup.step()
    with pytest.raises(TypeError, match="behind update 11 ReduceLROnPlateau is stepped: give step"):
        warmup.step()
    warmup.step(4.0)  # and nothing has moved meanwhile
    assert warmup.last_epoch == 12 and warmup.get_last_lr() == [0.5]


def test_a_rate_that_is_set_behind_the_warm_up_stays() -> None:
    warmup = GradualWarmup(lr_scheduler.ExponentialLR(optimizer(1.0), 0.5), 2)
    for _ in course(warmup, updates=4):
        pass
    warmup.optimizer.param_groups[0]["lr"] = 8.0
    warmup.optimizer.step()
    warmup.step()
    assert warmup.get_last_lr() == [4.0]


def test_a_rate_in_a_tensor_stays_in_that_tensor() -> None:
    warmed, plain = (optimizer(torch.tensor(0.5), torch.tensor(0.25)) for _ in range(2))
    tensors = [group["lr"] for group in warmed.param_groups]
    warmup = GradualWarmup(lr_scheduler.ExponentialLR(warmed, 0.5), 4)
    for update, ((rates, _), (expected, _)) in enumerate(
        zip(course(warmup), course(lr_scheduler.ExponentialLR(plain, 0.5)), strict=True)
    ):
        assert rates == [rate * min(1, 0.25 + 0.75 * update / 4) for rate in expected]
    assert all(group["lr"] is tensor for group, tensor in zip(warmed.param_groups, tensors, strict=True))
    assert warmup.get_last_lr()[0] is not tensors[0]


def test_a_group_that_is_added_during_the_warm_up_is_warmed_up_too() -> None:
    warmup = GradualWarmup(lr_scheduler.ReduceLROnPlateau(optimizer(1.0)), 4, start_factor=0)
    warmup.step(1.0)
    warmup.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 8.0})
    warmup.step(1.0)
    assert warmup.get_last_lr() == [0.5, 4.0]
    warmup.step(1.0)
    warmup.step(1.0)
    assert warmup.get_last_lr() == [1.0, 8.0]


def test_torch_takes_it_for_a_scheduler() -> None:
    warmup = GradualWarmup(lr_scheduler.ExponentialLR(optimizer(), 0.9), STEPS)
    assert isinstance(warmup, lr_scheduler.LRScheduler)
    assert warmup.optimizer is warmup.scheduler.optimizer


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": -1}, "steps=-1"),
        ({"steps": math.nan}, "steps=nan"),
        ({"steps": 4, "start_factor": -0.1}, "start_factor=-0.1"),
        ({"steps": 4, "start_factor": 1.5}, "start_factor=1.5"),
        ({"steps": 4, "start_factor": math.nan}, "start_factor=nan"),
        ({"steps": 4, "every": 0}, "every=0"),
    ],
)
def test_nonsense_is_refused_before_a_rate_is_touched(options: dict[str, Any], says: str) -> None:
    of = optimizer()
    with pytest.raises(ValueError, match=says):
        GradualWarmup(lr_scheduler.StepLR(of, 3), **options)
    assert [group["lr"] for group in of.param_groups] == [*RATES]


def test_an_optimiser_is_no_scheduler() -> None:
    with pytest.raises(TypeError, match="not a SGD"):
        GradualWarmup(optimizer(), 4)


# ---- going on ------------------------------------------------------------------------------------------------------


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@every_scheduler
@pytest.mark.parametrize("stopped", [0, 3, STEPS - 1, STEPS, STEPS + 3])
@pytest.mark.parametrize("order", ["optimizer first", "scheduler first"])
def test_a_resumed_training_has_the_same_rates(make: Callable[[Any], Any], stopped: int, order: str) -> None:
    expected = list(course(GradualWarmup(make(optimizer()), STEPS, every=2)))
    first = GradualWarmup(make(optimizer()), STEPS, every=2)
    for _ in course(first, updates=stopped):
        pass
    saved = through_a_file({"scheduler": first.state_dict(), "optimizer": first.optimizer.state_dict()})

    resumed = GradualWarmup(make(optimizer()), STEPS, every=2)
    parts: list[tuple[str, Any]] = [("optimizer", resumed.optimizer), ("scheduler", resumed)]
    for name, part in parts if order == "optimizer first" else reversed(parts):
        part.load_state_dict(saved[name])
    resumed.optimizer.step()  # only so that torch does not miss one before the scheduler's
    assert resumed.get_last_lr() == expected[stopped][0]
    assert list(course(resumed, begin=stopped)) == expected[stopped:]


def test_a_scheduler_that_is_loaded_alone_sets_the_rates_it_had() -> None:
    first = GradualWarmup(lr_scheduler.ExponentialLR(optimizer(), 0.9), 4)
    for _ in course(first, updates=10):
        pass
    resumed = GradualWarmup(lr_scheduler.ExponentialLR(optimizer(), 0.9), 4)
    resumed.load_state_dict(first.state_dict())
    assert [group["lr"] for group in resumed.optimizer.param_groups] == first.get_last_lr()


def test_a_state_can_be_loaded_twice_and_does_not_change_with_the_training() -> None:
    first = GradualWarmup(SCHEDULERS["cyclic"](optimizer()), STEPS)
    state = first.state_dict()
    before = copy.deepcopy(state)
    for _ in range(2):
        GradualWarmup(SCHEDULERS["cyclic"](optimizer()), STEPS).load_state_dict(state)
    for _ in course(first):
        pass
    assert state == before


def test_another_schedulers_state_is_refused() -> None:
    warmup = GradualWarmup(lr_scheduler.StepLR(optimizer(), 3), STEPS)
    with pytest.raises(ValueError, match=r"another scheduler, of .*gamma.*: load it into that"):
        warmup.load_state_dict(warmup.scheduler.state_dict())
    with pytest.raises(ValueError, match="saved warm-up is of 2 parameter groups, this optimiser has 1"):
        GradualWarmup(lr_scheduler.StepLR(optimizer(0.1), 3), STEPS).load_state_dict(warmup.state_dict())


def test_a_copy_goes_on_by_itself() -> None:
    first = GradualWarmup(lr_scheduler.ExponentialLR(optimizer(), 0.9), 4)
    for _ in course(first, updates=2):
        pass
    twin = copy.deepcopy(first)
    assert twin.optimizer is twin.scheduler.optimizer is not first.optimizer
    assert pickle.loads(pickle.dumps(first.state_dict())) == first.state_dict()
    twin.step()
    assert twin.get_last_lr() != first.get_last_lr()
