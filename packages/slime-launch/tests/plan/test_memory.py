"""What a plan says that ranks and engines hold in memory."""

import dataclasses
import re

import pytest

from slime_core.errors import ConfigError
from slime_launch.devices import DEVICES, find_device
from slime_launch.plan.engines import num_parameters
from slime_launch.plan.fit import check_phases
from slime_launch.plan.memory import host_phase, trainer_memory
from slime_rollout.engine.server import KV_TOKENS
from support.published_runs import memory_of_engine, settings_of, shape_of

BILLIONS = {"llama2-7B": 6.74, "llama-13B": 13.02, "llama-33B": 32.53, "mistral-7B": 7.24, "qwen2-72B": 72.7}


@pytest.mark.parametrize("model", BILLIONS)
def test_parameters_are_as_many_as_the_models_makers_say(model):
    assert num_parameters(shape_of(model)) / 1e9 == pytest.approx(BILLIONS[model], rel=0.01)


def test_the_cache_takes_what_weights_leave_of_the_fraction():
    case = {"model": "llama3-8B", "device": "h100", "gpus": 1, "tokens": 1, "flags": {}, "mem_fraction": "0.5"}
    memory = memory_of_engine(settings_of(case), shape_of("llama3-8B"), DEVICES["h100"])
    per_token = 2 * 32 * 8 * 128 * 2  # keys and values, layers, groups, channels, bf16
    assert memory.kv_tokens == (int(DEVICES["h100"].memory * 0.5) - memory.weights) // per_token
    assert memory.weights == 2 * 8_030_261_248  # as the model card counts


@pytest.mark.parametrize(("model", "tokens"), [("llama3-8B", KV_TOKENS), ("qwen3-4B", 40960)])
def test_on_a_cpu_the_cache_of_all_ranks_has_a_number_of_tokens_and_room_for_the_longest(model, tokens):
    """Llama's context is 8192 tokens, Qwen3's 40960; both have eight groups of 128 channels."""
    settings = settings_of({"model": model, "device": "h100", "gpus": 2, "engine_gpus": 2, "tokens": 1, "flags": {}})
    memory = memory_of_engine(settings, shape_of(model), find_device("cpu", None))
    layers = {"llama3-8B": 32, "qwen3-4B": 36}[model]
    assert (memory.kv_tokens, memory.kv_cache) == (tokens, tokens * 2 * layers * 8 * 128 * 2)


def test_host_memory_of_frozen_and_sleeping_models_is_compared_where_it_is_known():
    """A reference and the policy, and what ranks that sleep give back: weights, master weights and two moments."""
    case = {"model": "llama3-8B", "device": "h100", "gpus": 8, "tokens": 1024, "colocate": True}
    case |= {"flags": {"tensor_model_parallel_size": 8, "sequence_parallel": True}}
    settings = settings_of(case)
    settings = dataclasses.replace(settings, algorithm=dataclasses.replace(settings.algorithm, use_kl_loss=True))
    trainer = trainer_memory(
        settings, shape_of("llama3-8B"), DEVICES["h100"], tokens=1024, micro_batches=1, overrides={}
    )
    assert trainer.host == 2 * trainer.weights and trainer.waiting == trainer.weights + trainer.optimizer
    needed = 8 * (3 * trainer.weights + trainer.optimizer)
    enough, less = (dataclasses.replace(DEVICES["h100"], host_memory=needed - short) for short in (0, 1))
    check_phases(enough, [host_phase(enough, trainer, 8, sleeps=True)])
    take = re.escape(f"take {needed / 2**30:.1f} GiB of the host memory of a node, which has {needed / 2**30:.1f} GiB")
    with pytest.raises(ConfigError, match=f"{take}.* --no-offload-train"):
        check_phases(less, [host_phase(less, trainer, 8, sleeps=True)])


def test_evaluation_alone_takes_weights_and_no_critic():
    case = {"model": "llama3-8B", "device": "h100", "gpus": 8, "tokens": 1024, "critic": True, "flags": {}}
    trains = settings_of(case)
    evaluates = dataclasses.replace(trains, run=dataclasses.replace(trains.run, num_rollout=0))
    given = {"tokens": 1024, "micro_batches": 1, "overrides": {}}
    before, after = (
        trainer_memory(settings, shape_of("llama3-8B"), DEVICES["h100"], **given) for settings in (trains, evaluates)
    )
    assert min(before.gradients, before.optimizer, before.critic) > 0
    assert (after.gradients, after.optimizer, after.critic, after.weights) == (0, 0, 0, before.weights)


def test_an_offloaded_optimizer_is_counted_in_host_memory():
    """Of the actor and the critic; what waits there while a trainer sleeps is weights alone."""
    case = {"model": "llama3-8B", "device": "h100", "gpus": 8, "tokens": 1024, "colocate": True, "critic": True}
    case |= {"flags": {"tensor_model_parallel_size": 8, "sequence_parallel": True, "use_distributed_optimizer": True}}
    shape, device = shape_of("llama3-8B"), DEVICES["h100"]
    gpu, host = (
        trainer_memory(settings_of(each), shape, device, tokens=1024, micro_batches=1, overrides={})
        for each in (case, case | {"cpu_optimizer": True})
    )
    assert host.optimizer == 0 < gpu.optimizer and host.total == gpu.total - gpu.optimizer - gpu.critic + host.critic
    assert host.host - gpu.host == pytest.approx(2 * gpu.optimizer * 16 / 12, rel=0.1)  # the critic's head is smaller
    assert host.waiting == host.weights + host.critic
    phase = host_phase(device, host, 8, sleeps=True)
    assert phase.needed == 8 * (host.host + host.waiting)
