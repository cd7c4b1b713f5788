"""Values that follow from others: those of flags that were left open, and sizes, types and limits of the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from slime_core.config import PAIR_LOSSES
from slime_core.errors import ConfigError, DataError
from slime_core.flags import flag_specs
from slime_launch.config import CONFIGS, ClusterConfig, Settings
from slime_launch.devices import run_device
from slime_megatron.service import MegatronConfig
from slime_rollout.config import RolloutConfig
from slime_rollout.engine import EngineConfig

SLOW_BF16 = "leave out --bf16: this processor has no instructions for it (AVX512_BF16, AMX); fp32 is many times faster"

CANARY_LIMITS = {"float32": 1e-4, "bfloat16": 0.4}
"""Mean distance in nats, by the engines' type; docs/explanation/exactness.md has what was measured."""
GIVE_UP_SECONDS = 30.0  # to leave an update of weights that an engine does not answer

_SAY_THE_ENGINES = frozenset({"rollout_num_gpus", "colocate", "rollout_external_engine_addrs", "sglang_config"})


def derived_values(given: Mapping[str, Any], *, on_gpu: bool) -> dict[str, Any]:
    """The values of flags that are not among those ``given``, by name in Python.

    Epochs say the number of rollouts, a batch size alone that of steps per rollout, the length of the run how long a
    learning rate decays, and ``--dump-details`` where rollouts and train data go. Without trainers there is one engine.
    A micro-batch of preference pairs holds one pair.
    Checkpoints are written while the run goes on.
    On CUDA the trainer computes in bfloat16 with the distributed optimizer, which was not run there; else in fp32.
    """
    defaults = {spec.dest: spec.default for config in CONFIGS.values() for spec in flag_specs(config)}
    values = {**defaults, **given}
    found: dict[str, Any] = {}
    prompts, size = values["rollout_batch_size"], given.get("global_batch_size")
    on_pairs = values["loss_type"] in PAIR_LOSSES
    group = 2 if on_pairs else values["n_samples_per_prompt"]
    if on_pairs and not given.keys() & {"micro_batch_size", "use_dynamic_batch_size"}:
        found["micro_batch_size"] = 2
    samples = prompts * group if isinstance(prompts, int) else 0
    if "num_rollout" not in given and samples and (rollouts := _rollouts_of_epochs(values)):
        found["num_rollout"] = values["num_rollout"] = rollouts
    elif values["num_epoch"] and not values["num_rollout"]:
        values["num_rollout"] = 1  # the rows cannot be counted, which is refused later: that alone is to be said
    if size and samples and "num_steps_per_rollout" not in given and samples % size == 0:
        found["num_steps_per_rollout"] = samples // size
    steps = found.get("num_steps_per_rollout", values["num_steps_per_rollout"])
    decays = values["lr_decay_style"] != "constant" or "lr_warmup_fraction" in given
    if decays and "lr_decay_iters" not in given and values["num_rollout"]:
        found["lr_decay_iters"] = values["num_rollout"] * steps
    if directory := given.get("dump_details"):
        dumps = {
            "save_debug_rollout_data": f"{directory}/rollout_data/{{rollout_id}}.npz",
            "save_debug_train_data": f"{directory}/train_data/{{rollout_id}}_{{rank}}.npz",
        }
        found |= {name: path for name, path in dumps.items() if name not in given}
    only_engines = values["num_rollout"] == 0 or values["debug_rollout_only"]
    if only_engines and not given.keys() & _SAY_THE_ENGINES:
        found["rollout_num_gpus"] = values["rollout_num_gpus_per_engine"]
    if given.get("save") is not None and not given.keys() & {"async_save", "no_async_save"}:
        found["async_save"] = True
    if on_gpu:
        if "bf16" not in given and "fp32" not in given:
            found["bf16"] = True
        if not given.keys() & {"use_distributed_optimizer", "no_use_distributed_optimizer"}:
            found["use_distributed_optimizer"] = True
    return found


