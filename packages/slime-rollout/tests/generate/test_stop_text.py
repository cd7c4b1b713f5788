"""Text, tokens, mask and log-probs of a sample are of the same characters, whatever ended it and however it came."""

import functools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime_core.types import Sample, Status
from slime_rollout.data.chat import TextError
from slime_rollout.generate import Trajectory, single_turn


class SamplingEngine:
    """Says the given tokens, and stops where SGLang does: its text then ends with the stop text or before it."""

    def __init__(self, tokenizer, tokens, parts):
        self._tokenizer, self._tokens, self._parts = tokenizer, tokens, list(parts)
        self.trims = set()

    def __call__(self, begun, params):
        """Tokens after those that the response has, the text, and why it ends."""
        tokens = self._tokens[begun:][: params["max_new_tokens"]]
        skip = params["skip_special_tokens"]
        self.trims.add(not params["no_stop_trim"])
        part = self._parts.pop(0) if self._parts else len(tokens)
        for count in range(1, len(tokens) + 1):
            said = self._tokenizer.decode(tokens[:count])
            if tokens[count - 1] in params["stop_token_ids"]:
                return tokens[:count], self._tokenizer.decode(tokens[:count], skip_special_tokens=skip), "stop"
            if stops := [stop for stop in params["stop"] if stop in said]:
                shown = self._tokenizer.decode(tokens[:count], skip_special_tokens=skip)
                place = shown.find(stops[0])
                return tokens[:count], shown if place < 0 else shown[: place + len(stops[0])], "stop"
            if count > part:
                return tokens[:count], "", "abort"
        return tokens, self._tokenizer.decode(tokens, skip_special_tokens=skip), "length"


@pytest.fixture
def play(engine, reply, generate, chat, tokenizer):
    """The sample that an engine saying these tokens gives, in one of the ways in which responses come in."""

    def run(way, tokens, *, parts=(), **params):
        (sample,) = chat()
        prompt, says = len(sample.tokens), SamplingEngine(tokenizer, tokens, parts)

        def answer(number, body):
            said, text, finish = says(len(body["input_ids"]) - prompt, body["sampling_params"])
            return reply(tokens=said, text=text, version="3", finish={"type": finish})

        def trajectory(group, context):
            async def one():
                await Trajectory(group[0], context).generate()
                return group

            return [one()]

        engine.answer = answer
        for _ in range(len(parts) + 1):
            stream = "eval/held" if way == "evaluation" else "rollout"
            generate(trajectory if way == "trajectory" else single_turn, [sample], stream=stream, **params)
            if sample.status is not Status.ABORTED:
                break
            sample = Sample.from_dict(sample.to_dict())
        assert says.trims == {False}
        return sample

    return run


WAYS = ("single turn", "trajectory", "evaluation")
# Texts that end inside a token, across two, at the first token, and that overlap; and none. Some tokens have several
# characters.
STOPS = st.lists(st.sampled_from(["2", " 2", "42", "+ 2", "4 2", "é", "=\n", "a", "<|end|>", "1 + 1"]), max_size=3)


@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    tokens=st.lists(st.integers(0, 270), min_size=1, max_size=12),
    text=st.sampled_from(["", "1 + 1 = 2", "4 2", "say 42 é", "2", " 2=\n<|end|>a"]),
    stops=STOPS,
    stop_ids=st.lists(st.integers(0, 270), max_size=2),
    parts=st.lists(st.integers(1, 5), max_size=2),
    skip=st.booleans(),
    way=st.sampled_from(WAYS),
)
def test_a_samples_text_is_that_of_its_tokens(tokens, text, stops, stop_ids, parts, skip, way, play, tokenizer):
    said = [*tokenizer.encode(text, add_special_tokens=False), *tokens]
    sample = play(way, said, parts=parts, stop=tuple(stops), stop_token_ids=tuple(stop_ids), skip_special_tokens=skip)
    made = sample.response_tokens
    assert made == said[: len(made)]
    assert sample.response == tokenizer.decode(made, skip_special_tokens=skip)
    assert len(sample.rollout_log_probs) == len(sample.trained_mask) == len(made)
    if sample.status is Status.COMPLETED and made[-1] not in stop_ids:
        whole = tokenizer.decode(made)
        assert any(stop in whole for stop in stops)
        assert (
            len(made) == 1
            or way != "single turn"
            or parts
            or not any(stop in tokenizer.decode(made[:-1]) for stop in stops)
        )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stop", ["2", "+ 2", "2 + 2 ="])
