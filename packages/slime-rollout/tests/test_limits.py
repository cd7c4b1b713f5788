"""What the model cannot take is refused where it comes in: tokens that it does not have, and more than it holds.

The model's tokenizer has a token that was added after its vocabulary, as tools and formats add some, and the model was
not resized.
"""

import asyncio
import json

import pytest
from transformers import AutoTokenizer

from slime_core.errors import DataError
from slime_core.types import Sample, Status
from slime_rollout.config import RolloutConfig
from slime_rollout.data import PromptDataset, PromptEncoder, StreamingPrompts
from slime_rollout.data_service import DataService, DataSpec
from slime_rollout.errors import GenerationError
from slime_rollout.eval_sets import read_eval_sets
from slime_rollout.evaluate import HeldOutPrompts
from slime_rollout.generate import EngineClient, GenerationContext, SamplingParams, Trajectory
from slime_rollout.generate.custom import CustomGenerate
from slime_rollout.limits import ModelLimits, stop_problem, tokens_beyond, wrong_on_cpu
from slime_rollout.measure import check_stop_ids, measure_prompts

CONTEXT = 64
ADDED = "<|tool|>"


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    tokenizer.add_tokens([ADDED])
    return tokenizer


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory):
    directory = tmp_path_factory.mktemp("unresized")
    tokenizer.save_pretrained(directory)
    config = {"vocab_size": len(tokenizer) - 1, "max_position_embeddings": CONTEXT}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.fixture
def config_of(model, tmp_path):
    """Flags with rows of such a file."""

    def build(rows, **changes):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return RolloutConfig.of(
            hf_checkpoint=model, rollout_batch_size=1, prompt_data=str(file), rm_type="random", **changes
        )

    return build


def told(tokenizer):
    """What is said of the added token, as a pattern."""
    token = len(tokenizer) - 1
    return rf"token {token} \('<\|tool\|>', which the tokenizer adds\) is outside the model's vocabulary of {token}"


def load(config, tokenizer):
    return PromptDataset.load(config.data.prompt_paths[0], config, PromptEncoder.of(config, tokenizer))


TEXT = {"prompt": f"use {ADDED}"}
CHAT = {"prompt": [{"role": "user", "content": f"use {ADDED}"}]}


@pytest.mark.parametrize(("row", "chat"), [(TEXT, False), (CHAT, True)])
def test_a_prompt_with_a_token_that_the_model_lacks_is_a_bad_row(config_of, tokenizer, row, chat):
    rows = [{"prompt": "2 + 2 ="}, row]
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: the prompt's {told(tokenizer)}; give the tokenizer"):
        load(config_of(rows, apply_chat_template=chat), tokenizer)
    assert len(load(config_of(rows, apply_chat_template=chat, on_bad_data="skip"), tokenizer)) == 1


def test_one_of_a_stream_is_found_when_its_turn_comes(config_of, tokenizer):
    config = config_of([{"prompt": "2 + 2 ="}, TEXT], streaming_data=True)
    feed = StreamingPrompts(config, PromptEncoder.of(config, tokenizer)).feed(shuffle=False, seed=0)
    feed.next_group(group_index=0, first_index=0, size=1)
    with pytest.raises(DataError, match=told(tokenizer)):
        feed.next_group(group_index=1, first_index=1, size=1)


def test_one_of_a_held_out_set_names_the_set(config_of, tokenizer, tmp_path):
    (tmp_path / "held.jsonl").write_text(json.dumps(TEXT) + "\n")
    config = config_of([{"prompt": "a"}], eval_prompt_data=("held", str(tmp_path / "held.jsonl")))
    with pytest.raises(DataError, match=rf"held-out set held: .*held\.jsonl:1: the prompt's {told(tokenizer)}"):
        HeldOutPrompts.load(read_eval_sets(config)[0], tokenizer)
    with pytest.raises(DataError, match=rf"held-out set held: .*{told(tokenizer)}"):
        measure_prompts(config)


@pytest.mark.parametrize(
    ("rows", "row", "what"),
    [
        ("conversations", {"messages": [*CHAT["prompt"], {"role": "assistant", "content": "no"}]}, "the conversation"),
        ("pairs", {"prompt": "a", "chosen": f"b{ADDED}", "rejected": "c"}, "the chosen side"),
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": f"c{ADDED}"}, "the rejected side"),
    ],
)
def test_rows_that_are_trained_on_as_they_are(config_of, tokenizer, rows, row, what):
    service = DataService(DataSpec(rollout=config_of([row]), rows=rows, max_length=CONTEXT))
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: {what}'s {told(tokenizer)}"):
        service.start()


