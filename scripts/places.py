"""Plants five changes in copies of the packages, shows that each works there, and counts the files that it touches.

    python scripts/places.py            all five
    python scripts/places.py rule loss  some of them

Run it with an environment that has all packages. docs/how-to/find-your-way.md walks through the changes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECK_SECONDS = 300.0


class PlaceError(Exception):
    """A change cannot be planted any more, or does not work; the text says where."""


@dataclass(frozen=True)
class Edit:
    """A text that comes into a file, behind the only place where another text stands; without one, a new file."""

    path: str
    text: str
    after: str = ""

    def plant(self, tree: Path) -> None:
        """Make it.

        Raises:
            PlaceError: The place is not there, or more than once.
        """
        path = tree / self.path
        if not self.after:
            path.write_text(self.text, encoding="utf-8")
            return
        before = path.read_text(encoding="utf-8") if path.is_file() else ""
        if (found := before.count(self.after)) != 1:
            raise PlaceError(f"{self.path} has {found} places that read {self.after!r}; one is needed")
        path.write_text(before.replace(self.after, self.after + self.text), encoding="utf-8")


@dataclass(frozen=True)
class Change:
    """Something to add.

    Attributes:
        what: For the report.
        edits: All that it takes, apart from tests, pages and the changelog.
        check: A program that uses what was added, and fails if it is not there.
    """

    what: str
    edits: tuple[Edit, ...]
    check: str

    @property
    def files(self) -> list[str]:
        """The files that it touches."""
        return sorted({edit.path for edit in self.edits})

    def try_in(self, tree: Path) -> None:
        """Plant it in a tree, and run its check there.

        Raises:
            PlaceError: It cannot be planted, or does not work.
        """
        for edit in self.edits:
            edit.plant(tree)
        sources = os.pathsep.join(str(path) for path in sorted(tree.glob("packages/*/src")))
        done = subprocess.run(
            [sys.executable, "-c", PARSE + self.check],
            cwd=tree, env={**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=CHECK_SECONDS,
        )  # fmt: skip
        if done.returncode != 0:
            raise PlaceError(f"{self.what} does not work in the copy:\n{done.stdout}{done.stderr}")


CONVERT, CORE, LAUNCH, MEGATRON, ROLLOUT = (
    f"packages/slime-{name}/src/slime_{name}" for name in ("convert", "core", "launch", "megatron", "rollout")
)
PARSE = """
from slime_launch.flags import read_anywhere

def parse(*words):
    settings, problems = read_anywhere(["--prompt-data", "rows.jsonl", "--num-rollout", "1", *words])
    assert not problems, problems
    return settings
"""
"""Begins the checks: reads flags as every command does."""

CHANGES = {
    "rule": Change(
        "a reward rule",
        (
            Edit(
                f"{ROLLOUT}/rewards/rules.py",
                """

def starts_with(response: str, label: str) -> float:
    \"\"\"1 if the response begins with the label.\"\"\"
    return float(response.lstrip().startswith(label))
""",
                after="    return float(response.strip() == label.strip())\n",
            ),
            Edit(
                f"{ROLLOUT}/rewards/rules.py",
                '    "starts_with": Rule(starts_with, instant=True),\n',
                after='    "exact": Rule(exact, instant=True),\n',
            ),
            Edit(f"{ROLLOUT}/reward_config.py", '"starts_with", ', after="\nCOMPARING_RULES = ("),
        ),
        """
from slime_rollout.rewards.rules import find_rule

words = ("--hf-checkpoint", "model", "--rollout-batch-size", "1", "--rm-type")
assert parse(*words, "starts_with").rollout.rewards.rule == "starts_with"
assert parse(*words, "boxed_starts_with")
assert find_rule("starts_with").score(" 42 it is", "42", {}) == 1.0
assert find_rule("boxed_starts_with").score("so \\\\boxed{7}", "42", {}) == 0.0
""",
    ),
    "loss": Change(
        "a built-in loss",
        (
            Edit(
                f"{CORE}/algorithms.py",
                """
    LossType(name="focal_loss", help="one that turns to what is not known yet", trains_on="conversations"),""",
                after="\n_LOSSES = (",
            ),
            Edit(
                f"{MEGATRON}/step/losses.py",
                """

