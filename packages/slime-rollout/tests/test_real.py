"""Against a real SGLang server behind a real router: what the scripted server of the other tests cannot show."""

import copy
import dataclasses
import json
import math
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime_core.types import Status, WeightUpdate
from slime_rollout.config import RolloutConfig
from slime_rollout.engine.channels import ChannelSpec
from slime_rollout.engine.fleet import EngineFleet
from slime_rollout.engine.server import EngineSpec, equal_specs
from slime_rollout.errors import GenerationError
from slime_rollout.generate import SamplingParams
from slime_rollout.rollout import RolloutManager
from slime_rollout.weights import TensorWeightChannel

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

RETOOL = Path(__file__).parents[3] / "examples" / "retool"
ROWS = [{"prompt": f"12 + 30 = 42, {10 + number} + 9 =", "label": str(19 + number)} for number in range(12)]


# What a user may have told the engines; a rollout's own distribution wins.
PREFERENCES = json.dumps({"repetition_penalty": 1.5, "frequency_penalty": 1.0, "min_p": 0.1, "min_new_tokens": 3})


@pytest.fixture(scope="module")
def fleet(tiny_model, engine_config, tmp_path_factory):
    config = dataclasses.replace(engine_config, sglang_args={"preferred-sampling-params": PREFERENCES})
    logs = tmp_path_factory.mktemp("logs")
    with EngineFleet.start(
        config, model_path=tiny_model, num_engines=1, dtype="float32", context_length=256, seed=0, log_dir=logs
    ) as running:
        yield running


@pytest.fixture(scope="module")
def unseeded_fleet(tiny_model, engine_config, tmp_path_factory):
    """For min-p, at which an engine with seeds ends."""
    spec = EngineSpec(model_path=str(tiny_model), dtype="float32", context_length=256, seeded=False)
    logs = tmp_path_factory.mktemp("unseeded")
    with EngineFleet.launch(engine_config, equal_specs(spec, 2, engine_config), log_dir=logs) as running:
        yield running


@pytest.fixture(scope="module")
def network(tiny_model):
    """The same model in transformers."""
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@torch.no_grad()
def log_probs(network, sample, temperature=1.0):
    """Log-probs of every token of the vocabulary at each place of the response ``[R, V]``, in float64."""
    logits_TV = network(torch.tensor([sample.tokens])).logits[0, :-1].double() / temperature
    return logits_TV.log_softmax(-1)[-sample.response_length :]


@pytest.fixture
def manager(tiny_model, fleet, write_rows):
    path = write_rows(ROWS)

    def build(*, run_seed=1, router_url=fleet.router_url, **changes):
        config = {
            "hf_checkpoint": tiny_model,
            "prompt_data": path,
            "rollout_batch_size": 8,
            "n_samples_per_prompt": 8,
            "rollout_max_response_len": 12,
            "rm_type": "first_integer",
            **changes,
        }
        return RolloutManager(RolloutConfig.of(**config), router_url=router_url, run_seed=run_seed)

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


def test_log_probs_are_the_models(manager, network):
    worst = 0.0
    for sample in manager(rollout_temperature=0.7).generate(0).samples:
        logp_RV = log_probs(network, sample, 0.7)
        expected_R = logp_RV.gather(1, torch.tensor(sample.response_tokens)[:, None])[:, 0]
        given_R = torch.tensor(sample.rollout_log_probs, dtype=torch.float64)
        worst = max(worst, (expected_R - given_R).abs().max().item())
    print(f"largest difference of log-probs between SGLang and transformers: {worst:.1e}")
    assert worst < 1e-4