def test_a_stop_token_that_the_model_lacks(config_of, tokenizer, tmp_path):
    check_stop_ids(config_of([TEXT], rollout_stop_token_ids=(len(tokenizer) - 2,)))
    with pytest.raises(
        DataError, match=r"--rollout-stop-token-ids: token 9999 .*, so it ends no response; leave it out"
    ):
        check_stop_ids(config_of([TEXT], rollout_stop_token_ids=(9999,)))
    (tmp_path / "eval.yaml").write_text("eval: {datasets: [{name: held, path: p.jsonl, stop_token_ids: 9999}]}")
    with pytest.raises(DataError, match="held-out set held: stop_token_ids: token 9999"):
        check_stop_ids(config_of([TEXT], eval_config=str(tmp_path / "eval.yaml")))


def test_a_stop_text_that_no_tokens_write(tokenizer):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    letters = Tokenizer(models.WordLevel({"?": 0, "a": 1}, unk_token="?"))
    words = PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="?")
    assert stop_problem("🙂", words) == (
        "the stop text '🙂' ends no response: no tokens of the model's tokenizer are that text"
    )
    assert stop_problem("a", words) is None
    assert stop_problem("🙂", tokenizer) is None  # its bytes are tokens


def test_a_tokenizer_with_more_tokens_than_the_model(tokenizer, model):
    limits = ModelLimits.of(model)
    assert "1 of the tokenizer's tokens, such as" in tokens_beyond(limits, tokenizer)
    assert ADDED in tokens_beyond(limits, tokenizer)
    assert tokens_beyond(ModelLimits(vocab_size=len(tokenizer)), tokenizer) is None


@pytest.fixture
def inside(engine, reply, tokenizer, model):
    """Runs a coroutine function of a context whose engine says one token."""

    def run(work, **params):
        async def within():
            engine.answer = lambda number, body: reply(text="a", tokens=[5], version="0")
            async with EngineClient(engine.url, concurrency=8, timeout=20.0, retry_delays=()) as client:
                context = GenerationContext(
                    client=client,
                    params=SamplingParams(**params),
                    run_seed=5,
                    tokenizer=tokenizer,
                    limits=ModelLimits.of(model),
                )
                return await work(context)

        return asyncio.run(asyncio.wait_for(within(), 60))

    return run


def sample_of(length=3):
    return Sample(index=7, group_index=1, prompt="p", tokens=[4] * length)


def test_what_a_tool_says_reaches_no_engine_with_a_token_that_the_model_lacks(inside, tokenizer, engine):
    async def work(context):
        trajectory = Trajectory(sample_of(), context)
        await trajectory.generate()
        trajectory.observe(f"42 {ADDED}")
        await trajectory.generate()

    with pytest.raises(GenerationError, match=f"sample 7: {told(tokenizer)}"):
        inside(work)
    assert len(engine.bodies) == 1


@pytest.mark.parametrize("changes", [{"stop_token_ids": [9999]}, {"logit_bias": {"9999": 1.0}}])
def test_settings_of_a_turn_that_name_a_token_which_the_model_lacks(inside, engine, changes):
    async def work(context):
        context.request(sample_of(), most=4, changes=changes)

    with pytest.raises(GenerationError, match=f"sample 7: {next(iter(changes))}: token 9999 is outside"):
        inside(work)
    assert not engine.bodies


FUNCTION = """
async def custom_generate(args, sample, sampling_params):
    sample.tokens = [*sample.tokens, *{tokens}]
    sample.response_length, sample.response = len({tokens}), "own"
"""


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ("[9999]", "custom_generate.py: sample 7 has a wrong token: token 9999 is outside the model's vocabulary"),
        (
            "[5] * 62",
            "sample 7 has a response of 62: 65 tokens with the prompt are more than the model's context of 64",
        ),
    ],
)
def test_what_a_function_returns(inside, tmp_path, tokens, message):
    file = tmp_path / "custom_generate.py"
    file.write_text(FUNCTION.format(tokens=tokens))
    made = CustomGenerate(str(file), timeout=20.0, calls=4)

    async def work(context):
        return await asyncio.gather(*made([sample_of()], context))

    with pytest.raises(GenerationError) as caught:
        inside(work)
    assert message in str(caught.value)


