"""The checks of `scripts/gpu-check`: what is computed, what it is compared with, and how far it may be off."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_check import ranks, speed
from gpu_check.machine import KINDS, Cases, Machine, NotRunError, Verdict, samples, shards
from gpu_check.processes import Ranks
from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_megatron.settings.config import MegatronConfig
from slime_megatron.settings.operations import flops_model

GRPO = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")
FP32_BOUND, SUM_BOUND, WEIGHT_BOUND = 1e-4, 1e-5, 3e-5
# bf16 has 8 bits of mantissa: a product is off by 0.4 %, four layers of them (measured on a CPU) by 2 %.
BF16_BOUND, BF16_SUM_BOUND = 0.05, 1e-2
GRADIENT_FLOOR = 1e-4  # a parameter's whole gradient may be 0 but for rounding
FREED_PART, SPEED_PART = 0.9, 0.95

TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2, CP2, EP2 = ({f"{kind}_parallel_size": 2} for kind in ("pipeline_model", "context", "expert_model"))
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
SHARED = {"share_prompts": "on"}
OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": "on", "overlap_param_gather": "on"}
# Ranks, settings, and how samples are divided (see `shards`); as in slime-megatron's tests/layouts.py.
LAYOUTS: Mapping[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "micro-batches": (1, {}, {"micro_batch_size": 3}),
    "micro-batches by tokens": (1, {}, {"max_tokens": 60}),
    "full recomputation": (
        1,
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {},
    ),
    "selective recomputation": (1, {"recompute_granularity": "selective"}, {}),
    "shared prompts": (1, SHARED, {"micro_batch_size": 4}),
    "tp2": (2, {"tensor_model_parallel_size": 2}, {"micro_batch_size": 3}),
    "tp2+sp": (2, TP2_SP, {"micro_batch_size": 3}),
    "pp2": (2, PP2, {"micro_batch_size": 2}),
    "pp2+vpp2": (2, VPP2, {"micro_batch_size": 2}),
    "dp2": (2, {}, {"micro_batch_size": 3}),
    "dp2, uneven": (2, {}, {"micro_batch_size": 2, "untrained": True}),
    "dp2, by tokens": (2, {}, {"max_tokens": 60}),
    "dp2+dist-opt": (2, {"use_distributed_optimizer": True, "overlap_grad_reduce": "off"}, {"micro_batch_size": 2}),
    "dp2+dist-opt+overlap": (2, OVERLAP, {"micro_batch_size": 2}),
    "cp2": (2, CP2, {"micro_batch_size": 3}),
    "ep2": (2, EP2, {"micro_batch_size": 3}),
    "shared prompts, pp2+vpp2": (2, VPP2 | SHARED, {"micro_batch_size": 4}),
    "shared prompts, tp2+sp": (2, TP2_SP | SHARED, {}),
    "tp2+sp, pp2": (4, TP2_SP | PP2, {"micro_batch_size": 2}),
    "pp2, dp2": (4, PP2, {"micro_batch_size": 2}),
    "cp2, pp2": (4, CP2 | PP2, {"micro_batch_size": 2}),
    "tp2+sp, cp2": (4, TP2_SP | CP2, {"micro_batch_size": 3}),
    "tp2+sp, dp2, ep2": (4, TP2_SP | EP2, {"micro_batch_size": 3}),
    "pp2, dp2, ep2": (4, PP2 | EP2, {"micro_batch_size": 2}),
}
# Of the two models: experts, and these without sequence parallelism, are `deepseek`'s, which has both.
UNSUITED = {"qwen3": ("ep2",), "deepseek": ("tp2",)}


def difference(got: NDArray[np.float32], wanted: NDArray[np.float32], *, bf16: bool) -> Verdict:
    """Of logits: the largest in fp32. In bf16 a token's root mean square as a part of its logits' own, the median.

    In bf16 a token may choose other experts, and is then far off; half of all tokens cannot be.
    """
    if bf16:
        found = np.median(np.sqrt(((got - wanted) ** 2).mean(1) / (wanted**2).mean(1)))
        return f"{found:.1e} of rms", f"{BF16_BOUND:.0e} of rms", bool(found <= BF16_BOUND)
    found = np.abs(got - wanted).max()
    return f"{found:.1e}", f"{FP32_BOUND:.0e}", bool(found <= FP32_BOUND)


def device_cases(machine: Machine) -> Cases:
    """On a GPU the stand-ins for CPUs replace nothing."""

    def compute() -> Verdict:
        if machine.device == "cpu":
            raise NotRunError("needs a GPU")
        replaced = machine.facts["replaced"]
        return f"{len(replaced)} functions", "0 functions", not replaced

    yield "torch stays as it is", compute


def logits_cases(machine: Machine) -> Cases:
    """Every kind of layers gives transformers' logits (fp32, on the CPU)."""
    for name in ("qwen3", "deepseek"):
        for kind in KINDS:

            def compute(name: str = name, kind: str = kind) -> Verdict:
                own, model = machine.settings(kind), machine.model(name)
                found = machine.first(1, "logits", machine.config(name, **own), model.shape, [samples()])
                return difference(found, model.logits, bf16="bf16" in own)

            yield f"{name}, {kind} = transformers", compute


