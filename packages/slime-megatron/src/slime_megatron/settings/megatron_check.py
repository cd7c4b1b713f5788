"""Whether Megatron's arguments can be given, before a run starts: by the tables, then by Megatron itself. No torch."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys

from slime_convert.shape import ModelShape
from slime_core.errors import ConfigError
from slime_megatron.settings.arguments import notices, problems, reaches_megatron
from slime_megatron.settings.config import MegatronConfig
from slime_megatron.settings.megatron_values import slime_values
from slime_megatron.settings.megatron_words import said

_SECONDS = 300.0
_REFUSED = 3
# Importing torch and Megatron takes seconds, and changes the process.
_ASK = f"""
import pickle, sys, warnings
warnings.simplefilter("ignore")
shape, config = pickle.load(sys.stdin.buffer)
from slime_core.errors import ConfigError
from slime_core.importing import without_collections, without_packages
with without_collections(), without_packages("wandb", "tensorboard"):
    from slime_megatron.ranks.device import select_device
    device = select_device(1)
    from slime_megatron.model.megatron_configs import check_arguments
try:
    check_arguments(shape, config, device)
except ConfigError as error:
    print(error)
    sys.exit({_REFUSED})
"""


def check_megatron_args(config: MegatronConfig, shape: ModelShape, *, on_gpu: bool) -> None:
    """Check ``config.megatron_args``, as a trainer will; another process builds Megatron's configs if it gets any.

    Raises:
        ConfigError: Naming everything that is wrong, a line each, in the words of the command line.
    """
    given = config.megatron_args
    if config.te_modules and not on_gpu:
        raise ConfigError(config.no_te_modules("there is no GPU"))
    if config.transformer_impl == "transformer_engine" and not on_gpu:
        raise ConfigError("--transformer-impl transformer_engine: there is no GPU for its layers; give auto or local")
    if found := list(problems(given, shape, config, slime_values(shape, config, on_gpu=on_gpu), said)):
        raise ConfigError("\n".join(found))
    if any(reaches_megatron(name, on_gpu=on_gpu) for name in given):
        _ask_megatron(pickle.dumps((shape, config)))


def argument_notices(config: MegatronConfig, shape: ModelShape, *, on_gpu: bool) -> list[str]:
    """Which of ``config.megatron_args`` have no effect, and why."""
    # On a GPU its workers, which know their layers, say more.
    values = slime_values(shape, config, on_gpu=on_gpu) | {"moe_grouped_gemm": on_gpu}
    return notices(config.megatron_args, shape, (), values, said)


@functools.lru_cache(maxsize=64)  # what it refuses is asked again: nothing is kept of a call that raises
def _ask_megatron(question: bytes) -> None:
    try:
        result = subprocess.run(
            [sys.executable, "-P", "-c", _ASK], input=question, capture_output=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"Megatron-core did not check its arguments within {_SECONDS:g} s; try again") from error
    if result.returncode == _REFUSED:
        raise ConfigError(result.stdout.decode(errors="replace").strip())
    if result.returncode:
        last = result.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
        raise ConfigError(f"Megatron-core cannot check its arguments: {last[0]}")