def test_a_function_may_fill_the_context(inside, tmp_path):
    file = tmp_path / "custom_generate.py"
    file.write_text(FUNCTION.format(tokens="[5] * 61"))
    made = CustomGenerate(str(file), timeout=20.0, calls=4)

    async def work(context):
        return await asyncio.gather(*made([sample_of()], context))

    assert len(inside(work)[0][0].tokens) == CONTEXT


@pytest.mark.parametrize(("length", "room"), [(3, 59), (CONTEXT - 7, 5), (CONTEXT - 6, 0), (CONTEXT + 9, 0)])
def test_a_request_leaves_the_room_that_an_engine_needs(inside, engine, length, room):
    async def work(context):
        sample = sample_of(length)
        await Trajectory(sample, context).generate()
        return sample

    sample = inside(work)
    assert [body["sampling_params"]["max_new_tokens"] for body in engine.bodies] == ([room] if room else [])
    assert sample.status is (Status.COMPLETED if room else Status.TRUNCATED)


def repeated(tokenizer, count):
    """A text of so many tokens."""
    text = "7" * count
    assert len(tokenizer(text)["input_ids"]) == count
    return {"prompt": text}


def test_a_prompt_that_leaves_no_room_in_the_context_is_a_bad_row(config_of, tokenizer):
    fits, long = repeated(tokenizer, CONTEXT - 7), repeated(tokenizer, CONTEXT - 6)
    assert len(load(config_of([fits]), tokenizer)) == 1
    advice = "with a response the context holds 57 of a prompt; .* --rollout-max-prompt-len 57"
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: the prompt has 58 tokens, and {advice}"):
        load(config_of([fits, long]), tokenizer)
    assert len(load(config_of([fits, long], on_bad_data="skip"), tokenizer)) == 1
    assert len(load(config_of([fits, long], rollout_max_prompt_len=57), tokenizer)) == 1
    with pytest.raises(DataError, match="the context holds 29 of a prompt"):
        load(config_of([repeated(tokenizer, 30)], rollout_max_context_len=30), tokenizer)


def test_a_function_may_shorten_a_long_prompt(config_of, tokenizer):
    config = config_of([repeated(tokenizer, CONTEXT + 9)], custom_generate_function_path="mod.fn")
    assert len(load(config, tokenizer)) == 1


def test_a_held_out_set_has_its_own_limit_of_the_context(config_of, tokenizer, tmp_path):
    (tmp_path / "held.jsonl").write_text(json.dumps(repeated(tokenizer, 40)) + "\n")
    flags = {"eval_prompt_data": ("held", str(tmp_path / "held.jsonl")), "rollout_max_context_len": 30}
    with pytest.raises(
        DataError, match=r"held-out set held: .* has 40 tokens, and with a response the context holds 29"
    ):
        HeldOutPrompts.load(read_eval_sets(config_of([TEXT], **flags))[0], tokenizer)
    config = config_of([TEXT], **flags, eval_max_context_len=60)
    assert len(HeldOutPrompts.load(read_eval_sets(config)[0], tokenizer).prompts) == 1


@pytest.mark.parametrize(
    ("config", "longest", "wrong"),
    [
        ({"max_position_embeddings": 100}, None, None),
        ({"max_position_embeddings": 100, "sliding_window": 32}, None, "the window of 32 tokens"),
        ({"max_position_embeddings": 100, "sliding_window": 32}, 32, None),
        ({"max_position_embeddings": 100, "sliding_window": 32}, 33, "up to 33 tokens in a context"),
        ({"max_position_embeddings": 100, "sliding_window": 128}, None, None),
        ({"max_position_embeddings": 100, "sliding_window": 32, "use_sliding_window": False}, None, None),
        ({"max_position_embeddings": 100, "sliding_window": 32, "layer_types": ["full_attention"]}, None, None),
        ({"text_config": {"max_position_embeddings": 100, "sliding_window": 32}}, None, "the window of 32 tokens"),
        ({"model_type": "gpt_oss", "max_position_embeddings": 100}, None, "attention sinks"),
    ],
)
def test_what_attention_on_a_cpu_leaves_out(tmp_path, config, longest, wrong):
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = wrong_on_cpu(str(tmp_path), longest)
    assert found is None if wrong is None else wrong in found
