"""Optimisers without torch's compiler are torch's."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

WITHOUT = """
import sys, torch
from hpcdl.torch.recipe import Schedule, optimizer, scheduler
from hpcdl.torch.growth import BatchGrowth

model = torch.nn.Linear(3, 2)
for name in ("sgd", "adam", "rmsprop", "adagrad", "lars"):
    made = optimizer(name, model, lr=0.1, momentum=0.9, weight_decay=0.1)
    growth = BatchGrowth(8, (), factor=2, limit=8)
    rates = scheduler(Schedule("onecycle"), made, epochs=3, updates=lambda epochs: 4 * int(epochs), growth=growth)
    for _ in range(3):
        made.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        made.step()
        rates.step()
    made.load_state_dict(made.state_dict())
sys.exit("torch._dynamo" in sys.modules)
"""


def test_the_compiler_is_not_imported() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT], check=True, timeout=120)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop", "Adagrad", "LARS"])
def test_they_are_torchs_to_the_bit(name: str) -> None:
    from hpcdl.torch import LARS
    from hpcdl.torch.recipe import light

    kind = LARS if name == "LARS" else getattr(torch.optim, name)
    ends = []
    for each in (kind, light(kind)):
        torch.manual_seed(0)
        model = torch.nn.Linear(20, 3)
        made = each(model.parameters(), lr=0.1, weight_decay=0.01)
        for step in range(5):
            made.zero_grad()

            def closure(made: torch.optim.Optimizer = made, model: torch.nn.Module = model) -> torch.Tensor:
                made.zero_grad()
                loss = model(torch.ones(4, 20)).square().sum()
                loss.backward()
                return loss

            loss = made.step(closure)
            if step == 2:
                made.load_state_dict(made.state_dict())
        ends.append([loss, *model.parameters()])
        assert isinstance(made, kind) and type(made).__name__ == name
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*ends, strict=True))