def focal_loss(inputs: LossInputs) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    \"\"\"Cross-entropy of which a token counts the less, the likelier it is (Lin et al. 2017, equation 4, γ = 2).\"\"\"
    factor_N = (1 - inputs.log_probs_N.exp()) ** 2
    return -(factor_N * inputs.log_probs_N * inputs.weights_N).sum(), {}
""",
                after="    return sft_objective(inputs.log_probs_N, inputs.weights_N)\n",
            ),
            Edit(
                f"{MEGATRON}/step/losses.py",
                '    "focal_loss": focal_loss,\n',
                after='    "sft_loss": sft_loss,\n',
            ),
        ),
        """
import torch
from slime_megatron.step.losses import LossInputs, loss_of

algorithm = parse("--hf-checkpoint", "model", "--rollout-batch-size", "1", "--loss-type", "focal_loss").algorithm
assert algorithm.loss.on_data and not algorithm.loss.value_head
log_probs_N, weights_N = torch.tensor([0.5, 1.0]).log(), torch.tensor([0.5, 0.5])
loss, _ = loss_of(algorithm)(
    LossInputs(algorithm=algorithm, output_N=log_probs_N, weights_N=weights_N, lengths=(2,))
)
torch.testing.assert_close(loss, torch.tensor(2.0).log() * 0.125)
""",
    ),
    "estimator": Change(
        "an advantage estimator",
        (
            Edit(
                f"{CORE}/algorithms.py",
                """
    EstimatorType(name="by_root", estimate="by_root", baseline="group"),""",
                after='\n    EstimatorType(name="grpo", baseline="group", divides=True),',
            ),
            Edit(
                f"{CORE}/ops/advantages.py",
                """

def by_root(inputs: AdvantageInputs, /) -> Advantages:
    \"\"\"The reward at every token, over the root of the response's length.\"\"\"
    advantages_T, _ = outcome(inputs)
    advantages_T = advantages_T / inputs.lengths_N.sqrt().repeat_interleave(inputs.lengths_N)
    return Advantages(advantages_T, advantages_T)
""",
                after="    return Advantages(returns_T, returns_T)\n",
            ),
            Edit(
                f"{CORE}/ops/advantages.py",
                '"by_root": by_root, ',
                after="ESTIMATES: Mapping[str, Callable[..., Advantages]] = {",
            ),
        ),
        """
import torch
from slime_core.ops import policy_advantages

words = ("--hf-checkpoint", "model", "--rollout-batch-size", "1", "--n-samples-per-prompt", "4")
algorithm = parse(*words, "--rm-type", "exact", "--advantage-estimator", "by_root").algorithm
found, _ = policy_advantages(algorithm, rewards_N=torch.tensor([1.0, -1.0]), mask_T=torch.ones(5), lengths=[4, 1])
torch.testing.assert_close(found, torch.tensor([0.5, 0.5, 0.5, 0.5, -1.0]))
""",
    ),
    "transport": Change(
        "a way to send weights",
        (
            Edit(
                f"{ROLLOUT}/weights/pigeon.py",
                """\"\"\"Weights by pigeon.\"\"\"

from slime_core.interfaces import NamedTensors
from slime_rollout.weights.channel import EngineChannel


class PigeonWeightChannel(EngineChannel):
    \"\"\"Sends nothing, quickly.\"\"\"

    def _send(self, bucket: NamedTensors) -> int:
        return sum(tensor.nbytes for _, tensor in bucket)

    def close(self) -> None:
        \"\"\"Nothing is held.\"\"\"
""",
            ),
            Edit(
                f"{ROLLOUT}/engine/transports.py",
                """
    Transport(
        name="pigeon",
        channel="slime_rollout.weights.pigeon:PigeonWeightChannel",
        seconds=lambda route: 1e-6 * route.engines,
        limit=lambda config, route: "flies to nine engines at most" if route.engines > 9 else None,
    ),""",
                after="\nTRANSPORTS = (",
            ),
        ),
        """
