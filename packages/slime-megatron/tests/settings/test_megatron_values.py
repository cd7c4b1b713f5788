from slime_megatron.settings.config import MegatronConfig
from slime_megatron.settings.megatron_values import ddp_values, layout_values, optimizer_values


def test_the_ranks_that_share_a_model():
    sizes = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2, "context_parallel_size": 3}
    others = {"virtual_pipeline_model_parallel_size": None, "expert_model_parallel_size": 1}
    assert layout_values(MegatronConfig(**sizes)) == sizes | others | {"expert_tensor_parallel_size": 4}


def test_only_a_gpu_overlaps_and_offloads_by_default():
    offloads = {"optimizer_cpu_offload": True}
    config = MegatronConfig(use_distributed_optimizer=True, bf16=True, megatron_args=offloads)
    assert [ddp_values(config, on_gpu=gpu)["overlap_param_gather"] for gpu in (False, True)] == [False, True]
    assert [optimizer_values(config, on_gpu=gpu)["optimizer_cpu_offload"] for gpu in (False, True)] == [False, True]
