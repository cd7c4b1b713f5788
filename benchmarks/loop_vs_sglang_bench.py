"""Tokens a second of our rollout loop against SGLang's own bench client, before the same server, alternating.

One SGLang server with a random Qwen3 of two layers in fp32, which leaves more of the time to the clients than any
model that is trained. Both sides send the same number of requests with random prompts of equal length, as many at once,
and every response has the full length, for there is no token that ends one. Ours is `RolloutManager.generate`: through
sglang-router, with seeds, log-probs, rewards and metrics, from taking the prompts to the finished batch. The bench
client (`sglang.benchmark.serving`) sends straight to the server: `same` asks for log-probs and whole replies as ours
does, `default` streams without log-probs. Its rate is output tokens over its own measured time, without start and
warm-up. Medians.
"""

from __future__ import annotations

import json
import random
import subprocess
import time
from pathlib import Path
from statistics import median

from _extra_packages import extra_packages
from _records import Record
from quickstart import ENGINE_PYTHON, ROOT

from slime_rollout.config import RolloutConfig
from slime_rollout.data import PromptDataset, PromptRow, RolloutDataSource, TokenizedPrompt
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.fleet import EngineFleet
from slime_rollout.engine.server import EngineSpec, server_environment
from slime_rollout.rollout import RolloutData, RolloutManager

GOAL = 0.95
REQUESTS, CONCURRENT, PROMPT_TOKENS, TOKENS, VOCABULARY = 128, 32, 64, 200, 512
SIDES = {"same": ["--disable-stream", "--return-logprob"], "default": []}
LIMIT_SECONDS = 900.0
# `python -m sglang.benchmark.serving` with a directory at the end of the module search path.
BENCH = (
    "import runpy, sys; sys.path.append(sys.argv.pop(1)); "
    "runpy.run_module('sglang.benchmark.serving', run_name='__main__', alter_sys=True)"
)


def main(out: Path, *, quick: bool) -> list[Record]:
    """Measure all sides in turn on one server.

    Args:
        out: Directory for the model and logs.
        quick: One round of a quarter of the requests instead of five rounds, and shorter responses.
    """
    rounds, requests, tokens = (1, REQUESTS // 4, TOKENS // 5) if quick else (5, REQUESTS, TOKENS)
    model = out / "model"
    write_model(model)
    config = EngineConfig(sglang_python=str(ENGINE_PYTHON), engine_threads=1)
    rates: dict[str, list[float]] = {"ours": [], **{name: [] for name in SIDES}}
    with EngineFleet.start(
        config, model_path=str(model), num_engines=1, dtype="float32", context_length=None, seed=1, log_dir=out / "logs"
    ) as fleet:
        manager = make_manager(fleet.router_url, requests, tokens, rounds + 1)
        ours(manager, rounds)  # opens, compiles and caches what only the first requests wait for
        for number in range(rounds):
            rates["ours"].append(ours(manager, number))
            for name, flags in SIDES.items():
                rates[name].append(bench(config, model, fleet.engine_urls[0], requests, tokens, number, flags, out))
            print(f"round {number}: " + ", ".join(f"{name} {rate[-1]:.0f}" for name, rate in rates.items()), flush=True)
    return summarize({name: median(rate) for name, rate in rates.items()})


def ours(manager: RolloutManager, number: int) -> float:
    """Response tokens a second of one rollout."""
    start = time.perf_counter()
    batch = manager.generate(number)
    seconds = time.perf_counter() - start
    return sum(sample.response_length for sample in batch.samples) / seconds


def bench(
    config: EngineConfig, model: Path, url: str, requests: int, tokens: int, number: int, flags: list[str], out: Path
) -> float:
    """Output tokens a second that SGLang's bench client reports."""
    result, log = out / "bench.jsonl", out / "bench.log"
    result.unlink(missing_ok=True)
    settings = {
        "--backend": "sglang",
        "--base-url": url,
        "--dataset-name": "random-ids",
        "--model": str(model),
        "--tokenizer": str(model),
        "--num-prompts": str(requests),
        "--random-input-len": str(PROMPT_TOKENS),
        "--random-output-len": str(tokens),
        "--random-range-ratio": "1.0",
        "--max-concurrency": str(CONCURRENT),
        "--temperature": "1.0",
        "--seed": str(1000 + number),
        "--output-file": str(result),
    }
    command = [str(ENGINE_PYTHON), "-c", BENCH, str(extra_packages("sglang-bench"))]
    command += ["--tokenize-prompt", "--disable-tqdm", *flags, *(word for pair in settings.items() for word in pair)]
    environment = server_environment(config, EngineSpec(model_path=str(model), port=1))
    with log.open("wb") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, timeout=LIMIT_SECONDS, cwd=ROOT
        )
    if done.returncode != 0 or not result.exists():
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"SGLang's bench client ended with exit code {done.returncode}:\n{tail}")
    report = json.loads(result.read_text().splitlines()[-1])
    if report["completed"] != requests or report["total_output_tokens"] != requests * tokens:
        raise RuntimeError(f"SGLang's bench client finished {report['completed']} of {requests} requests; see {log}")
    return requests * tokens / float(report["duration"])


def make_manager(url: str, requests: int, tokens: int, rollouts: int) -> RolloutManager:
    """A manager of random prompts, none of which comes twice."""
    numbers = random.Random(0)
    dataset = PromptDataset(
        [
            TokenizedPrompt(
                row=PromptRow(where="", prompt=str(place), label="1"),
                tokens=[numbers.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)],
            )
            for place in range(requests * rollouts)
        ]
    )
    config = RolloutConfig.of(
        hf_checkpoint="none",
        prompt_data="none",
        rollout_batch_size=requests,
        rollout_max_response_len=tokens,
        rollout_concurrency=CONCURRENT,
        rm_type="exact",
    )
    data = RolloutData(RolloutDataSource(dataset, samples_per_prompt=1), [], None)
    return RolloutManager(config, router_url=url, run_seed=1, data=data)


def write_model(directory: Path) -> None:
    """A random Qwen3 of two layers, and a tokenizer of as many words without one that ends a text."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=VOCABULARY, **sizes, **heads, eos_token_id=None, bos_token_id=None, max_position_embeddings=1024
    )
    Qwen3ForCausalLM(shape).save_pretrained(directory)


def summarize(rates: dict[str, float]) -> list[Record]:
    """Rates, and ours over the others."""
    records = [Record(name, "rate", rate, "tokens/s", more_is_better=True) for name, rate in rates.items()]
    for name in SIDES:
        goal = GOAL if name == "same" else None
        records.append(Record(f"ours / {name}", "rate", rates["ours"] / rates[name], "x", True, goal))
    return records
