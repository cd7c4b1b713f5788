"""Megatron's arguments are checked before a run starts."""

import pytest

from slime_core.errors import ConfigError
from slime_megatron.settings.config import MegatronConfig
from slime_megatron.settings.megatron_check import argument_notices, check_megatron_args


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"fp8": "hybrid"}, "--fp8-format hybrid cannot be given: it is a setting of Transformer Engine's layers"),
        ({"overlap_p2p_comm": False, "fp16": True}, "--fp16 cannot be given: precision follows --bf16; leave it out"),
        ({"num_moe_experts": 4}, "--num-experts 4: the model has None"),
        ({"optimizer_offload_fraction": 1.5}, "--optimizer-offload-fraction 1.5 must be above 0, and at most 1; "),
        ({"optimizer_offload_fraction": "half"}, "--optimizer-offload-fraction 'half' must be float"),
        ({"moe_aux_loss_coeff": 0.1}, "moe_aux_loss_coeff 0.1: the model has no experts; leave it out"),
        ({"bucket_size": "large"}, "--ddp-bucket-size 'large' must be int or None"),
    ],
)
def test_the_tables_refuse_before_anything_starts(tiny_model, args, words):
    with pytest.raises(ConfigError) as caught:
        check_megatron_args(MegatronConfig(megatron_args=args), tiny_model("qwen3").shape, on_gpu=False)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_megatron_refuses_before_anything_starts(tiny_model):
    args = {"moe_pad_expert_input_to_capacity": True}
    shape = tiny_model("qwen3-moe").shape
    with pytest.raises(ConfigError, match="Megatron-core refuses the settings, given moe_pad_expert_in") as caught:
        check_megatron_args(MegatronConfig(megatron_args=args), shape, on_gpu=False)
    assert "\n" not in str(caught.value)


def test_what_has_no_effect_is_said_as_it_was_typed(tiny_model):
    args = {"pin_cpu_grads": False, "moe_token_dispatcher_type": "flex", "moe_grouped_gemm": False}
    config = MegatronConfig(megatron_args=args)
    assert argument_notices(config, tiny_model("qwen3-moe").shape, on_gpu=False) == [
        "--no-pin-cpu-grads has no effect (it is for --optimizer-cpu-offload on a GPU)",
        "--moe-token-dispatcher-type flex has no effect (alltoall dispatches tokens)",
    ]


def test_an_optimizer_in_host_memory_is_for_a_gpu(tiny_model):
    """Where it needs what is the default there; on a CPU upstream's flags change nothing, and that is said."""
    names = ("optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer")
    args, shape = dict.fromkeys(names, True), tiny_model("qwen3").shape
    config = MegatronConfig(megatron_args=args)
    check_megatron_args(config, shape, on_gpu=False)
    assert argument_notices(config, shape, on_gpu=False) == [
        "--optimizer-cpu-offload has no effect (on a CPU the optimizer's state is in host memory already)",
        "--overlap-cpu-optimizer-d2h-h2d has no effect (it is for --optimizer-cpu-offload on a GPU)",
        "--use-precision-aware-optimizer has no effect (the optimizer's state is fp32)",
    ]
    with pytest.raises(ConfigError, match="--optimizer-cpu-offload needs --bf16 and --use-distributed-optimizer, also"):
        check_megatron_args(config, shape, on_gpu=True)
    on_gpu = MegatronConfig(megatron_args=args, bf16=True, use_distributed_optimizer=True)
    check_megatron_args(on_gpu, shape, on_gpu=True)
    assert argument_notices(on_gpu, shape, on_gpu=True) == []