def row_cases(machine: Machine) -> Cases:
    """A packed row gives the logits of its samples one at a time."""
    for kind in KINDS:

        def compute(kind: str = kind) -> Verdict:
            own, shape = machine.settings(kind), machine.model("qwen3").shape
            config = machine.config("qwen3", **own)
            packed = machine.first(1, "logits", config, shape, [samples()])
            single = machine.first(1, "logits", config, shape, [[sample] for sample in samples()])
            return difference(packed, single, bf16="bf16" in own)

        yield f"{kind}: packed = one by one", compute


def sharing_cases(machine: Machine) -> Cases:
    """Shared prompts change neither logits nor the gradient's norm; of latent attention too.

    In bf16 a token of the model with experts may choose others: of it the logits count, most of which are near.
    """
    for name in ("qwen3", "deepseek"):
        for kind in KINDS:

            def sides(name: str = name, kind: str = kind) -> list[MegatronConfig]:
                own = machine.settings(kind)
                if "Engine" in kind and not machine.facts["flash"]:
                    raise NotRunError("needs PyTorch's flash attention")
                return [machine.config(name, **own, share_prompts=share) for share in ("on", "off")]

            def same_logits(name: str = name, kind: str = kind, sides: Sides = sides) -> Verdict:
                shape, given = machine.model(name).shape, [samples()]
                shared, alone = (machine.first(1, "logits", config, shape, given) for config in sides())
                return difference(shared, alone, bf16="bf16" in kind)

            def same_gradient(name: str = name, kind: str = kind, sides: Sides = sides) -> Verdict:
                given = (machine.model(name).shape, GRPO, shards(steps=1))
                shared, alone = (machine.first(1, "train", config, *given).steps[0]["grad_norm"] for config in sides())
                found, bound = abs(shared - alone) / alone, BF16_SUM_BOUND if "bf16" in kind else SUM_BOUND
                return f"{found:.1e}", f"{bound:.0e}", found <= bound

            yield f"{name}, {kind}: logits", same_logits
            if name == "qwen3" or "fp32" in kind:
                yield f"{name}, {kind}: gradient norm", same_gradient


Sides = Callable[[], list[MegatronConfig]]


def layout_cases(machine: Machine) -> Cases:
    """At every layout losses, gradients and weights of three steps are those of one process, in fp32.

    In bf16, with each kind of layers, the first step's loss and gradient norm.
    """
    for kind in KINDS:
        for name in ("qwen3", "deepseek"):
            for layout, (world, settings, divided) in LAYOUTS.items():
                if any(part in UNSUITED[name] for part in layout.split(", ")):
                    continue
                untrained = bool(divided.get("untrained"))
                alone = functools.partial(_alone, machine, kind, name, untrained)
                here = functools.partial(_train, machine, kind, name, world, settings, divided)
                compare = _same_first_step if "bf16" in kind else _same_steps
                yield f"{name}, {kind}, {layout}", functools.partial(compare, here, alone)


