"""PyTorch: the trainer, the distributed optimizers, and the optimizer on the servers."""
