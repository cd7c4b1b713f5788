"""Megatron's own GPTModel, on packed rows."""