import dataclasses
import torch
from slime_rollout.engine.channels import ChannelSpec
from slime_rollout.engine.transports import Route, chosen_of, refusal, ways_of

words = ("--hf-checkpoint", "model", "--rollout-batch-size", "1", "--rm-type", "exact")
settings = parse(*words, "--update-weight-transport", "pigeon")
route = Route(engines=2, within_node=True, cuda=False, shared=False)
assert chosen_of(ways_of(parse(*words).engine, route)).name == "pigeon"
assert "flies to nine engines at most" in refusal(settings.engine, dataclasses.replace(route, engines=10))
channel = ChannelSpec(("http://127.0.0.1:1",), sync=settings.engine).open()
assert type(channel).__name__ == "PigeonWeightChannel" and channel._send([("one", torch.ones(2))]) == 8
""",
    ),
    "family": Change(
        "a model family with a new field of the shape",
        (
            Edit(
                f"{CONVERT}/families/planted.py",
                """\"\"\"Llama's layers, with residuals of what the norms give.\"\"\"

from slime_convert.families.family import ATTENTION, MLP, Family

PLANTED = Family(
    model_type="planted",
    layer=(*ATTENTION, *MLP),
    fields=lambda config: {"apply_residual_connection_post_layernorm": config.switch("post_norm_residual")},
)
FAMILIES = (PLANTED,)
""",
            ),
            Edit(
                f"{CONVERT}/shape/model.py",
                """
    apply_residual_connection_post_layernorm: bool = shape_field("residuals of what the norms give", False)""",
                after='\n    post_self_attn_layernorm: bool = shape_field("RMSNorm on attention\'s output", False)',
            ),
            Edit(
                f"{MEGATRON}/settings/fits.py",
                '\n    "apply_residual_connection_post_layernorm",',
                after="\n_TRAINED = {",
            ),
        ),
        """
from slime_convert.mapping import WeightMap
from slime_convert.shape import ModelShape
from slime_megatron.settings.arguments import classes
from slime_megatron.settings.config import MegatronConfig
from slime_megatron.settings.fits import misfits
from slime_megatron.settings.megatron_values import transformer_values

field, flag = "apply_residual_connection_post_layernorm", "--apply-residual-connection-post-layernorm"
config = dict(model_type="planted", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
config |= dict(vocab_size=101, max_position_embeddings=256, post_norm_residual=True)
shape = ModelShape.from_hf_config(config)
assert len(list(WeightMap(shape).hf_names())) == 2 * 9 + 3
assert flag in shape.to_megatron_flags() and shape.to_megatron_args()[field] is True
assert classes(field) == ("shape",) and not list(misfits(MegatronConfig(), shape))
assert transformer_values(shape, MegatronConfig(), on_gpu=False)[field] is True
plain = ModelShape.from_hf_config(config | {"post_norm_residual": False})
assert flag not in plain.to_megatron_flags()
assert transformer_values(plain, MegatronConfig(), on_gpu=False)[field] is False
words = ("--hf-checkpoint", "model", "--rollout-batch-size", "1", "--rm-type", "exact")
assert parse(*words, flag)
""",
    ),
}


def main(argv: Sequence[str]) -> int:
    """Plant the changes and print a line for each; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="*", metavar="CHANGE", help=f"of {', '.join(CHANGES)}; all, if none is given")
    names = parser.parse_args(argv).changes or list(CHANGES)
    if unknown := set(names) - set(CHANGES):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(CHANGES)}")
    failed = 0
    for name in names:
        change = CHANGES[name]
        with tempfile.TemporaryDirectory(prefix="places-") as directory:
            ignored = shutil.ignore_patterns("__pycache__", "tests", "recipes")
            shutil.copytree(ROOT / "packages", Path(directory, "packages"), ignore=ignored)
            try:
                change.try_in(Path(directory))
            except PlaceError as error:
                print(error, file=sys.stderr)
                failed += 1
                continue
        print(f"{change.what}: {len(change.files)} files: {', '.join(change.files)}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
