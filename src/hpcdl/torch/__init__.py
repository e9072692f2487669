"""The PyTorch layer."""

from hpcdl.torch.memory import empty, zeros

__all__ = ["empty", "zeros"]