def _rollouts_of_epochs(values: Mapping[str, Any]) -> int | None:
    """``--num-epoch`` as a number of rollouts; ``None`` where there is none, or what is wrong is said later."""
    epochs, paths = values["num_epoch"], values["prompt_data"]
    if epochs is None or not paths or values["streaming_data"]:
        return None
    from slime_rollout.checks import count_rows  # a third of what --help would take

    try:
        return int(epochs * count_rows(paths) // values["rollout_batch_size"])
    except DataError:
        return None


def global_batch_size(settings: Settings) -> int:
    """Samples per optimizer step: given, or what the rollout and the number of steps leave.

    Raises:
        ConfigError: ``rollout_batch_size × n_samples_per_prompt ≠ global_batch_size × num_steps_per_rollout``.
    """
    prompts, size = settings.rollout.selection.rollout_batch_size, settings.samples_per_prompt
    steps, given = settings.run.num_steps_per_rollout, settings.megatron.global_batch_size
    samples = prompts * size
    if given is None and samples % steps == 0:
        return samples // steps
    if given is not None and given * steps == samples:
        return given
    ways = []
    if samples % steps == 0:
        ways.append(f"--global-batch-size {samples // steps}")
    if given is not None and samples % given == 0:
        ways.append(f"--num-steps-per-rollout {samples // given}")
    if given is not None and given * steps % size == 0:
        ways.append(f"--rollout-batch-size {given * steps // size}")
    advice = " or ".join(ways[:2]) if ways else f"--num-steps-per-rollout to a divisor of {samples}"
    raise ConfigError(
        f"rollout_batch_size ({prompts}) × n_samples_per_prompt ({size}) = {samples} must equal global_batch_size "
        f"({given if given is not None else 'not given'}) × num_steps_per_rollout ({steps}); set {advice}"
    )


def row_limit(rollout: RolloutConfig, context: int) -> int:
    """Tokens of a row of a data set at most: a longer one loses its end. ``context`` is the model's longest."""
    return min(rollout.sampling.rollout_max_context_len or context, context)


def is_quantized(hf_checkpoint: str) -> bool:
    """Whether engines hold quantized weights: the model's files do."""
    from slime_convert.quantize import read_format

    directory = Path(hf_checkpoint)
    return (directory / "config.json").is_file() and read_format(directory) is not None


def engine_dtype(megatron: MegatronConfig, rollout: RolloutConfig) -> str:
    """The type that engines compute in; beside quantized weights it is always bfloat16."""
    return "bfloat16" if megatron.bf16 or is_quantized(rollout.data.hf_checkpoint) else "float32"


def canary_limit(engine: EngineConfig, megatron: MegatronConfig, rollout: RolloutConfig) -> float:
    """The largest mean distance of the engines' log-probs from the trainer's after an update, in nats; 0 for none."""
    if engine.weight_canary_limit is not None:
        return engine.weight_canary_limit
    return 1.0 if is_quantized(rollout.data.hf_checkpoint) else CANARY_LIMITS[engine_dtype(megatron, rollout)]


def num_engines(cluster: ClusterConfig, engine: EngineConfig) -> int:
    """Number of SGLang servers that the run starts, unless ``--sglang-config`` says it."""
    return cluster.rollout_gpus // engine.rollout_num_gpus_per_engine


def num_spare_engines(cluster: ClusterConfig, engine: EngineConfig) -> int:
    """Number of those that are added once nodes have room for them."""
    return cluster.spare_gpus // engine.rollout_num_gpus_per_engine


def limit_threads(engine: EngineConfig, *, engines: int) -> EngineConfig:
    """Share the machine's cores among the engines, which all compute at the same time; trainer ranks do so, too."""
    if engine.engine_threads is not None or engine.rollout_external_engine_addrs:
        return engine
    from slime_launch.placement import own_share

    return dataclasses.replace(engine, engine_threads=own_share(engines))


def turn_log_of(megatron: MegatronConfig, rollout: RolloutConfig) -> str | None:
    """Where turns and tools' results of custom generate functions are written down, in a run that can be continued."""
    from slime_rollout.service import TURNS_FILE

    save, path = megatron.save, rollout.sampling.custom_generate_function_path
    return None if save is None or path is None else str((Path(save) / TURNS_FILE).resolve())


def answers_in_time(engine: EngineConfig, stall_timeout: float) -> EngineConfig:
    """Settings of engines that are given up during an update before the run is said to stall: so they are blamed."""
    limit = min(engine.update_weight_timeout, max(stall_timeout / 2, stall_timeout - GIVE_UP_SECONDS))
    return dataclasses.replace(engine, update_weight_timeout=limit)


def precision_notes(megatron: MegatronConfig, given: Collection[str]) -> list[str]:
    """The type that the run computes in, where no flag is ``given`` that says it; or that it is slow here."""
    if not {"bf16", "fp32"}.isdisjoint(given):
        slow = megatron.bf16 and run_device() == "cpu" and not computes_bfloat16()
        return [SLOW_BF16] if slow else []
    if megatron.bf16:
        return ["computes in bfloat16, the default on CUDA; --fp32 changes that"]
    return ["computes in fp32, the default without CUDA; --bf16 changes that"]


def computes_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine's processor has instructions for bfloat16; true where that cannot be read."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    named = [line.partition(":")[2].split() for line in text.splitlines() if line.startswith(("flags", "Features"))]
    return not named or bool({"avx512_bf16", "amx_bf16", "bf16"}.intersection(*named[:1]))
