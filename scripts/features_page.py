"""Writes docs/features.md: every two features of a run together, as the checks before a run answer it.

python scripts/features_page.py            writes the page
python scripts/features_page.py --check    says whether it is up to date, and exits with 1 if not
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

from slime_convert.published import PUBLISHED
from slime_core.errors import ConfigError
from slime_launch.errors import FlagError, Problems
from slime_launch.flags import read_train
from slime_launch.idle import idle_flags
from slime_launch.preflight import count_rollouts
from slime_launch.validate import check_settings
from slime_megatron.fits import check_fits
from slime_megatron.start import check_algorithm

PAGE = Path(__file__).resolve().parents[1] / "docs" / "features.md"
MODEL = "qwen3-30B-A3B"
BASE = (
    "--hf-checkpoint hf --load dist --save save --rollout-batch-size 16 --actor-num-gpus-per-node 8 --sequence-parallel"
)
LENGTH = "--num-rollout 4"
PROMPTS, GROUPS, ENGINES = "--prompt-data train.jsonl", "--n-samples-per-prompt 4", "--rollout-num-gpus 8"
HEAD = f"""\
# Features together

Written by `scripts/features_page.py` from what the checks before a run say of a command; a test compares the two. The
command trains {MODEL} on 8 GPUs beside 8 for the engines. Every feature is accepted alone. A run has one of two that
are alternatives of one choice. Of the other pairs some are refused; in some, one of the two has no effect, which the
run says at start. The last two tables have these with the reason. All others are accepted: no check refuses them. What
has been run together is in the tests.
"""


@dataclass(frozen=True)
class Feature:
    """One feature: its name, its flags, the choice that it is an alternative of, and what it takes the place of."""

    name: str
    words: str
    choice: str = ""
    instead: tuple[str, ...] = ()


FEATURES = (
    Feature("GRPO", "--advantage-estimator grpo", "algorithm"),
    Feature("GSPO", "--advantage-estimator gspo", "algorithm"),
    Feature("PPO with a critic", "--advantage-estimator ppo", "algorithm"),
    Feature("REINFORCE++", "--advantage-estimator reinforce_plus_plus --normalize-advantages", "algorithm"),
    Feature("RLOO", "--advantage-estimator rloo", "algorithm"),
    Feature("SFT", "--loss-type sft_loss", "algorithm", (ENGINES, GROUPS)),
    Feature("DPO", "--loss-type dpo_loss", "algorithm", (ENGINES, GROUPS)),
    Feature("reward model", "--loss-type rm_loss", "algorithm", (ENGINES, GROUPS)),
    Feature("own loss", "--loss-type custom_loss --custom-loss-function-path own.py:loss", "algorithm"),
    Feature("asynchronous", "--async-buffer-size 1"),
    Feature("colocated", "--colocate", "engines", (ENGINES,)),
    Feature("external engines", "--rollout-external-engine-addrs 10.0.0.1:30000", "engines", (ENGINES,)),
    Feature("several models", "--sglang-config engines.yaml"),
    Feature("own generate function", "--custom-generate-function-path own.py:generate --max-turns 3"),
    Feature("over-sampling", "--over-sampling-batch-size 32"),
    Feature("partial rollouts", "--over-sampling-batch-size 32 --partial-rollout"),
    Feature("dynamic sampling", "--dynamic-sampling-filter-path slime_rollout.filters.check_reward_nonzero_std"),
    Feature("streamed data", "--streaming-data"),
    Feature("epochs", "--num-epoch 2", "", (LENGTH,)),
    Feature("several steps per rollout", "--num-steps-per-rollout 2"),
    Feature("LoRA", "--lora-rank 8 --lora-alpha 16"),
    Feature("freezing by name", "--freeze-params-name-list embedding", "which weights train"),
    Feature("tensor parallelism", "--tensor-model-parallel-size 2"),
    Feature("pipeline", "--pipeline-model-parallel-size 2"),
    Feature("virtual pipeline", "--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2"),
    Feature("context parallelism", "--context-parallel-size 2"),
    Feature("expert parallelism", "--expert-model-parallel-size 4"),
    Feature("shared prompts", "--share-prompts on"),
    Feature("token limit", "--use-dynamic-batch-size --max-tokens-per-gpu 8192"),
    Feature("full recomputation", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    Feature(
        "distillation, teacher on a server",
        "--use-opd --opd-type sglang --rm-url http://teacher:30000/generate",
        "teacher",
    ),
    Feature(
        "distillation, teacher in the trainer", "--use-opd --opd-type megatron --opd-teacher-load teacher", "teacher"
    ),
    Feature("KL loss", "--use-kl-loss --kl-loss-coef 0.1"),
    Feature("engines' log-probs", "--use-rollout-logprobs"),
    Feature("log-probs of the weights that generated", "--update-weights-interval 2 --keep-old-actor"),
    Feature("TIS", "--use-tis"),
    Feature("MIS", "--use-mis"),
    Feature("weights by shared memory", "--update-weight-transport tensor", "transport"),
    Feature("weights by NCCL", "--update-weight-transport nccl", "transport"),
    Feature("weights by gloo", "--update-weight-transport gloo", "transport"),
    Feature("weights by disk", "--update-weight-transport disk --update-weight-disk-dir weights", "transport"),
    Feature(
        "weight deltas",
        "--update-weight-transport disk --update-weight-disk-dir weights --update-weight-mode delta "
        "--update-weight-local-checkpoint-dir local",
        "transport",
    ),
    Feature("weights every other rollout", "--update-weights-interval 2"),
    Feature("engines are replaced", "--use-fault-tolerance"),
    Feature("recorded rollouts", "--load-debug-rollout-data debug/{rollout_id}.npz", "kind of run"),
    Feature("generation only", "--debug-rollout-only", "kind of run"),
    Feature("evaluation only", "--num-rollout 0 --eval-prompt-data held held.jsonl", "kind of run"),
    Feature("evaluation", "--eval-interval 2 --eval-prompt-data held held.jsonl"),
    Feature("asynchronous checkpoints", "--async-save"),
    Feature("exports", "--save-hf export/{rollout_id}"),
)


def command(*features: Feature) -> list[str]:
    """The words of a command with some features."""
    instead = {words for feature in features for words in feature.instead}
    shared = [words for words in (LENGTH, PROMPTS, GROUPS, ENGINES) if words not in instead]
    return " ".join([BASE, *shared, *(feature.words for feature in features)]).split()


def answer(*features: Feature) -> tuple[str, set[str]]:
    """Why a command with some features is refused, empty if it is accepted; and its flags without effect, with why."""
    try:
        settings, contradictions = read_train(command(*features), on_gpu=False)
    except (FlagError, ConfigError) as error:
        return str(error).splitlines()[0], set()
    problems = Problems(contradictions)
    problems.attempt(check_settings, settings)
    if settings.rollout.data.streaming_data:
        problems.attempt(count_rollouts, settings)
    if not settings.algorithm.custom_loss_function_path:  # its file is not there
        problems.attempt(check_algorithm, settings.algorithm, settings.megatron)
    problems.attempt(check_fits, settings.megatron, PUBLISHED[MODEL].shape)
    idle = {f"{flag}: {why}" for why, flags in idle_flags(settings) for flag in flags}
    return next(iter(problems.lines), ""), idle


def pairs() -> list[tuple[Feature, Feature]]:
    """Every two features that are not alternatives."""
    every = itertools.combinations(FEATURES, 2)
    return [(one, other) for one, other in every if not one.choice or one.choice != other.choice]


def page() -> str:
    """The whole page."""
    flags = [f"| {feature.name} | `{feature.words}` | {feature.choice} |" for feature in FEATURES]
    alone = {feature: answer(feature)[1] for feature in FEATURES}
    rows: list[str] = []
    idle: list[str] = []
    every = pairs()
    for one, other in every:
        why, without_effect = answer(one, other)
        if why:
            rows.append(f"| {one.name} | {other.name} | {why} |")
        elif new := sorted(without_effect - alone[one] - alone[other]):
            idle.append(f"| {one.name} | {other.name} | {'; '.join(new)} |")
    accepted = len(every) - len(rows) - len(idle)
    return "\n".join(
        [
            HEAD,
            f"{len(every)} pairs: {accepted} are accepted, {len(rows)} refused, of {len(idle)} one has no effect.\n",
            "## Features\n\n| feature | flags | alternative of |\n|---|---|---|",
            *flags,
            "\n## Refused\n\n| feature | with | reason |\n|---|---|---|",
            *rows,
            "\n## Without effect\n\n| feature | with | flag and reason |\n|---|---|---|",
            *idle,
            "",
        ]
    )


def main(argv: list[str]) -> int:
    """Write the page, or compare it."""
    if argv == ["--check"]:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page():
            return 0
        print("docs/features.md is not up to date; run: python scripts/features_page.py", file=sys.stderr)
        return 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