@functools.cache
def _alone(machine: Machine, kind: str, name: str, untrained: bool) -> ranks.Trained:
    """One process, in one micro-batch a step."""
    return _train(machine, kind, name, 1, {}, {"untrained": untrained})


def _train(
    machine: Machine, kind: str, name: str, world: int, layout: Mapping[str, Any], divided: Mapping[str, Any]
) -> ranks.Trained:
    config = machine.config(name, **{**machine.settings(kind), **layout})
    if config.share_prompts == "on" and "Engine" in kind and not machine.facts["flash"]:
        raise NotRunError("needs PyTorch's flash attention")
    if world > machine.most_ranks:
        raise NotRunError(f"needs {world} ranks")
    given = shards(config.data_parallel_size(world), **divided)
    found: ranks.Trained = machine.first(world, "train", config, machine.model(name).shape, GRPO, given)
    return found


Training = Callable[[], ranks.Trained]


def _same_steps(here: Training, alone: Training) -> Verdict:
    """Of gradients each parameter's largest difference, as a part of its largest number."""
    found, wanted = here(), alone()
    sums = max(_furthest(step, other) for step, other in zip(found.steps, wanted.steps, strict=True))
    furthest = max(float(np.abs(found.weights[key] - value).max()) for key, value in wanted.weights.items())
    good = sums <= SUM_BOUND and furthest <= WEIGHT_BOUND and found.weights.keys() == wanted.weights.keys()
    text, bound = f"{sums:.1e}, weights {furthest:.1e}", f"{SUM_BOUND:.0e}, weights {WEIGHT_BOUND:.0e}"
    if not found.gradients:  # the distributed optimizer's ranks have parts of them
        return text, bound, good
    gradients = max(
        float(np.abs(found.gradients[key] - value).max() / (np.abs(value).max() + GRADIENT_FLOOR))
        for key, value in wanted.gradients.items()
        if value.size
    )
    good = good and gradients <= SUM_BOUND and found.gradients.keys() == wanted.gradients.keys()
    return f"{text}, gradients {gradients:.1e}", f"{bound}, gradients {SUM_BOUND:.0e}", good


def _same_first_step(here: Training, alone: Training) -> Verdict:
    found = _furthest(here().steps[0], alone().steps[0])
    return f"{found:.1e}", f"{BF16_SUM_BOUND:.0e}", found <= BF16_SUM_BOUND


def _furthest(step: Mapping[str, float], wanted: Mapping[str, float]) -> float:
    """The largest difference of a metric, as a part of what it should be where that is above 1."""
    metrics = ("loss", "grad_norm", "kl_loss")
    return max(abs(step[metric] - wanted[metric]) / max(1.0, abs(wanted[metric])) for metric in metrics)


def offload_cases(machine: Machine) -> Cases:
    """Sleep frees the device's memory, and wake brings every tensor back as it was.

    An optimizer in host memory takes the steps that one on the GPU takes.
    """

    def compute() -> Verdict:
        shape = (
            speed.tiny() if machine.device == "cpu" else speed.fitting("smollm2-135M", machine.facts["gpu_bytes"])[1]
        )
        config = MegatronConfig(bf16=True, trainer_threads=1)
        found = machine.first(1, "offload", config, shape, shards(steps=1))
        freed = 1 - found["left"] / found["held"]
        equal = "bit-equal" if found["equal"] else "changed"
        good = freed >= FREED_PART and found["equal"] and found["left"] < found["half"] < found["held"]
        return f"{freed:.0%} freed, {equal}", f"{FREED_PART:.0%}, bit-equal", good

    def host_optimizer() -> Verdict:
        """Three steps of both give the same losses and gradient norms in bf16: torch's Adam on a CPU and on a GPU."""
        if machine.device == "cpu":
            raise NotRunError("needs a GPU")
        own = {"bf16": True, "use_distributed_optimizer": True}
        offloaded = own | {"megatron_args": {"optimizer_cpu_offload": True}}
        here, there = (_train(machine, "local, bf16", "qwen3", 1, given, {}) for given in (offloaded, own))
        found = max(_furthest(step, other) for step, other in zip(here.steps, there.steps, strict=True))
        return f"{found:.1e}", f"{BF16_SUM_BOUND:.0e}", found <= BF16_SUM_BOUND

    yield "sleep and wake", compute
    yield "optimizer on the host = on the GPU", host_optimizer


