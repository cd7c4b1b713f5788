"""Weights that leave the model: to the engines, to host memory, as sums."""
