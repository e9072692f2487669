"""What torch passes to a group's methods: options, a tensor, a list; or what a user passes in the short forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import Tensor

Tensors: TypeAlias = Tensor | Sequence[Tensor]
Lists: TypeAlias = Sequence[Tensor] | Sequence[Sequence[Tensor]]


def options_of(kind: type[Any], given: Any, timeout: Any = None, **field: Any) -> Any:
    """torch's options as they are given, or new ones from the arguments of a short form, such as allreduce(x, op)."""
    if isinstance(given, kind):
        return given
    made = kind()
    for name, value in field.items():
        value = given if value is None else value
        if value is not None:
            setattr(made, name, value)
    if timeout is not None:
        made.timeout = timeout
    return made


def one(tensors: Tensors) -> Tensor:
    """The tensor, or the only one of the list."""
    if isinstance(tensors, Tensor):
        return there(tensors)
    if len(tensors) != 1:
        raise ValueError(f"a rank passes one tensor in a call, not {len(tensors)}; the coalesced forms take several")
    return there(tensors[0])


def list_of(tensors: Any) -> list[Tensor]:
    """The tensors, or the only list of them."""
    if len(tensors) and not isinstance(tensors[0], Tensor):
        if len(tensors) != 1:
            raise ValueError(f"a rank passes one list of tensors in a call, not {len(tensors)}")
        tensors = tensors[0]
    return [there(each) for each in tensors]


def there(tensor: Tensor) -> Tensor:
    """The tensor; of a functional collective's that nobody has waited for yet what it stands for.

    torch's dispatcher would wait, but it calls no group in Python.
    """
    wait = getattr(tensor, "trigger_wait", None)
    waited: Tensor = wait() if wait else tensor
    return waited
