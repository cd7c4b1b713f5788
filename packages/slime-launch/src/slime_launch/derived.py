"""Values of flags that were left open and follow from the others, so that a copied command means what it meant."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core.config import PAIR_LOSSES
from slime_core.errors import DataError
from slime_core.flags import flag_specs
from slime_launch.config import CONFIGS, Settings
from slime_launch.devices import run_device

SLOW_BF16 = "leave out --bf16: this processor has no instructions for it (AVX512_BF16, AMX); fp32 is many times faster"

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
    from slime_rollout.data_service import count_rows  # a third of what --help would take

    try:
        return int(epochs * count_rows(paths) // values["rollout_batch_size"])
    except DataError:
        return None


def precision_notes(settings: Settings) -> list[str]:
    """What the run computes in, where the command does not say it; or that what it says is slow on this machine."""
    if settings.origins.keys() & {"bf16", "fp32"}:
        slow = settings.megatron.bf16 and run_device() == "cpu" and not computes_bfloat16()
        return [SLOW_BF16] if slow else []
    if settings.megatron.bf16:
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
