"""Training with PyTorch: the only part of hpcdl that imports torch as it is imported."""
