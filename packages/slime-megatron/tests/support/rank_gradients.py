"""A weight's gradient as the optimizer of a rank program sees it."""


def whole_gradient(optimizer, name, weight):
    """A weight's gradient as summed over the ranks; with a distributed optimizer each of them has a part of the sum."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    parts = [part for part in optimizer.chained_optimizers if isinstance(part, DistributedOptimizer)]
    if not parts:
        return weight.main_grad
    whole = torch.zeros_like(weight.main_grad)
    for part in parts:
        if weight in part.model_param_gbuf_map:
            own = part._get_model_param_range_map(weight)["param"]
            whole.view(-1)[own.start : own.end] = weight.main_grad.view(-1)[own.start : own.end]
    if "local_experts" in name:
        group = parallel_state.get_expert_data_parallel_group()
    else:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(whole, group=group)
    return whole
