"""What breaks something between ranks, in a rank's process: the equality tests must see it."""

import types
from unittest import mock

import numpy as np


def swapped_chunks(worker):
    """Of two context-parallel ranks, the second takes its two chunks of each sample for one another."""
    from slime_megatron.model import packing

    cut = packing._cut_row

    def swapped(samples, context, *further):
        row = cut(samples, context, *further)
        if context.rank == 1:
            row.tokens = [np.roll(tokens, len(tokens) // 2) for tokens in row.tokens]
        return row

    return mock.patch.object(packing, "_cut_row", swapped)


def skipped_experts(worker):
    """The second rank adds nothing to the sum of the experts' gradients."""
    config = worker.model[0].config
    finalize = config.finalize_model_grads_func

    def without_experts(model, *args, **kwargs):
        if worker.data_parallel_rank == 1:
            for name, weight in model[0].named_parameters():
                if "local_experts" in name:
                    weight.main_grad.zero_()
        finalize(model, *args, **kwargs)

    return mock.patch.object(config, "finalize_model_grads_func", without_experts)


def dropped_broadcast(worker):
    """The last pipeline stage keeps its results for itself."""
    from slime_megatron.step import passes as step

    silent = types.SimpleNamespace(**(vars(step.dist) | {"broadcast": lambda *args: None}))
    return mock.patch.multiple(step, dist=silent, broadcast_value=lambda value, *args: value)


MUTATIONS = {
    "swapped chunks": swapped_chunks,
    "skipped experts": skipped_experts,
    "dropped broadcast": dropped_broadcast,
}
