"""Frequencies of the rotary position embedding. E is half the rotated channels of a head."""

from __future__ import annotations

import math

import torch

from slime_convert.shape import ModelShape


def rotary_frequencies(shape: ModelShape) -> torch.Tensor:
    """Radians per position of each pair of channels.

    The frequency of pair e is base^(−e/E) (Su et al., 2021, section 3.2.2). Llama 3.1's scaling divides it by
    ``rope_scaling_factor`` where the wavelength exceeds the original context over ``rope_low_freq_factor``, leaves
    it alone below the original context over ``rope_high_freq_factor``, and goes over linearly in between.

    Returns:
        Frequencies of shape E, fp32 on the CPU.
    """
    channels = int(shape.kv_channels * shape.rotary_percent)
    frequencies_E = 1.0 / shape.rotary_base ** (torch.arange(0, channels, 2, dtype=torch.float32) / channels)
    if not shape.use_rope_scaling:
        return frequencies_E
    context = shape.rope_original_max_position_embeddings
    low, high = shape.rope_low_freq_factor, shape.rope_high_freq_factor
    wavelengths_E = 2 * math.pi / frequencies_E
    kept_E = ((context / wavelengths_E - low) / (high - low)).clamp(0, 1)
    return frequencies_E * (kept_E + (1 - kept_E) / shape.rope_scaling_factor)
