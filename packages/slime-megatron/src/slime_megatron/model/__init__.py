"""Megatron-core models over packed batches. Importing this imports Megatron: select the device first."""
