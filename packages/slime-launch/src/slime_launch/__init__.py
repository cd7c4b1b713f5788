"""The launcher of slime: flags, placement on Ray, the training loop, resume and the run report."""
