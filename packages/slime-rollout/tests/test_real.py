"""Against a real SGLang server behind a real router: what the scripted server of the other tests cannot show."""

import json
import math
import os
import urllib.request
from pathlib import Path

import pytest

from slime_core.types import Status
from slime_rollout.config import RolloutConfig
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.fleet import EngineFleet
from slime_rollout.errors import GenerationError
from slime_rollout.rollout import RolloutManager

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

ENGINE_PYTHON = Path(os.environ.get("SLIME_ENGINE_PYTHON", Path(__file__).parents[3] / ".venv-engine/bin/python"))
ROWS = [{"prompt": f"12 + 30 = 42, {10 + number} + 9 =", "label": str(19 + number)} for number in range(12)]


@pytest.fixture(scope="module")
def model(tokenizer_dir, tmp_path_factory):
    """A tiny random Qwen3 in fp32 with the tests' tokenizer."""
    torch = pytest.importorskip("torch")
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    directory = tmp_path_factory.mktemp("model")
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(directory)
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        eos_token_id=0,
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.no_grad():
        network = Qwen3ForCausalLM(shape)
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
    network.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def fleet(model, tmp_path_factory):
    if not ENGINE_PYTHON.exists():
        pytest.skip(f"no engine interpreter at {ENGINE_PYTHON}; set SLIME_ENGINE_PYTHON")
    config = EngineConfig(engine_python=str(ENGINE_PYTHON), engine_threads=1)
    logs = tmp_path_factory.mktemp("logs")
    with EngineFleet.start(
        config, model_path=model, num_engines=1, dtype="float32", context_length=256, seed=0, log_dir=logs
    ) as running:
        yield running


@pytest.fixture
def manager(model, fleet, write_rows):
    path = write_rows(ROWS)

    def build(*, run_seed=1, **changes):
        config = {
            "hf_checkpoint": model,
            "prompt_data": path,
            "rollout_batch_size": 8,
            "n_samples_per_prompt": 8,
            "rollout_max_response_len": 12,
            "rm_type": "first_integer",
            **changes,
        }
        return RolloutManager(RolloutConfig(**config), router_url=fleet.router_url, run_seed=run_seed)

    return build


def tokens_of(samples):
    return {sample.index: sample.tokens for sample in samples}


def test_a_rollout_carries_all_that_training_needs(manager):
    batch = manager().generate(0)
    assert len(batch.samples) == 64
    for group in batch.groups:
        assert len({tuple(sample.prompt_tokens) for sample in group}) == 1
        assert len({tuple(sample.response_tokens) for sample in group}) > 1
    for sample in batch.samples:
        assert 1 <= sample.response_length <= 12
        ended = sample.response_tokens[-1] == 0
        assert sample.status is (Status.COMPLETED if ended else Status.TRUNCATED)
        assert ended or sample.response_length == 12
        assert all(math.isfinite(value) and value < 0 for value in sample.rollout_log_probs)
        assert set(sample.weight_versions) == {0}
        assert sample.reward in (0.0, 1.0)


def test_log_probs_are_the_models(manager, model):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    worst = 0.0
    for sample in manager(rollout_temperature=0.7).generate(0).samples:
        with torch.no_grad():
            logits_TV = network(torch.tensor([sample.tokens])).logits[0, :-1].double() / 0.7
        expected_T = logits_TV.log_softmax(-1).gather(1, torch.tensor(sample.tokens[1:])[:, None])[:, 0]
        given_R = torch.tensor(sample.rollout_log_probs, dtype=torch.float64)
        worst = max(worst, (expected_T[-sample.response_length :] - given_R).abs().max().item())
    print(f"largest difference of log-probs between SGLang and transformers: {worst:.1e}")
    assert worst < 1e-4


def test_a_samples_tokens_depend_on_its_seed_alone(manager):
    together = manager().generate(0).samples
    one_at_a_time = manager(rollout_concurrency=1).generate(0).samples
    assert tokens_of(one_at_a_time) == tokens_of(together)
    small = manager(rollout_batch_size=2)
    in_parts = [sample for number in range(4) for sample in small.generate(number).samples]
    assert tokens_of(in_parts) == tokens_of(together)
    other = manager(run_seed=2).generate(0).samples
    assert sum(tokens_of(other)[index] == tokens for index, tokens in tokens_of(together).items()) < 8


def test_greedy_evaluation_repeats_and_does_not_sample(manager, write_rows):
    held_out = write_rows(ROWS, "held_out.jsonl")
    given = manager(eval_prompt_data=("sums", held_out), eval_temperature=0.0, n_samples_per_eval_prompt=2)
    first, second = given.evaluate(0), given.evaluate(1)
    assert tokens_of(first.samples["sums"]) == tokens_of(second.samples["sums"])
    assert first.pass_rates == second.pass_rates
    pairs = zip(first.samples["sums"][::2], first.samples["sums"][1::2], strict=True)
    assert all(left.tokens == right.tokens for left, right in pairs)


def test_stop_strings_and_tokens(manager):
    free = manager().generate(0).samples
    stop_token = max((token for sample in free for token in sample.response_tokens), key=str)
    stopped = manager(rollout_stop_token_ids=(stop_token,)).generate(0).samples
    for before, after in zip(free, stopped, strict=True):
        response = before.response_tokens
        cut = response.index(stop_token) + 1 if stop_token in response else len(response)
        assert after.response_tokens == response[:cut]
    letter = next(letter for sample in free for letter in sample.response if letter.isascii() and letter.isalnum())
    for before, after in zip(free, manager(rollout_stop=(letter,)).generate(0).samples, strict=True):
        if letter in before.response:
            assert letter not in after.response
            assert after.status is Status.COMPLETED
            assert after.response_tokens == before.response_tokens[: after.response_length]


def test_a_new_weight_version_is_on_every_token(manager, fleet):
    (url,) = fleet.engine_urls
    try:
        _post(f"{url}/update_weight_version", {"new_version": "7"})
        assert {version for sample in manager().generate(0).samples for version in sample.weight_versions} == {7}
    finally:
        _post(f"{url}/update_weight_version", {"new_version": "0"})


def test_a_prompt_that_does_not_fit_is_refused_with_the_engines_words(manager):
    with pytest.raises(GenerationError, match=r"HTTP 400.*maximum context length of 256 tokens"):
        manager(rollout_max_response_len=250).generate(0)


def _post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read()
