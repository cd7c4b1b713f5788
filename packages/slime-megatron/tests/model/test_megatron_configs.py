"""What Megatron's own configs get."""


def test_arguments_reach_megatron_and_what_changes_is_said_once(ranks, tiny_model, tiny_config):
    shape = tiny_model("qwen3-moe").shape
    arguments = {
        "bucket_size": 12345,
        "pad_buckets_for_high_nccl_busbw": True,
        "init_method_std": 0.5,
        "log_num_zeros_in_grad": True,
        "decoupled_lr": 0.25,
        "moe_expert_capacity_factor": -1.0,
        "moe_grouped_gemm": True,
    }
    is_so = {
        "hidden_size": 64,
        "moe_layer_freq": 1,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        "masked_softmax_fusion": False,
        "variable_seq_lengths": True,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0,
        "moe_router_bias_update_rate": 0.0,
    }
    ranks.start(1, tiny_config(megatron_args=arguments | is_so), shape)
    made = ranks.first("megatron_settings", ["pad_buckets_for_high_nccl_busbw", "init_method_std", "decoupled_lr"])
    assert made == {"pad_buckets_for_high_nccl_busbw": True, "init_method_std": 0.5, "decoupled_lr": 0.25}
    [warning] = [line for line in ranks.first("warnings") if "random states" not in line]
    assert warning == (
        "Megatron's arguments: bucket_size 12345 became None; "
        "log_num_zeros_in_grad True has no effect (it is not reported); "
        "moe_expert_capacity_factor -1.0 became None; "
        "moe_grouped_gemm True has no effect (it is for Transformer Engine's layers, and local ones are used)"
    )


def test_a_gpu_has_overlap_and_fused_kernels_by_default(ranks, tiny_model, tiny_config):
    """What would be set there; it was not run there."""
    ranks.start(1, tiny_config(use_distributed_optimizer=True), tiny_model("qwen3").shape)
    names = ["overlap_grad_reduce", "overlap_param_gather", "bias_activation_fusion", "bias_dropout_fusion"]
    assert not any(ranks.first("megatron_settings", names).values())
    assert all(ranks.first("megatron_settings_on_a_gpu", names).values())
    off = tiny_config(use_distributed_optimizer=True, overlap_grad_reduce="off")
    ranks.start(1, off, tiny_model("qwen3").shape)
    assert list(ranks.first("megatron_settings_on_a_gpu", names).values()) == [False, False, True, True]
