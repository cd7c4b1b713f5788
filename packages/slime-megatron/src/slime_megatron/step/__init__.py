"""A train step: micro-batches, losses, gradients, the optimizer."""
