"""On-policy distillation in the whole loop: a student of a teacher that a SGLang server serves, or the trainer holds.

R: tokens of a response, T: of prompt and response, V: vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
import torch
import yaml
from launching import Assets, rows, run, train_command
from tiny import make_model
from transformers import AutoModelForCausalLM

from slime_core.types import Sample
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.fleet import EngineFleet
from slime_rollout.store import RolloutStore

ROLLOUTS, BESIDE_ROLLOUTS = 12, 30
# Where the usual command has a reward and a KL loss, the teacher alone trains; and how many values each flag has.
LEFT_OUT = {"--custom-rm-path": 1, "--use-kl-loss": 0, "--kl-loss-coef": 1}


# Generation during training; held-out prompts have a reward of their own.
BESIDE = ["--async-buffer-size", "2", "--max-weight-staleness", "2", "--eval-interval", "10", "--eval-config"]
EVERY = pytest.mark.parametrize("beside", [False, True], ids=["in step", "beside"])


def held_out(assets: Assets, work: Path) -> list[str]:
    """Flags of a run that evaluates, and generates during training."""
    reward = f"{Path(__file__).with_name('reward.py')}:every_eighth_token"
    one = {"path": f"{assets.prompts}@[0:16]", "custom_rm_path": reward}
    (work / "eval.yaml").write_text(yaml.safe_dump({"eval": {"datasets": {"held": one}}}))
    return [*BESIDE, str(work / "eval.yaml")]


def distillation_command(assets: Assets, work: Path, *teacher: str) -> list[str]:
    """The usual command with the teacher of these flags in the reward's place."""
    colocate = BESIDE[0] not in teacher
    usual = ("--lr", "3e-3", "--keep-rollouts")
    rollouts = ROLLOUTS if colocate else BESIDE_ROLLOUTS
    words = train_command(assets, work, *usual, rollouts=rollouts, save=False, colocate=colocate)
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
@EVERY
def test_a_student_comes_closer_to_its_teacher(qwen3: Assets, tmp_path: Path, beside: bool) -> None:
    teacher = make_model("qwen3", tmp_path / "teacher", seed=1)
    more = held_out(qwen3, tmp_path) if beside else []
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
        command = distillation_command(qwen3, tmp_path, *more, "--opd-type", "sglang", "--rm-url", url)
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
    it_learned(tmp_path, mean(reverse_kl), beside)


@pytest.mark.real
@pytest.mark.full
@pytest.mark.timeout(400)
@EVERY
def test_a_teacher_in_the_trainer(qwen3: Assets, tmp_path: Path, beside: bool) -> None:
    teacher = make_model("qwen3", tmp_path / "teacher", seed=1)
    more = held_out(qwen3, tmp_path) if beside else []
    command = distillation_command(qwen3, tmp_path, *more, "--opd-type", "megatron", "--opd-teacher-load", str(teacher))
    run(command, tmp_path / "train.txt")

    samples = RolloutStore(tmp_path / "out" / "rollouts").read(0).batch().samples
    assert {sample.teacher_log_probs for sample in samples} == {None}
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (qwen3.hf, teacher)]
    differences = [log_probs(models[0], sample) - log_probs(models[1], sample) for sample in samples]
    it_learned(tmp_path, mean(difference_R.mean().item() for difference_R in differences), beside)


def it_learned(tmp_path: Path, reverse_kl: float, beside: bool) -> None:
    """The first rollout's reverse KL is that of transformers, and the last ones' is smaller."""
    ages = [row.get("rollout/staleness/max", 0) for row in rows(tmp_path, "rollout")]
    assert 0 < max(ages) <= 2 if beside else max(ages) == 0
    assert len(rows(tmp_path, "eval")) == (4 if beside else 0)
    divergence = [row["train/opd_reverse_kl"] for row in rows(tmp_path, "train")]
    # Of older tokens than the newest it is too small while the student changes fast; the first are of its own.
    early, late = mean(divergence[: 1 if beside else 4]), mean(divergence[-4:])
    print(f"reverse KL from the teacher, nats a token: first rollouts {early:.3f}, last four {late:.3f}")
    assert divergence[0] == pytest.approx(reverse_kl, abs=1e-4)
    assert len(divergence) == (BESIDE_ROLLOUTS if beside else ROLLOUTS)
    assert {row["rollout/raw_reward"] for row in rows(tmp_path, "rollout")} == {0.0}
    assert late < 0.8 * early