def test_tokens_are_drawn_from_the_plain_distribution(manager, network):
    """Neither what the model's generation_config.json nor what the engine was told to prefer takes part.

    Under the distribution a token's surprisal has the entropy as its mean. The differences, summed over all tokens and
    divided by the standard deviation of the sum, are a standard normal number: within 4.
    """
    excess = variance = tokens = 0.0
    for sample in manager(rollout_batch_size=12, n_samples_per_prompt=16).generate(0).samples:
        logp_RV = log_probs(network, sample)
        entropy_R = -(logp_RV.exp() * logp_RV).sum(-1)
        variance += ((logp_RV.exp() * logp_RV.square()).sum(-1) - entropy_R.square()).sum().item()
        surprisal_R = -logp_RV.gather(1, torch.tensor(sample.response_tokens)[:, None])[:, 0]
        excess += (surprisal_R - entropy_R).sum().item()
        tokens += sample.response_length
    deviations = excess / math.sqrt(variance)
    print(f"surprisal less entropy over {tokens:.0f} tokens: {deviations:.2f} standard deviations")
    assert tokens > 2000
    assert abs(deviations) < 4


NARROWED = {
    "top-p": {"rollout_top_p": 0.8},
    "top-k": {"rollout_top_k": 20},
    "both": {"rollout_top_k": 9, "rollout_top_p": 0.7, "rollout_temperature": 0.7},
    "min-p": {"rollout_min_p": 0.05},
    "all three": {"rollout_top_k": 9, "rollout_top_p": 0.7, "rollout_min_p": 0.1},
}


def kept_sets(sample):
    """The ids that each token was sampled from, as the engine says."""
    kept = [[int(one) for one in ids.split()] for ids in sample.kept_tokens.split(";")[:-1]]
    assert len(kept) == sample.response_length
    return kept


def over_kept(network, sample, temperature=1.0):
    """Largest difference of the engine's log-probs from transformers' over the tokens kept."""
    places = zip(
        kept_sets(sample),
        sample.response_tokens,
        sample.rollout_log_probs,
        log_probs(network, sample, temperature),
        strict=True,
    )
    return max(abs((logp_V[token] - logp_V[ids].logsumexp(0)).item() - given) for ids, token, given, logp_V in places)


def kept_by_the_definition(logp_V, top_k, top_p, min_p):
    """The ids that top-k, then top-p of what that leaves by the whole softmax, then min-p keep."""
    order = logp_V.argsort(descending=True)
    p = logp_V.exp()[order]
    keeps = (p.cumsum(0) - p < top_p) & (p >= p[0] * min_p)
    return set(order[: len(order) if top_k == -1 else top_k][keeps[: len(order) if top_k == -1 else top_k]].tolist())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "both" else [pytest.mark.full]) for name in NARROWED]
)
def test_the_kept_tokens_are_those_of_the_settings_and_log_probs_are_over_them(manager, network, name, request):
    flags = NARROWED[name]
    if "rollout_min_p" in flags:
        flags = flags | {"router_url": request.getfixturevalue("unseeded_fleet").router_url}
    settings = {
        key: flags.get(f"rollout_{key}", plain) for key, plain in (("top_k", -1), ("top_p", 1.0), ("min_p", 0.0))
    }
    worst, places, unlike = 0.0, 0, 0
    for sample in manager(**flags).generate(0).samples:
        temperature = flags.get("rollout_temperature", 1.0)
        worst = max(worst, over_kept(network, sample, temperature))
        logp_RV = log_probs(network, sample, temperature)
        for ids, token, logp_V in zip(kept_sets(sample), sample.response_tokens, logp_RV, strict=True):
            assert token in ids
            unlike += set(ids) != kept_by_the_definition(logp_V, **settings)
            places += 1
    print(
        f"{name}: {unlike} of {places} sets are not transformers' by rounding; log-probs differ by {worst:.1e} at most"
    )
    assert worst < 1e-4
    assert unlike <= places * 0.002  # a probability at the very edge may be rounded to either side


def log_probs_of(samples):
    return {sample.index: sample.rollout_log_probs for sample in samples}


