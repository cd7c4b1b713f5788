"""The machine that `scripts/gpu-check` looks at: rank processes, tiny models and samples, and rows of its table."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_check import ranks
from gpu_check.processes import CheckError, Ranks
from slime_convert.shape import ModelShape
from slime_core.types import TrainSample, TrainShard, TrainStep
from slime_megatron.settings.config import MegatronConfig

VOCABULARY, STEPS = 500, 3
# Name of a kind of layers and precision: its settings.
KINDS: Mapping[str, dict[str, Any]] = {
    "local, fp32": {"transformer_impl": "local"},
    "local, bf16": {"transformer_impl": "local", "bf16": True},
    "Transformer Engine, bf16": {"transformer_impl": "transformer_engine", "bf16": True},
}

Verdict = tuple[str, str, bool]
"""A value, its bound, and whether it is within it."""
Cases = Iterator[tuple[str, Callable[[], Verdict]]]


class NotRunError(Exception):
    """This machine cannot show a case; the message says why."""


@dataclass(frozen=True)
class Row:
    """A line of the table; ``result`` is ``ok``, ``MISMATCH``, or ``not run`` and the reason."""

    check: str
    case: str
    value: str
    bound: str
    result: str


@dataclass(frozen=True)
class Model:
    """A tiny random model of transformers, and its logits at the trained tokens of :func:`samples`, N × V."""

    directory: str
    shape: ModelShape
    logits: NDArray[np.float32]


class Machine:
    """This machine's rank processes, made when they are needed, and tiny models in a directory."""

    def __init__(self, device: str, most_ranks: int, directory: Path) -> None:
        self.device, self.most_ranks = device, most_ranks
        self._directory = directory
        self._ranks: dict[int, Ranks] = {}
        self.facts: dict[str, Any] = self.call(1, ranks.__name__, "facts")[0]

    def call(self, world: int, module: str, function: str, *args: Any) -> list[Any]:
        """Call a function on that many ranks. Raises `NotRunError` where there are fewer, `CheckError` if it fails."""
        if world > self.most_ranks:
            raise NotRunError(f"needs {world} ranks")
        if world not in self._ranks:
            self._ranks[world] = Ranks(world, self.device)
        try:
            return self._ranks[world].call(module, function, *args)
        except CheckError:
            self._ranks.pop(world).stop()  # they may hang in a collective
            raise

    def first(self, world: int, function: str, *args: Any) -> Any:
        """The same of `gpu_check_ranks`, but only rank 0's answer."""
        return self.call(world, ranks.__name__, function, *args)[0]

    def guarded(self, check: str, cases: Callable[[Machine], Cases]) -> Iterator[Row]:
        """The rows of a check; a case that fails does not end it."""
        for case, compute in cases(self):
            try:
                value, bound, good = compute()
                yield Row(check, case, value, bound, "ok" if good else "MISMATCH")
            except NotRunError as reason:
                yield Row(check, case, "", "", f"not run: {reason}")
            except CheckError as error:
                yield Row(check, case, str(error), "", "MISMATCH")

    def stop(self) -> None:
        """End the processes."""
        for group in self._ranks.values():
            group.stop()

    def settings(self, kind: str) -> dict[str, Any]:
        """Of a kind of layers. Raises `NotRunError` if it is not there."""
        if "Engine" in kind and not self.facts["transformer_engine"]:
            raise NotRunError("needs Transformer Engine" if self.device == "cuda" else "needs a GPU")
        return KINDS[kind]

    @functools.cache  # noqa: B019  (one machine, for the whole run)
    def model(self, name: str) -> Model:
        """A random model of four layers, `qwen3` or `deepseek`: with experts and latent attention."""
        import torch
        from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3Config
        from transformers.utils.logging import disable_progress_bar

        common = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
        common |= {"max_position_embeddings": 512, "tie_word_embeddings": False, "num_attention_heads": 4}
        latent = {"kv_lora_rank": 24, "q_lora_rank": 24, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8}
        experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        experts |= {
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "num_mtp_layers": 0,
        }
        config = (
            Qwen3Config(**common, num_key_value_heads=2, head_dim=16)
            if name == "qwen3"
            else DeepseekV3Config(**common, **latent, **experts, num_key_value_heads=4, v_head_dim=16)
        )
        disable_progress_bar()
        torch.manual_seed(7)
        hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        rows = []
        with torch.no_grad():
            for param in hf.parameters():
                param.normal_(0, 0.15) if param.dim() > 1 else param.add_(0.1 * torch.randn_like(param))
            for sample in samples():
                all_SV = hf(torch.tensor([sample.tokens.tolist()])).logits[0]
                rows.append(all_SV[sample.prompt_length - 1 : -1].numpy())
        directory = str(self._directory / name)
        hf.save_pretrained(directory)
        return Model(directory, ModelShape.from_hf_config(directory), np.concatenate(rows))

    def config(self, name: str, **values: Any) -> MegatronConfig:
        """Settings with steps so large that a wrong gradient shows."""
        common = {"lr": 1e-2, "weight_decay": 0.1, "adam_eps": 1e-4, "trainer_threads": 1, "share_prompts": "off"}
        return MegatronConfig(**{"load": self.model(name).directory, **common, **values})


def samples(*, untrained: bool = False) -> list[TrainSample]:
    """Six groups of four, with prompts and responses of different lengths.

    With ``untrained`` every other one of the first half trains nothing: dealt to two ranks in turns, all are one's.
    """
    rng, made = np.random.default_rng(0), list[TrainSample]()
    for group in range(6):
        prompt = rng.integers(0, VOCABULARY, 9 + 2 * group)
        for member in range(4):
            length = int(rng.integers(5, 9))
            tokens = np.concatenate([prompt, rng.integers(0, VOCABULARY, length)]).astype(np.int32)
            is_trained = not (untrained and group < 3 and member % 2)
            sample = TrainSample(
                index=len(made),
                group_index=group,
                tokens=tokens,
                response_length=length,
                loss_mask=np.full(length, is_trained, np.uint8),
                trajectory_tokens=length * is_trained,
                reward=(member - 1.5) * 0.7,
                raw_reward=float(member),
            )
            made.append(sample)
    return made


def shards(
    data_parallel: int = 1,
    steps: int = STEPS,
    *,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    untrained: bool = False,
) -> list[TrainShard]:
    """The samples dealt to ranks in turns, in steps of equal size and micro-batches of so many samples or tokens."""
    made, all_samples = [], samples(untrained=untrained)
    size = len(all_samples) // steps
    for rank in range(data_parallel):
        own: list[TrainSample] = []
        train_steps = []
        for number in range(steps):
            members = all_samples[number * size : (number + 1) * size]
            first = len(own)
            own += members[rank::data_parallel]
            train_steps.append(
                TrainStep(
                    micro_batches=_divided(own, first, micro_batch_size or len(own), max_tokens),
                    global_trajectories=size,
                    global_tokens=sum(sample.trajectory_tokens for sample in members),
                )
            )
        made.append(TrainShard.of(rollout_id=0, temperature=1.0, samples=own, steps=train_steps))
    return made


def _divided(own: list[TrainSample], first: int, most: int, max_tokens: int | None) -> list[list[int]]:
    """Positions from ``first`` on in micro-batches of ``most`` samples, or of at most so many tokens."""
    found: list[list[int]] = []
    for position in range(first, len(own)):
        is_full = not found or len(found[-1]) == most
        if max_tokens is not None and not is_full:
            is_full = sum(len(own[at].tokens) for at in (*found[-1], position)) > max_tokens
        if is_full:
            found.append([])
        found[-1].append(position)
    return found
