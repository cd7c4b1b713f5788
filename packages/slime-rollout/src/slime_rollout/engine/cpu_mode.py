"""How SGLang runs on a CPU: its flags, its environment, and the shims that only its process imports."""

from __future__ import annotations

import os
from pathlib import Path

from slime_rollout.engine.config import SglangValue

CPU_SHIMS = Path(__file__).parent / "cpu_shims"
# Tokens that the KV cache of an engine holds.
KV_TOKENS = 32768
RUNNING_REQUESTS = 128
PREFILL_TOKENS = 512


def cpu_flags(context_length: int | None) -> dict[str, SglangValue]:
    """SGLang's flags of an engine.

    Args:
        context_length: Longest prompt plus response in tokens; the model's own limit if ``None``.
    """
    return {
        "device": "cpu",
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "grammar-backend": "none",
        "disable-overlap-schedule": True,
        "cuda-graph-backend-decode": "disabled",
        "cuda-graph-backend-prefill": "disabled",
        # The cache's size is given in tokens. SGLang only compares this share with what loading seemed to take, and
        # that includes whatever other processes took meanwhile: at 0.1 it gave up beside a trainer that was starting.
        "mem-fraction-static": "0.8",
        "max-total-tokens": str(max(KV_TOKENS, context_length or 0)),
        "max-running-requests": str(RUNNING_REQUESTS),
        # Samples of one prompt arrive together. A small first part of them is prefilled, and serves the others.
        "schedule-policy": "lpm",
        "chunked-prefill-size": str(PREFILL_TOKENS),
        # Without it an idle server keeps one core busy, and a trainer beside it runs at half its speed.
        "sleep-on-idle": True,
        # `sampling_seed` counts only with this.
        "enable-deterministic-inference": True,
    }


def cpu_environment(threads: int, ranks: int, python_path: str | None) -> dict[str, str]:
    """What an engine's environment has besides.

    Args:
        threads: CPU threads of one engine.
        ranks: Its tensor parallel size.
        python_path: ``PYTHONPATH`` without the shims.
    """
    environment = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "slime_cpu_shims.models",
        "PYTHONPATH": os.pathsep.join([str(CPU_SHIMS), *([python_path] if python_path else [])]),
        "OMP_NUM_THREADS": str(threads),
        # Threads that wait by spinning make a step twenty times slower as soon as anything else needs their core.
        "OMP_WAIT_POLICY": "PASSIVE",
        # Inductor would need a C++ compiler, and minutes.
        "TORCHDYNAMO_DISABLE": "1",
    }
    if ranks > 1:
        cores = sorted(os.sched_getaffinity(0))
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    return environment
