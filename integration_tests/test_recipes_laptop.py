"""Every laptop.toml of examples/ is run for two steps, on a tiny random model, and shows what its recipe is about."""

from __future__ import annotations

import json
import math
import shutil
import threading
import tomllib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from kinds import make_chat_model
from launching import LAUNCHER, Assets, rows, run
from tiny import make_model

from slime_core.types import RolloutBatch
from slime_rollout.store import RolloutStore

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
RECIPES = sorted(path.parent.name for path in EXAMPLES.glob("*/laptop.toml"))
LONGEST = 16  # tokens of a response
CONTEXT = 4096
LONGEST_SECONDS = 1500  # of a run, on a machine with much else to do
STEPS = {"fully-async": 6, "off-policy-correction": 6}
FEWER = {"dapo": ["--rollout-batch-size", "2", "--over-sampling-batch-size", "4", "--micro-batch-size", "8"]}
"""A random model seldom says the right digit: most groups are dropped."""


@pytest.fixture(scope="session")
def chat(llama: Assets, tmp_path_factory: pytest.TempPathFactory) -> Assets:
    """The tiny Llama with a chat template and room for prompts of a token a character."""
    hf = Path(shutil.copytree(llama.hf, tmp_path_factory.mktemp("recipes") / "hf"))
    assets = Assets(hf, hf, llama.prompts, llama.engine_python)
    make_chat_model(assets)
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return assets


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which the paths of a recipe lead to this repository, and those of the quick start to stand-ins."""
    place = tmp_path / "clone"
    data = place / "outputs" / "quickstart" / "seed-1" / "data"
    data.mkdir(parents=True)
    for name in ("train", "heldout"):
        sums = [{"prompt": f"{a} + {b} =", "label": str(a + b)} for a in range(1, 9) for b in range(0, 10 - a)]
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    (place / "examples").symlink_to(EXAMPLES)
    monkeypatch.chdir(place)
    return tmp_path


@pytest.fixture(scope="module", autouse=True)
def search_server() -> Iterator[None]:
    """What the search server of search-r1 answers, whatever it is asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            hit = {"document": {"id": "nile", "contents": '"Nile"\nA river.'}, "score": 1.0}
            body = json.dumps({"result": [[hit]]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEARCH_R1_URL", f"http://127.0.0.1:{server.server_address[1]}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


def command_of(name: str, assets: Assets, work: Path) -> list[str]:
    """The recipe's command, with a tiny model and few steps in place of its own."""
    given = tomllib.loads((EXAMPLES / name / "laptop.toml").read_text())
    words = {
        "--config": f"examples/{name}/laptop.toml",
        "--hf-checkpoint": str(assets.hf),
        "--load": str(assets.torch_dist),
        "--output-dir": str(work / "out"),
        "--save": str(work / "save"),
        "--num-rollout": str(STEPS.get(name, 2)),
        "--lr": "1e-3",
    }
    if "sglang-python" in given:
        words |= {"--sglang-python": assets.engine_python, "--sglang-context-length": str(CONTEXT)}
        words |= {"--sglang-max-running-requests": "64", "--sglang-max-total-tokens": "16384"}
        words |= {"--rollout-max-response-len": str(min(LONGEST, given["rollout-max-response-len"]))}
    if "rm-type" in given:  # a random model solves nothing, and equal rewards teach nothing
        words["--rm-type"] = "random"
    if "opd-teacher-load" in given:
        words["--opd-teacher-load"] = str(make_model("llama", work / "teacher", seed=1))
    if "num-epoch" in given:
        words.pop("--num-rollout")
    kept = ["--keep-rollouts"] if "sglang-python" in given else []
    command = "train-async" if "async-buffer-size" in given else "train"
    return [str(LAUNCHER), command, *(word for flag in words.items() for word in flag), *FEWER.get(name, []), *kept]


def batches(work: Path) -> list[RolloutBatch]:
    """The rollouts that a run has written down."""
    store = RolloutStore(work / "save" / "rollouts")
    return [store.read(row["rollout_id"]).batch() for row in rows(work, "rollout")]


def distillation(work: Path) -> None:
    steps = rows(work, "train")
    assert all(row["train/opd_reverse_kl"] > 0 for row in steps) and "eval/heldout" in rows(work, "eval")[0]
    assert {row["rollout/raw_reward"] for row in rows(work, "rollout")} == {0.0}


def ppo(work: Path) -> None:
    first, *others = rows(work, "train")
    assert "train/loss" not in first and all("train/loss" in row for row in others)
    assert all(row["train/critic-value_loss"] > 0 for row in (first, *others))


def dpo(work: Path) -> None:
    first, *_, last = rows(work, "eval")
    assert first["eval/held/loss"] == pytest.approx(math.log(2), abs=1e-2) and last["eval/held/accuracy"] == 1


def dapo(work: Path) -> None:
    """Groups without a right answer are dropped; what is kept has right and wrong ones, less the penalty for length."""
    dropped = sum(row.get("rollout/dynamic_filter/drop_all_wrong", 0) for row in rows(work, "rollout"))
    print(f"{dropped} groups were dropped")
    assert dropped > 0
    for batch in batches(work):
        for group in batch.groups:
            scores = [sample.scalar_reward("score") for sample in group]
            assert max(scores) >= 0 and min(scores) <= -1
            assert {sample.scalar_reward("acc") for sample in group} == {0.0, 1.0}


def fully_async(work: Path) -> None:
    ages = [row["rollout/staleness/max"] for row in rows(work, "rollout")]
    assert ages[0] == 0 < max(ages) <= 2
    assert all("train/tis" in row for row in rows(work, "train"))


def off_policy(work: Path) -> None:
    steps = rows(work, "train")
    assert all(row["train/mis_ratio"] > 0 and "train/mismatch_kl" in row for row in steps)
    assert max(row["train/mis_rejected_fraction"] for row in steps) > 0


def multi_agent(work: Path) -> None:
    for batch in batches(work):
        assert len(batch.samples) == 3 * 16
        agents: dict[int, list[str]] = {}
        for sample in batch.samples:
            agents.setdefault(sample.trajectory, []).append(sample.metadata["agent"])
        assert list(agents.values()) == [["solver", "solver", "critic"]] * 16
        first = [sample.response for sample in batch.samples[:2]]
        assert first[0] != first[1]  # each solver has a seed of its own


def judge(work: Path) -> None:
    samples = [sample for batch in batches(work) for sample in batch.samples]
    graded = [sample.scalar_reward(None) for sample in samples if sample.metadata["judge"]]
    print(f"{len(graded)} replies of {len(samples)}, mean grade {sum(graded) / len(graded):.2f}")
    assert len(graded) > 0 and all("reward_failure" not in sample.metadata for sample in samples)
    assert (work / "out" / "logs" / "judge" / "router.log").exists()


def several_sets(work: Path) -> None:
    for row in rows(work, "eval"):
        assert {"eval/sums", "eval/capitals", "eval/capitals-pass@4"} <= row.keys() and "eval/sums-pass@4" not in row


def tools(work: Path) -> None:
    samples = [sample for batch in batches(work) for sample in batch.samples]
    assert all(sample.metadata["turns"] >= 1 for sample in samples)


CHECKS: dict[str, Callable[[Path], None]] = {
    "dapo": dapo,
    "dpo": dpo,
    "fully-async": fully_async,
    "judge-reward": judge,
    "multi-agent": multi_agent,
    "multi-set-eval": several_sets,
    "off-policy-correction": off_policy,
    "on-policy-distillation": distillation,
    "ppo": ppo,
    "retool": tools,
    "search-r1": tools,
}


@pytest.mark.real
@pytest.mark.full
@pytest.mark.timeout(LONGEST_SECONDS + 60)
@pytest.mark.parametrize("name", RECIPES)
def test_it_runs_scaled_down(chat: Assets, clone: Path, name: str) -> None:
    run(command_of(name, chat, clone), clone / "log.txt", seconds=LONGEST_SECONDS)
    steps = rows(clone, "train")
    assert steps and all(math.isfinite(row["train/grad_norm"]) for row in steps if "train/grad_norm" in row)
    CHECKS.get(name, lambda work: None)(clone)
