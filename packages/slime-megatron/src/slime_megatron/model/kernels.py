"""Which kernels compute a model: Transformer Engine's layers or Megatron-core's own, and what computes attention.

On CUDA and in 16 bit, rows without shared prompts go through Transformer Engine's attention (``thd``) where its layers
are used, else through PyTorch's variable-length flash attention; rows with shared prompts go through the latter, whose
calls can be merged. Everything else is batched products. What is chosen on CUDA has not been run there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

from slime_core.errors import ConfigError
from slime_megatron.ranks.device import Device
from slime_megatron.settings.config import MegatronConfig


@dataclass(frozen=True)
class FoundKernels:
    """The kernels that a process could use: a GPU's, Transformer Engine's, PyTorch's flash attention where it runs."""

    cuda: bool = False
    transformer_engine: bool = False
    flash: bool = False


@dataclass(frozen=True)
class Kernels:
    """The kernels that a model uses.

    Attributes:
        te_layers: Transformer Engine's layers.
        te_attention: Transformer Engine's attention, where no prompt is shared.
        flash: PyTorch's variable-length flash attention everywhere else; without it, batched products.
    """

    te_layers: bool = False
    te_attention: bool = False
    flash: bool = False

    @property
    def shares_prompts(self) -> bool:
        """Whether attention may go over shared prompts: Transformer Engine's cannot."""
        return self.flash or not self.te_attention


def found_kernels(device: Device) -> FoundKernels:
    """The kernels that this process could use on its device."""
    if device.is_cpu:
        return FoundKernels()
    flash = torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability() >= (8, 0)
    return FoundKernels(cuda=True, transformer_engine=HAVE_TE, flash=flash)


def choose_kernels(config: MegatronConfig, found: FoundKernels) -> Kernels:
    """The kernels that a model of these settings uses.

    Raises:
        ConfigError: The layers that ``--transformer-impl`` or ``--recompute-modules`` ask for cannot be used here, or
            no attention kernel can share prompts as ``--share-prompts on`` asks for.
    """
    if config.transformer_impl == "transformer_engine" and not (found.cuda and found.transformer_engine):
        lacking = "Transformer Engine is not installed" if found.cuda else "there is no GPU for its layers"
        raise ConfigError(f"--transformer-impl transformer_engine: {lacking}; give auto or local")
    usable = found.cuda and found.transformer_engine and config.lora is None
    # In fp32 its products are of TF32's precision, which nobody who leaves --bf16 out asks for.
    wanted = config.transformer_impl == "transformer_engine" or (config.transformer_impl == "auto" and config.bf16)
    te = usable and wanted
    if config.te_modules and not te:
        why = "there is no GPU" if not found.cuda else "Transformer Engine is not installed"
        raise ConfigError(config.no_te_modules("without --bf16" if found.transformer_engine else why))
    kernels = Kernels(
        te_layers=te,
        # Over context-parallel ranks, keys and values are gathered, which its attention does not expect.
        te_attention=te and config.bf16 and config.context_parallel_size == 1,
        flash=found.flash and config.bf16,
    )
    if config.share_prompts == "on" and not kernels.shares_prompts:
        raise ConfigError(
            "--share-prompts on needs PyTorch's flash attention beside Transformer Engine's, and this GPU has none; "
            "give auto or off, or --transformer-impl local"
        )
    return kernels
