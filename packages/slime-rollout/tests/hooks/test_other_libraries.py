"""What users' functions return may be numbers, truth values and arrays of NumPy and torch, wherever they return any."""

import asyncio

import pytest

from slime_core.hooks import HookArgs
from slime_core.types import Drop, Keep, Sample
from slime_rollout.config import RolloutConfig
from slime_rollout.filters import CustomFilter
from slime_rollout.hooks.rollouts import RewardPostProcess
from slime_rollout.rewards import make_scorer

GROUP = [Sample(index=number, group_index=0, prompt="p", response=str(number)) for number in range(2)]
ARGS = HookArgs({})


@pytest.fixture
def write(tmp_path):
    """A function's path from its body."""

    def make(arguments, body, more=""):
        text = f"import dataclasses\nimport numpy as np\nimport torch\n{more}\ndef own({arguments}):\n    {body}\n"
        path = tmp_path / f"own_{len(list(tmp_path.iterdir()))}.py"  # a file is loaded once
        path.write_text(text)
        return f"{path}:own"

    return make


def config_of(**given):
    return RolloutConfig.of(hf_checkpoint="m", prompt_data="p", rollout_batch_size=1, n_samples_per_prompt=2, **given)


OUTPUT = "@dataclasses.dataclass\nclass Output:\n    keep: object\n    reason: str | None = None"
TRUE = [
    "np.True_",
    "np.array(True)",
    "np.array([True])",
    "torch.tensor([0.0, 1.0]).std() > 0",
    "torch.tensor([[True]])",
]


@pytest.mark.parametrize("form", ["{}", "Output({})", "Output({}, reason='why')"])
@pytest.mark.parametrize("given", TRUE)
def test_a_filters_verdict(write, given, form):
    for negated in ("", "~"):
        verdict = form.format(f"{negated}({given})")
        found = CustomFilter(write("args, group", f"return {verdict}", OUTPUT), ARGS, time_limit=30.0)(GROUP)
        assert found == (Drop("why" if "why" in form else "rejected") if negated else Keep())


@pytest.mark.parametrize(
    "given",
    [
        *("np.float32(0.5)", "np.array(0.5)", "np.array([0.5])", "torch.tensor(0.5)", "torch.tensor([[0.5]])"),
        "torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True)",
    ],
)
def test_a_reward(write, given):
    scorer = make_scorer(config_of(custom_rm_path=write("args, sample", f"return {given}")), ARGS, strict=True)
    assert repr(asyncio.run(scorer.reward(GROUP[0]))) == "0.5"


@pytest.mark.parametrize(
    "given",
    [
        *("np.arange(2) / 2", "torch.arange(2) / 2", "(torch.arange(2) / 2).unsqueeze(1).requires_grad_()"),
        *("np.arange(2).reshape(2, 1) / 2", "[np.float64(0), torch.tensor([0.5])]", "tuple(torch.arange(2) / 2)"),
    ],
)
def test_the_rewards_of_a_group(write, given):
    path = write("args, samples", f"return {given}")
    scorer = make_scorer(config_of(custom_rm_path=path, group_rm=True), ARGS, strict=True)
    assert repr(asyncio.run(scorer.group_reward(GROUP))) == "[0.0, 0.5]"


def test_parts_of_a_reward(write):
    parts = "'score': torch.tensor(0.5), 'right': np.True_, 'answer': '4', 'tried': np.arange(2), 'object': print"
    path = write("args, sample", f"return {{{parts}, 'bad': float('nan')}}")
    scorer = make_scorer(config_of(custom_rm_path=path, reward_key="score"), ARGS, strict=True)
    value = {"score": 0.5, "right": 1.0, "answer": "4", "tried": [0, 1], "bad": float("nan")}
    assert repr(asyncio.run(scorer.reward(GROUP[0]))) == repr(value)


@pytest.mark.parametrize(
    "given",
    [
        *("np.ones(2), np.arange(2)", "torch.ones(2), torch.arange(2)", "np.array([[1, 1], [0, 1]])"),
        *("[torch.tensor(1.0), np.float32(1)], list(np.arange(2))", "torch.tensor([[1, 1], [0, 1]])"),
    ],
)
def test_processed_rewards(write, given):
    process = RewardPostProcess(
        config_of(custom_reward_post_process_path=write("args, samples", f"return {given}")), ARGS
    )
    assert process(GROUP) == ([1.0, 1.0], [0.0, 1.0])


