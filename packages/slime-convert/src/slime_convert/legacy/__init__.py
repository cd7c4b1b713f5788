"""Megatron's legacy ``torch`` checkpoints (``--ckpt-format torch``), read without Megatron.

A checkpoint is a directory: ``latest_checkpointed_iteration.txt`` names ``release`` or a step (``iter_0000010``); that
subdirectory holds one ``mp_rank_…/model_optim_rng.pt`` per tensor-, pipeline- and expert-parallel rank, written by
``torch.save``: the rank's part of the model, optimizer state, and the training arguments.
"""

from slime_convert.legacy.reader import LegacyReader

__all__ = ["LegacyReader"]