def test_a_reward_sees_the_text_that_ended_the_response(play, tokenizer, way, stop):
    """A token may go on behind it, and then the text does."""
    said = tokenizer.encode("what is 2 + 2 = 4", add_special_tokens=False)
    sample = play(way, said, stop=(stop,))
    assert stop in sample.response and "what is 2 + 2 = 4".startswith(sample.response)
    assert sample.response == tokenizer.decode(sample.response_tokens)


@pytest.fixture
def with_other_weights(engine, reply, generate, chat, tokenizer):
    """The sample of a response that is cut off, and goes on with what other weights say."""

    def run(way, said, then, stop):
        (sample,) = chat()
        prompt = len(sample.tokens)

        def answer(number, body):
            begun = len(body["input_ids"]) - prompt
            tokens = SamplingEngine(tokenizer, then, ())(0, body["sampling_params"]) if begun else (said, "", "abort")
            return reply(tokens=tokens[0], text=tokens[1], version=str(number), finish={"type": tokens[2]})

        def trajectory(group, context):
            async def one():
                await Trajectory(group[0], context).generate()
                return group

            return [one()]

        engine.answer = answer
        for _ in range(2):
            generate(trajectory if way == "trajectory" else single_turn, [sample], stop=(stop,))
            sample = Sample.from_dict(sample.to_dict())
        return sample

    return run


@pytest.mark.parametrize("way", ["single turn", "trajectory"])
@pytest.mark.parametrize(
    ("kept", "then", "stop", "said"),
    [
        ("so 4", " 2 = 1", "4 2", "so 4 2"),
        ("1 + 1", " + 2 = 4", "1 + 2", "1 + 1 + 2"),
        ("so 4", " + 2 = 1", "4 2", "so 4 + 2 = 1"),
        ("so 4", " = 4 2 1", "4 2", "so 4 = 4 2"),
    ],
)
def test_a_stop_text_that_begins_before_a_cut_ends_the_response(
    with_other_weights, tokenizer, kept, then, stop, said, way
):
    """Engines see the text from the cut on, and what was kept may end with the beginning of a stop text."""
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    sample = with_other_weights(way, [*encode(kept), *[7] * len(stop)], encode(then), stop)
    assert sample.response == said == tokenizer.decode(sample.response_tokens)
    assert len(sample.rollout_log_probs) == len(sample.weight_versions) == len(sample.response_tokens)
    assert sample.status is (Status.COMPLETED if stop in said else Status.TRUNCATED)


def test_special_tokens_are_in_the_text_if_that_is_asked_for(generate, custom, say, chat, engine):
    body = "async def custom_generate(args, sample, sampling_params): sample.response = '4'"
    for skip, end in ((True, ""), (False, "<|end|>")):
        say("4<|end|>")
        ((sample,),) = generate(single_turn, chat(), skip_special_tokens=skip)
        assert sample.response == "4" + end
        assert engine.bodies[-1]["sampling_params"]["skip_special_tokens"] is skip
        ((sample,),) = generate(custom(body), chat(), skip_special_tokens=skip)
        assert sample.response == "4" + end


OBSERVES = """
from slime_rollout import Trajectory, generate_single
async def custom_generate(args, sample, sampling_params):
    trajectory = Trajectory.start(sample)
    await trajectory.generate()
    trajectory.{}
"""


@pytest.mark.parametrize(
    "source",
    [
        "async def custom_generate(args, sample, sampling_params): sample.response = 'a\\ud83d'",
        OBSERVES.format("observe('a\\ud83d')"),
        OBSERVES.format("observe_messages([{'role': 'tool', 'content': 'a\\ud83d'}])"),
    ],
)
def test_a_text_that_cannot_be_encoded_is_named_with_its_character(generate, custom, say, chat, source):
    say("=<|end|>")
    with pytest.raises(TextError) as caught:
        generate(custom(source), chat())
    text = str(caught.value)
    assert "custom_generate.py" in text and "sample 10" in text and "a'" in text and r"'\ud83d'" in text
    assert "is half a surrogate pair" in text


def test_a_text_that_need_not_be_encoded_may_have_any_character(generate, custom, chat):
    """Where the function gives the tokens."""
    source = """
async def custom_generate(args, sample, sampling_params):
    sample.tokens, sample.response_length, sample.response = [*sample.tokens, 7], 1, "a\\ud83d"
"""
    ((sample,),) = generate(custom(source), chat())
    assert sample.response == "a\ud83d" and sample.status is Status.COMPLETED