METRICS = "a=np.float32(0.5), b=torch.tensor(2), c=np.array([3]), d=np.True_, e=torch.tensor(4.0, requires_grad=True)"


def test_metrics_of_every_function_that_may_give_some(manager, write):
    source = f"""
def log(rollout_id, args, samples, extra_metrics, rollout_time):
    extra_metrics.update({METRICS})
    return np.True_

def log_eval(rollout_id, args, data, extra_metrics):
    extra_metrics.update({METRICS})
    return torch.tensor(True)

def rollout(args, rollout_id, data_source, evaluation=False):
    groups = data_source.get_samples(args.rollout_batch_size)
    for sample in (sample for group in groups for sample in group):
        sample.tokens, sample.response_length = torch.tensor([*sample.tokens, 7]), np.int64(1)
        sample.reward, sample.status = torch.tensor(0.5), "completed"
        sample.loss_mask, sample.rollout_log_probs = torch.tensor([True]), np.array([-0.5], np.float32)
        sample.remove_sample = np.False_
    class Output:
        samples, metrics = groups, dict({METRICS})
    return Output
"""
    path = write("args", "pass", source).removesuffix("own")
    held_out = ("held", manager()._config.data.prompt_data)
    given = manager(
        custom_rollout_log_function_path=f"{path}log",
        custom_eval_rollout_log_function_path=f"{path}log_eval",
        eval_prompt_data=held_out,
    )
    wanted = {"a": 0.5, "b": 2.0, "c": 3.0, "d": 1.0, "e": 4.0}
    metrics = given.generate(0).metrics
    assert {name: metrics[name] for name in wanted} == wanted and "raw_reward" not in metrics
    assert given.evaluate(0).metrics == wanted
    batch = manager(rollout_function_path=f"{path}rollout").generate(0)
    assert {name: batch.metrics[name] for name in wanted} == wanted
    assert {(*sample.loss_mask, *sample.rollout_log_probs, sample.reward) for sample in batch.samples} == {
        (1, -0.5, 0.5)
    }


def test_a_sample_of_a_generate_function(generate_one, write):
    made = generate_one("""
    sample.tokens = np.array([*sample.tokens, 5, 6])
    sample.response, sample.response_length, sample.loss_mask = "56", torch.tensor(2), torch.tensor([True, False])
    sample.rollout_log_probs, sample.weight_versions = torch.tensor([-0.5, -1.0]), np.array([3, 3])
    sample.reward = {"score": np.float32(0.5), "answer": "56", "all": torch.tensor([1, 2])}
    sample.remove_sample, sample.metadata["found"] = torch.tensor(False), {"at": np.int64(3), "of": np.arange(2)}
    sample.status = np.str_("completed")
""")
    assert made.response_tokens == [5, 6] and made.loss_mask == [1, 0] and made.weight_versions == [3, 3]
    assert made.rollout_log_probs == [-0.5, -1.0] and made.remove_sample is False
    assert made.reward == {"score": 0.5, "answer": "56", "all": [1, 2]}
    assert made.metadata["found"] == {"at": 3, "of": [0, 1]}


def test_the_prompts_ids_of_a_function_that_sets_text(generate_one):
    made = generate_one("""
    sample.tokens, sample.response = torch.tensor(sample.tokens), "4"
""")
    assert made.response_length and made.tokens[-made.response_length :] == made.response_tokens


@pytest.fixture
def generate_one(tmp_path, tokenizer_dir):
    """The sample that a generate function of this body makes of a prompt."""
    from transformers import AutoTokenizer

    from slime_rollout.generate import GenerationContext, SamplingParams, make_generate

    def run(body):
        path = tmp_path / "own.py"
        head = "import numpy as np\nimport torch\nasync def custom_generate(args, sample, sampling_params):\n"
        path.write_text(f"{head}{body}    return sample\n")
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
        context = GenerationContext(client=None, params=SamplingParams(), run_seed=1, tokenizer=tokenizer)
        (work,) = make_generate(config_of(custom_generate_function_path=str(path)))(
            [Sample(index=0, group_index=0, prompt="p", tokens=[1, 2])], context
        )
        (made,) = asyncio.run(work)
        return made

    return run
