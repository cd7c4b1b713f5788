"""Whole conversions, a file for each kind. None needs a GPU or Megatron, and few need torch."""