def push_cases(machine: Machine) -> Cases:
    """Weights that another process reads where they are: through CUDA IPC, or shared memory on a CPU."""

    def compute() -> Verdict:
        try:
            import slime_rollout.weights.buckets  # noqa: F401
        except ImportError as error:
            raise NotRunError("needs slime-rollout") from error
        found = machine.first(1, "push", machine.config("qwen3", bf16=True), machine.model("qwen3").shape)
        good = found["equal"] and found["device"] == machine.device and found["tensors"] > 0
        equal = "bit-equal" if found["equal"] else "changed"
        return f"{found['tensors']} on {found['device']}, {equal}", f"on {machine.device}, bit-equal", good

    yield "CUDA IPC" if machine.device == "cuda" else "shared memory", compute


def determinism_cases(machine: Machine) -> Cases:
    """Two runs with --deterministic-mode give the same bits."""
    for kind in KINDS:

        def compute(kind: str = kind) -> Verdict:
            own = {**machine.settings(kind), "share_prompts": "auto", "deterministic_mode": True}
            config = machine.config("qwen3", **own)
            shape = machine.model("qwen3").shape
            group = Ranks(1, machine.device)  # the mode is the process's
            with contextlib.ExitStack() as stack:
                stack.callback(group.stop)
                (one, _, first), (two, _, second) = (
                    group.call(ranks.__name__, "train", config, shape, GRPO, shards())[0] for _ in range(2)
                )
            good = one == two and all(np.array_equal(first[key], value) for key, value in second.items())
            return "bit-equal" if good else "different", "bit-equal", good

        yield f"{kind}: two runs", compute


def speed_cases(machine: Machine) -> Cases:
    """A step of the trainer takes hardly longer than one of bare Megatron-core. On a CPU only that both run."""
    on_gpu, tokens = machine.device == "cuda", speed.TOKENS if machine.device == "cuda" else 256
    impl = "transformer_engine" if machine.facts["transformer_engine"] else "local"
    shapes = [speed.fitting(name, machine.facts["gpu_bytes"]) for name in speed.MODELS if on_gpu] or [
        ("tiny", speed.tiny()),
        ("tiny with experts", speed.tiny(experts=True)),
    ]

    def text(found: Mapping[str, Any], shape: ModelShape) -> str:
        rate = speed.ROWS * tokens / found["seconds"]
        parts = [f"{rate:,.0f} tokens/s"]
        if found["peak_tflops"]:
            done = speed.ROWS * flops_model(shape).training(tokens) / 1e12
            parts.append(f"MFU {done / found['seconds'] / found['peak_tflops']:.1%}")
        if found["peak_bytes"]:
            parts.append(f"{found['peak_bytes'] / 2**30:.1f} GiB")
        return ", ".join(parts)

    for label, shape in shapes:

        def compute(shape: ModelShape = shape) -> Verdict:
            # Processes of their own: what one side leaves in the caching allocator is not the other's.
            found = []
            for side in ("trainer", "bare"):
                group = Ranks(1, machine.device)
                with contextlib.ExitStack() as stack:
                    stack.callback(group.stop)
                    found += group.call(speed.__name__, side, impl, shape, tokens)
            own, other = found
            good = not on_gpu or own["seconds"] * SPEED_PART <= other["seconds"]
            return text(own, shape), f"bare: {text(other, shape)}", good

        yield f"{label}, {impl}", compute


CHECKS: Mapping[str, Callable[[Machine], Cases]] = {
    "device": device_cases,
    "logits": logits_cases,
    "rows": row_cases,
    "sharing": sharing_cases,
    "layouts": layout_cases,
    "offload": offload_cases,
    "push": push_cases,
    "determinism": determinism_cases,
    "speed": speed_cases,
}