def test_a_samples_tokens_and_log_probs_depend_on_its_seed_alone(manager):
    together = manager().generate(0).samples
    small = manager(rollout_batch_size=2)
    for otherwise in (
        manager(rollout_concurrency=1).generate(0).samples,
        manager(rollout_concurrency=5).generate(0).samples,
        [sample for number in range(4) for sample in small.generate(number).samples],
    ):
        assert tokens_of(otherwise) == tokens_of(together)
        assert log_probs_of(otherwise) == log_probs_of(together)
    other = manager(run_seed=2).generate(0).samples
    assert sum(tokens_of(other)[index] == tokens for index, tokens in tokens_of(together).items()) < 8


@pytest.fixture
def greedy_neighbours(fleet):
    """Greedy requests, such as a health check's, one after the other for as long as a test runs."""
    stop, served = threading.Event(), []

    def ask() -> None:
        plain = SamplingParams(temperature=0.0, max_new_tokens=2).to_request(0)
        body = {"input_ids": [5, 6, 7], "sampling_params": plain}
        request = urllib.request.Request(
            f"{fleet.router_url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        while not stop.is_set():
            with urllib.request.urlopen(request, timeout=60) as reply:
                served.append(reply.status)

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask) for _ in range(2)]
        yield served
        stop.set()
        for one in asking:
            one.result(60)


def test_greedy_neighbours_do_not_change_a_samples_tokens(manager, request):
    alone = manager().generate(0).samples
    served = request.getfixturevalue("greedy_neighbours")
    among = manager().generate(0).samples
    assert served
    assert tokens_of(among) == tokens_of(alone)
    assert log_probs_of(among) == log_probs_of(alone)


def test_greedy_evaluation_repeats_and_does_not_sample(manager, write_rows):
    held_out = write_rows(ROWS, "held_out.jsonl")
    given = manager(eval_prompt_data=("sums", held_out), eval_temperature=0.0, n_samples_per_eval_prompt=2)
    first, second = given.evaluate(0), given.evaluate(1)
    assert tokens_of(first.samples["sums"]) == tokens_of(second.samples["sums"])
    assert first.scores == second.scores
    pairs = zip(first.samples["sums"][::2], first.samples["sums"][1::2], strict=True)
    assert all(left.tokens == right.tokens for left, right in pairs)


def test_every_held_out_set_is_sampled_as_it_says(manager, network, write_rows, tmp_path):
    ends = list(range(150))  # half of the vocabulary
    path = write_rows(ROWS, "held_out.jsonl")
    sets = {
        "greedy": {"path": path, "temperature": 0, "n_samples_per_eval_prompt": 2, "max_response_len": 5},
        "drawn": {"path": path, "n_samples_per_eval_prompt": 4, "stop_token_ids": ends, "min_new_tokens": 4},
    }
    (tmp_path / "sets.yaml").write_text(json.dumps({"eval": {"datasets": sets}}))
    report = manager(eval_config=str(tmp_path / "sets.yaml")).evaluate(0)
    greedy, drawn = report.samples["greedy"], report.samples["drawn"]
    assert (len(greedy), len(drawn)) == (2 * len(ROWS), 4 * len(ROWS))
    for sample in greedy:
        assert sample.response_length <= 5
        assert sample.response_tokens == log_probs(network, sample).argmax(-1).tolist()
    assert max(sample.response_length for sample in drawn) > 5
    assert len({tuple(sample.response_tokens) for sample in drawn}) == len(drawn)
    assert not {token for sample in drawn for token in sample.response_tokens[:4]} & set(ends)
    ended = [sample for sample in drawn if sample.status is Status.COMPLETED]
    assert len(ended) > len(drawn) / 2
    assert all(sample.response_tokens[-1] in ends for sample in ended)
    assert {f"eval/greedy-pass@{k}" in report.metrics for k in (1, 2)} == {True}
    assert ("eval/drawn-pass@4" in report.metrics, "eval/greedy-pass@4" in report.metrics) == (True, False)


POSTED = """
from slime_rollout import get_model_url, post

async def custom_generate(args, sample, sampling_params):
    payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
    output = await post(get_model_url(args), payload)
    sample.append_response(output["output_ids"], text=output["text"])
    sample.status = "completed"
    return sample
"""


