"""On-policy distillation in the whole loop: a student of a teacher that a SGLang server serves, or the trainer holds.

R: tokens of a response, T: of prompt and response, V: vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
import torch
from launching import Assets, rows, run, train_command
from tiny import make_model
from transformers import AutoModelForCausalLM

from slime_core.types import Sample
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.fleet import EngineFleet
from slime_rollout.store import RolloutStore

ROLLOUTS = 12
# Where the usual command has a reward and a KL loss, the teacher alone trains; and how many values each flag has.
LEFT_OUT = {"--custom-rm-path": 1, "--use-kl-loss": 0, "--kl-loss-coef": 1}


def distillation_command(assets: Assets, work: Path, *teacher: str) -> list[str]:
    """The usual command with the teacher of these flags in the reward's place."""
    words = train_command(assets, work, "--lr", "3e-3", "--keep-rollouts", rollouts=ROLLOUTS, save=False)
    for flag, values in LEFT_OUT.items():
        place = words.index(flag)
        del words[place : place + 1 + values]
    return [*words, "--use-opd", *teacher]


@torch.no_grad()
def log_probs(network: torch.nn.Module, sample: Sample) -> torch.Tensor:
    """Log-probs of the response's tokens [R], in float64."""
    logp_TV = network(torch.tensor([sample.tokens])).logits[0, :-1].double().log_softmax(-1)
    return logp_TV.gather(1, torch.tensor(sample.tokens[1:])[:, None])[-sample.response_length :, 0]


@pytest.mark.real
@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_student_comes_closer_to_its_teacher(qwen3: Assets, tmp_path: Path) -> None:
    teacher = make_model("qwen3", tmp_path / "teacher", seed=1)
    config = EngineConfig(sglang_python=qwen3.engine_python, engine_threads=1)
    with EngineFleet.start(
        config,
        model_path=str(teacher),
        num_engines=1,
        dtype="float32",
        context_length=128,
        seed=1,
        log_dir=tmp_path / "logs",
    ) as fleet:
        (url,) = fleet.engine_urls
        command = distillation_command(qwen3, tmp_path, "--opd-type", "sglang", "--rm-url", url)
        run(command, tmp_path / "train.txt")

    samples = RolloutStore(tmp_path / "out" / "rollouts").read(0).batch().samples
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (qwen3.hf, teacher)]
    worst, reverse_kl = 0.0, []
    for sample in samples:
        student_R, teacher_R = (log_probs(model, sample) for model in models)
        worst = max(worst, (teacher_R - torch.tensor(sample.teacher_log_probs, dtype=torch.float64)).abs().max().item())
        reverse_kl.append((student_R - teacher_R).mean().item())
    print(f"largest difference of the teacher's log-probs in the loop from transformers': {worst:.1e}")
    assert worst < 1e-4
    it_learned(tmp_path, mean(reverse_kl))


@pytest.mark.real
@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_teacher_in_the_trainer(qwen3: Assets, tmp_path: Path) -> None:
    teacher = make_model("qwen3", tmp_path / "teacher", seed=1)
    command = distillation_command(qwen3, tmp_path, "--opd-type", "megatron", "--opd-teacher-load", str(teacher))
    run(command, tmp_path / "train.txt")

    samples = RolloutStore(tmp_path / "out" / "rollouts").read(0).batch().samples
    assert {sample.teacher_log_probs for sample in samples} == {None}
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (qwen3.hf, teacher)]
    differences = [log_probs(models[0], sample) - log_probs(models[1], sample) for sample in samples]
    it_learned(tmp_path, mean(difference_R.mean().item() for difference_R in differences))


def it_learned(tmp_path: Path, reverse_kl: float) -> None:
    """The first rollout's reverse KL is that of transformers, and the last ones' is smaller."""
    divergence = [row["train/opd_reverse_kl"] for row in rows(tmp_path, "train")]
    early, late = mean(divergence[:4]), mean(divergence[-4:])
    print(f"reverse KL from the teacher, nats a token: first four rollouts {early:.3f}, last four {late:.3f}")
    assert divergence[0] == pytest.approx(reverse_kl, abs=1e-4)
    assert len(divergence) == ROLLOUTS
    assert {row["rollout/raw_reward"] for row in rows(tmp_path, "rollout")} == {0.0}
    assert late < 0.8 * early
