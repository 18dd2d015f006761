"""PyTorch: the trainer of our programs, optimizers of all workers, and the servers' optimizer."""