def test_stop_strings_and_tokens(manager, tiny_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
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
            assert after.status is Status.COMPLETED
            assert after.response_tokens == before.response_tokens[: after.response_length]
            assert tokenizer.decode(after.response_tokens, skip_special_tokens=True) == after.response
            assert letter in after.response
            assert letter not in tokenizer.decode(after.response_tokens[:-1])
    (tmp_path / "own.py").write_text(POSTED)
    posted = manager(rollout_stop=(letter,), custom_generate_function_path=f"{tmp_path}/own.py").generate(0).samples
    for before, after in zip(free, posted, strict=True):
        if letter in before.response:  # what the engine itself says of it
            assert after.response.endswith(letter) and tokenizer.decode(after.response_tokens).startswith(
                after.response
            )
    kept = manager(no_rollout_skip_special_tokens=True, rollout_max_response_len=60).generate(0).samples
    assert [tokenizer.decode(one.response_tokens) for one in kept] == [one.response for one in kept]
    assert any(one.response.endswith(tokenizer.decode([0])) for one in kept)


def test_a_new_weight_version_is_on_every_token(manager, fleet):
    (url,) = fleet.engine_urls
    try:
        _post(f"{url}/update_weight_version", {"new_version": "7"})
        assert {version for sample in manager().generate(0).samples for version in sample.weight_versions} == {7}
    finally:
        _post(f"{url}/update_weight_version", {"new_version": "0"})


THREE_TURNS = """
from slime_rollout import Trajectory

async def custom_generate(args, sample, sampling_params):
    trajectory = Trajectory.start(sample)
    while not trajectory.done:
        text = await trajectory.generate(max_new_tokens=4 + sample.index % 5)
        if trajectory.turns < 3:
            trajectory.observe(f" = {len(text)}, say a number: é")
    return sample
"""


def test_log_probs_of_three_turns_are_the_models(manager, network, tmp_path):
    """They are those of the whole list of tokens in one pass, so each turn was given exactly what is recorded."""
    (tmp_path / "own.py").write_text(THREE_TURNS)
    own = {"custom_generate_function_path": f"{tmp_path}/own.py", "max_turns": 3, "rollout_max_response_len": 120}
    worst, sampled, spaced = 0.0, 0, 0
    for sample in manager(**own).generate(0).samples:
        assert sample.metadata["turns"] == 3
        logp_RV = log_probs(network, sample)
        expected_R = logp_RV.gather(1, torch.tensor(sample.response_tokens)[:, None])[:, 0]
        given_R = torch.tensor(sample.rollout_log_probs, dtype=torch.float64)
        trained_R = torch.tensor(sample.loss_mask, dtype=torch.bool)
        assert trained_R.tolist() == [version == 0 for version in sample.weight_versions]
        worst = max(worst, (expected_R - given_R)[trained_R].abs().max().item())
        sampled, spaced = sampled + int(trained_R.sum()), spaced + int((~trained_R).sum())
    print(f"largest difference over three turns ({sampled} sampled tokens, {spaced} observed): {worst:.1e}")
    assert sampled > 500 and spaced > 500
    assert worst < 1e-4


@pytest.mark.skipif(not RETOOL.exists(), reason="the examples belong to the repository")
def test_the_tool_example_runs(manager, tmp_path):
    rows = [json.loads(line) for line in (RETOOL / "prompts.jsonl").read_text().splitlines()[:4]]
    # Without the system message: with it prompts are longer than the model's context.
    questions = [row | {"prompt": row["prompt"][-1:]} for row in rows]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    own = {"prompt_data": str(tmp_path / "questions.jsonl"), "apply_chat_template": True, "rm_type": None}
    own |= dict.fromkeys(("custom_generate_function_path", "custom_rm_path"), str(RETOOL / "retool.py"))
    samples = manager(**own, rollout_batch_size=2).generate(0).samples
    assert [len(sample.rollout_log_probs) for sample in samples] == [sample.response_length for sample in samples]
    assert {sample.metadata["turns"] for sample in samples} == {1}  # a random model calls nothing
    assert {sample.reward for sample in samples} == {0.0}


def test_a_prompt_that_does_not_fit_is_refused_with_the_engines_words(manager):
    with pytest.raises(GenerationError, match=r"HTTP 400.*maximum context length of 256 tokens"):
        manager(rollout_max_response_len=250).generate(0)


@pytest.mark.parametrize(
    "narrowed", [pytest.param({}, id="plain"), pytest.param({"rollout_top_p": 0.8}, id="top-p", marks=pytest.mark.full)]
)
def test_responses_that_were_cut_off_end_as_if_nothing_had_happened(manager, network, narrowed):
    # One token in sixty is a stop, and a third of the requests run at once: those cut off are at all stages.
    changes = {"n_samples_per_prompt": 4, "rollout_max_response_len": 180, "rollout_concurrency": 16} | narrowed
    changes["rollout_stop_token_ids"] = list(range(100, 200, 20))
    whole = tokens_of(manager(**changes, rollout_batch_size=12).generate(0).samples)
    given = manager(**changes, rollout_batch_size=3, over_sampling_batch_size=12, partial_rollout=True)
    batches = [given.generate(number) for number in range(4)]
    continued = sum(batch.metrics.get("continued_samples", 0) for batch in batches)
    print(f"{continued} samples were continued")
    assert continued > 0
    assert not given.source.check_ledger()
    samples = [sample for batch in batches for sample in batch.samples if sample.index in whole]
    assert len(samples) > 24
    assert tokens_of(samples) == {sample.index: whole[sample.index] for sample in samples}
    if narrowed:
        assert max(over_kept(network, sample) for sample in samples) < 1e-4
    else:
        assert max(differences(sample, {0: network}) for sample in samples) < 1e-4


def test_generation_beside_weight_updates_knows_each_tokens_weights(manager, fleet, network):
    """Three updates arrive while requests are in flight: each token has the log-prob under the weights it names."""
    versions, channel = {0: network}, TensorWeightChannel(ChannelSpec(tuple(fleet.engine_urls)))
    given = manager(
        rollout_batch_size=4,
        rollout_max_response_len=120,
        async_buffer_size=2,
        max_weight_staleness=2,
        rm_type="random",
    )
    try:
        batches = []
        for number in range(4):
            batches.append(given.generate(number))
            versions[number + 1] = moved(versions[number], seed=number)
            send(channel, versions[number + 1], number + 1)
    finally:
        given.close()
        send(channel, network, 0)
    mixed = 0
    for number, batch in enumerate(batches):
        for sample in batch.samples:
            assert number - 2 <= min(sample.weight_versions) and max(sample.weight_versions) <= number
            assert sample.weight_versions == sorted(sample.weight_versions)
            assert differences(sample, versions) < 1e-4
            mixed += len(set(sample.weight_versions)) > 1
    assert mixed > 0
    indices = [sample.index for batch in batches for sample in batch.samples]
    assert len(indices) == len(set(indices)) == 4 * 4 * 8


def differences(sample, networks):
    """Largest difference of a sample's log-probs from those of the networks that its tokens name, by version."""
    worst = 0.0
    response_R1 = torch.tensor(sample.response_tokens)[:, None]
    for version in set(sample.weight_versions):
        expected_R = log_probs(networks[version], sample).gather(1, response_R1)[:, 0]
        there_R = torch.tensor([other == version for other in sample.weight_versions])
        given_R = torch.tensor(sample.rollout_log_probs, dtype=torch.float64)
        worst = max(worst, (expected_R - given_R).abs()[there_R].max().item())
    return worst


def moved(network, seed):
    """A network whose matrices are a little other than another's."""
    generator, moved = torch.Generator().manual_seed(seed), copy.deepcopy(network)
    with torch.no_grad():
        for parameter in moved.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    return moved


def send(channel, network, version):
    channel.begin(WeightUpdate(version=version))
    channel.send(list(network.state_dict().items()))
    channel.end()


def _post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read()
