"""The mean of all workers' gradients, when the outermost backward() returns."""
