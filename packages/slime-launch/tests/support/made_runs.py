"""Made-up data of a report, in the form that ``page`` takes: curves, lanes, samples of several turns, settings."""

from __future__ import annotations

from typing import Any

import numpy as np

TABS = ("overview", "curves", "time", "samples", "data", "settings")
BEGAN = 1_790_000_000.0
SENTENCES = (
    "We multiply the tens first and then the ones.",
    "Wait, that is not right: the remainder was left out.",
    "So the product of both numbers is the sum of these parts.",
    "Let me check this by dividing again.",
    "Each step adds one more digit to the total.",
    "Therefore the two ways give the same number.",
    "First write the smaller factor as tens plus ones.",
    "The last digit has to be even, which it is.",
    "Now add what was carried.",
    "Finally, put the parts together.",
)
CLASSES = ("generate", "score", "train", "send", "save", "evaluate", "wait")
ONE_SAMPLE = {"dropped": None, "failure": None, "label": "42", "rewards": None, "cut": None, "mask": None}


def make_data(*runs: dict[str, Any], live: bool = False) -> dict[str, Any]:
    """The data of a page of these runs."""
    return {"slime": "0.1.0", "made": BEGAN + 9000.0, "live": live, "runs": list(runs)}


def make_run(
    name: str = "first-run", *, seed: int = 0, rollouts: int = 30, samples: int = 60, length: int = 60
) -> dict[str, Any]:
    """A run whose reward rises; ``length`` is about how many tokens a response has."""
    rng = np.random.default_rng(seed)
    evaluated = range(0, rollouts + 1, max(1, rollouts // 5))
    curves, charts = make_curves(rng, rollouts)
    lanes, lost = make_lanes(rng, rollouts)
    seconds = max(start + long for lane in lanes for start, long, *_ in lane["spans"])
    reward = curves["rollout"]["series"]["rollout/raw_reward"]
    generated = rollouts * 512
    return {
        "name": name,
        "directory": f"runs/{name}",
        "state": "finished",
        "command": "slime-launch train \\\n  --hf-checkpoint Qwen3-4B \\\n  --prompt-data dapo-math-17k.jsonl",
        "began": BEGAN,
        "ended": BEGAN + seconds,
        "headline": [
            ["steps", f"{rollouts} of {rollouts}"],
            ["optimizer steps", str(rollouts)],
            ["time", f"{seconds / 60:.1f} min"],
            ["mean reward", f"{reward[0]:.3f} → {reward[-1]:.3f}"],
            ["held-out score", "0.289 → 0.734"],
            ["tokens per second", "21 480"],
        ],
        "curves": curves,
        "titles": {
            "rollout/raw_reward": "mean reward of the samples of a rollout",
            "train/kl": "KL divergence from the reference model",
        },
        "charts": charts,
        "evals": [make_eval(which, int(at), at / rollouts, rng) for which in ("aime", "heldout") for at in evaluated],
        "timeline": {"kinds": list(CLASSES), "lanes": lanes, "lost": lost},
        "ledger": {
            "generated": generated, "trained": generated - 960, "filtered": 640, "aborted": 192, "waiting": 128,
            "stale": 77, "balances": True, "dropped": {"zero_std": 512, "too_long": 128},
        },
        "staleness": {"versions": [0, 1, 2, 3], "tokens": [9_000_000, 4_100_000, 610_000, 12_000]},
        "samples": make_samples(rng, rollouts, samples, length),
        "samples_total": generated,
        "settings": make_settings(seed),
        "events": [
            [BEGAN + 312.0, "engine 1", "died: exit code 137"],
            [BEGAN + 318.5, "engine 1", "started again with the weights of version 7"],
        ],
    }  # fmt: skip


def make_curves(rng: np.random.Generator, rollouts: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Series by kind, and the charts shown first."""
    x = np.arange(rollouts)
    rise = 1 - np.exp(-3 * x / max(1, rollouts))

    def noisy(values: Any, size: float) -> list[float]:
        return np.round(values + rng.normal(0, size, rollouts), 5).tolist()

    rollout = {
        "rollout/raw_reward": noisy(0.25 + 0.5 * rise, 0.03),
        "rollout/response_len/mean": noisy(300 + 500 * rise, 30),
        "rollout/response_len/max": noisy(2000 + 900 * rise, 90),
        "perf/tokens_per_second": noisy(21000 - 3000 * rise, 900),
        "perf/step_time": noisy(30 + 9 * rise, 2),
        "perf/idle_share/trainers": noisy(0.35 - 0.1 * rise, 0.03),
        "perf/idle_share/engines": noisy(0.2 - 0.1 * rise, 0.02),
    }
    train = {
        "train/loss": noisy(-0.02 * rise, 0.02),
        "train/kl": noisy(0.06 * rise, 0.004),
        "train/entropy": noisy(0.9 - 0.5 * rise, 0.02),
        "train/log_prob_drift": noisy(0.01 + 0.004 * rise, 0.001),
        **{f"train/other_{number}": noisy(rise, 0.1) for number in range(12)},
    }
    lengths = [f"rollout/response_len/{end}" for end in ("mean", "max")]
    shares = [f"perf/idle_share/{who}" for who in ("trainers", "engines")]
    charts = [
        {"title": "Reward", "kind": "rollout", "names": ["rollout/raw_reward"], "unit": ""},
        {"title": "KL divergence", "kind": "train", "names": ["train/kl"], "unit": "nats"},
        {"title": "Response length", "kind": "rollout", "names": lengths, "unit": "tokens"},
        {"title": "Throughput", "kind": "rollout", "names": ["perf/tokens_per_second"], "unit": "tokens/s"},
        {"title": "Entropy", "kind": "train", "names": ["train/entropy"], "unit": "nats"},
        {"title": "Drift of log-probs", "kind": "train", "names": ["train/log_prob_drift"], "unit": ""},
        {"title": "Idle share", "kind": "rollout", "names": shares, "unit": ""},
    ]
    series = {"rollout": rollout, "train": train}
    return {kind: {"x": (x + 1).tolist(), "series": each} for kind, each in series.items()}, charts


def make_eval(which: str, rollouts: int, progress: float, rng: np.random.Generator) -> dict[str, Any]:
    """One evaluation with its interval."""
    score = 0.28 + 0.4 * progress + float(rng.normal(0, 0.02))
    width = 0.12 if which == "aime" else 0.05
    return {
        "set": which, "rollouts": rollouts, "score": score, "low": score - width, "high": score + width,
        "samples": 128, "metrics": {"pass@1": score, "truncated": 0.03},
    }  # fmt: skip


def make_lanes(
    rng: np.random.Generator, rollouts: int, engines: int = 4, ranks: int = 4
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Who was busy when, in step: engines generate, ranks train, weights are sent."""
    who = ["loop", *(f"engine {number}" for number in range(engines)), *(f"rank {number}" for number in range(ranks))]
    spans: dict[str, list[list[float]]] = {name: [] for name in who}
    at = 0.0
    for rollout in range(1, rollouts + 1):
        long = 12 + 6 * rng.random(engines)
        for engine in range(engines):
            spans[f"engine {engine}"].append([at, long[engine], 0, rollout])
            spans[f"engine {engine}"].append([at + long[engine], max(long) - long[engine], 6, rollout])
        spans["loop"] += [[at, max(long), 0, rollout], [at + max(long), 1.5, 1, rollout]]
        for rank in range(ranks):
            train = 9 + rng.random()
            spans[f"rank {rank}"] += [[at, max(long) + 1.5, 6, rollout], [at + max(long) + 1.5, train, 2, rollout]]
        at += max(long) + 11.5
        for name in who:
            spans[name].append([at, 1.2, 3, rollout])
        at += 1.2
        if rollout % 10 == 0:
            spans["loop"].append([at, 4.0, 4, rollout])
            spans["loop"].append([at + 4, 8.0, 5, None])
            at += 12
    rounded = [
        {"who": name, "spans": [[round(start, 2), round(long, 2), what, of] for start, long, what, of in each]}
        for name, each in spans.items()
    ]
    lost = [
        {"what": "trainers wait for generation", "seconds": 0.51 * at, "share": 0.51},
        {"what": "engines wait for training", "seconds": 0.37 * at, "share": 0.37},
        {"what": "sending weights", "seconds": 0.04 * at, "share": 0.04},
    ]
    return rounded, lost


def make_samples(rng: np.random.Generator, rollouts: int, count: int, length: int) -> list[dict[str, Any]]:
    """Groups of four; every third group has trajectories of three turns, whose prompts are messages."""
    return [make_sample(rng, number, rollouts * (number // 4) // max(1, count // 4), length) for number in range(count)]


def make_sample(rng: np.random.Generator, number: int, rollout: int, length: int) -> dict[str, Any]:
    """One sample; its words are drawn, so every response differs."""
    group, tokens = number // 4, max(6, int(rng.gamma(3.0, length / 3)))
    turns = group % 3 == 2
    third = tokens // 3
    inserted = [turns and third <= at < third + 4 for at in range(tokens)]
    texts = response_texts(rng, tokens)
    if turns:
        texts[third : third + 4] = ["\n[calculator:", f" {number * (rollout + 3)}", "]", "\n"]
    log_probs = np.round(-rng.exponential(0.4, tokens), 3)
    reward = float(rng.random() < 0.3 + 0.5 * rollout / 30)
    question = f"What is {number} times {rollout + 3}? Explain each step."
    messages = [{"role": "system", "content": "Use the calculator."}, {"role": "user", "content": question}]
    return {
        **ONE_SAMPLE,
        "rollout": rollout,
        "index": number,
        "group": group,
        "trajectory": number // 2 * 2 if turns else number,
        "prompt": messages if turns else question,
        "label": str(number * (rollout + 3)),
        "reward": None if number % 29 == 28 else reward,
        "rewards": {"accuracy": reward, "format": 1.0},
        "status": "truncated" if number % 7 == 6 else "completed",
        "dropped": "zero_std" if group % 5 == 4 else None,
        "failure": "the judge did not answer" if number % 29 == 28 else None,
        "length": tokens + (500 if number % 11 == 10 else 0),
        "cut": {"at": tokens // 2, "left_out": 500} if number % 11 == 10 else None,
        "tokens": texts,
        "mask": [int(not one) for one in inserted] if turns else None,
        "versions": [-1 if one else max(0, rollout - int(at > tokens // 2)) for at, one in enumerate(inserted)],
        "log_probs": [None if one else value for one, value in zip(inserted, log_probs.tolist(), strict=True)],
        "train_log_probs": np.round(log_probs + rng.normal(0, 0.02, tokens), 3).tolist(),
        "advantages": np.round(rng.normal(0, 0.3, tokens) + 0.4 * (reward - 0.5), 3).tolist(),
        "metadata": {"source": "made up", "difficulty": number % 5},
    }  # fmt: skip


def response_texts(rng: np.random.Generator, count: int) -> list[str]:
    """Words of sentences, as many as asked for; some sentences end a line."""
    texts: list[str] = []
    while len(texts) < count:
        texts += [f" {word}" for word in SENTENCES[rng.integers(len(SENTENCES))].split()]
        texts[-1] += "\n" * int(rng.random() < 0.3)
    return texts[:count]


def make_settings(seed: int) -> list[list[str]]:
    """Some settings with their origins; the learning rate and the seed differ between seeds."""
    own = [
        ["rollout_batch_size", "32", "command line"],
        ["n_samples_per_prompt", "8", "command line"],
        ["lr", ["1e-6", "3e-6"][seed % 2], "run.toml"],
        ["seed", str(1234 + seed), "command line"],
        ["global_batch_size", "256", "derived"],
        ["custom_rm_path", "tasks.sums.reward", "recipe"],
    ]
    return own + [[f"some_setting_{number}", str(number), "default"] for number in range(60)]
