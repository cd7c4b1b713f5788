import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.hooks import HookArgs
from slime_core.types import Sample, Status
from slime_rollout.engine.addresses import remember_key, router_args
from slime_rollout.errors import GenerationError
from slime_rollout.generate import Trajectory, sampling_seed, trajectory

LOOP = """
from slime_rollout import Trajectory
async def custom_generate(args, sample, sampling_params):
    trajectory = Trajectory.start(sample)
    while not trajectory.done:
        turn = await trajectory.generate()
        if "=" not in turn:
            break
        trajectory.observe("<42>")
    return sample
"""


def test_the_loop_of_the_page(generate, custom, say, chat, engine):
    page = (Path(__file__).parents[2] / "docs" / "generation.md").read_text(encoding="utf-8")
    source = re.search(r"```python\n(import re\nfrom slime_rollout import Trajectory.*?)```", page, re.DOTALL)[1]
    say("<call>40 + 2</call>", "say 42<|end|>")
    ((sample,),) = generate(custom(source), chat())
    assert sample.response == "<call>40 + 2</call><result>42</result>say 42"
    assert engine.bodies[0]["sampling_params"]["stop"] == ["</call>"]


def test_a_loop(generate, custom, say, chat, engine, tokenizer):
    say("6 * 7 =<|end|>", "say 42<|end|>")
    (sample,) = chat()
    prompt = list(sample.tokens)
    ((got,),) = generate(custom(LOOP), [sample])
    first, second = (tokenizer.encode(text) for text in ("6 * 7 =<|end|>", "say 42<|end|>"))
    seen = tokenizer.encode("<42>")
    assert got is sample and got.tokens == prompt + first + seen + second
    assert got.loss_mask == [1] * len(first) + [0] * len(seen) + [1] * len(second)
    assert got.weight_versions == [1] * len(first) + [-1] * len(seen) + [2] * len(second)
    assert [value < 0 for value in got.rollout_log_probs] == [mask == 1 for mask in got.loss_mask]
    assert (got.response, got.status, got.metadata["turns"]) == ("6 * 7 =<42>say 42", Status.COMPLETED, 2)
    assert [body["input_ids"] for body in engine.bodies] == [prompt, prompt + first + seen]
    assert [body["sampling_params"]["sampling_seed"] for body in engine.bodies] == [
        sampling_seed(5, 10, turn) for turn in range(2)
    ]


def test_turns_go_to_the_engine_that_has_the_beginning(generate, custom, say, chat):
    say("=<|end|>", "4<|end|>")
    ((one,), (other,)) = generate(custom(LOOP), chat(2))
    assert one.session_id == "rollout-5-10" and other.session_id == "rollout-5-11"


def test_the_last_turn_is_followed_by_nothing(generate, custom, say, chat, engine):
    say("=<|end|>")
    ((sample,),) = generate(custom(LOOP), chat(), args={"max_turns": 2})
    assert len(engine.bodies) == 2
    assert (sample.status, sample.metadata["turns"], sample.response) == (Status.TRUNCATED, 2, "=<42>=")
    assert sample.loss_mask[-2:] == [1, 1]


def test_the_response_has_a_longest_length_in_all(generate, custom, say, chat, engine, tokenizer):
    say("6 * 7 =<|end|>")
    turn, seen = len(tokenizer.encode("6 * 7 =<|end|>")), len(tokenizer.encode("<42>"))
    ((sample,),) = generate(custom(LOOP), chat(), max_new_tokens=turn + seen + 3)
    assert (sample.status, sample.response_length) == (Status.TRUNCATED, turn + seen + 3)
    assert [body["sampling_params"]["max_new_tokens"] for body in engine.bodies] == [turn + seen + 3, 3]


def test_what_no_turn_can_follow_is_not_added(generate, custom, say, chat, engine, tokenizer):
    say("6 * 7 =<|end|>")
    turn, seen = len(tokenizer.encode("6 * 7 =<|end|>")), len(tokenizer.encode("<42>"))
    ((sample,),) = generate(custom(LOOP), chat(), max_new_tokens=turn + seen)
    assert (sample.status, sample.response_length, len(engine.bodies)) == (Status.TRUNCATED, turn, 1)


def test_the_context_is_a_limit_too(generate, custom, say, chat, engine):
    say("6 * 7 =<|end|>")
    (sample,) = chat()
    generate(custom(LOOP), [sample], max_context=len(sample.tokens) + 2)
    assert engine.bodies[0]["sampling_params"]["max_new_tokens"] == 2
    assert (sample.status, sample.response_length) == (Status.TRUNCATED, 2)


def test_without_room_nothing_is_asked(generate, custom, chat, engine):
    (sample,) = chat()
    generate(
        custom(LOOP.replace("while not trajectory.done", "for _ in range(2)")),
        [sample],
        max_context=len(sample.tokens),
    )
    assert (sample.status, sample.response_length, engine.bodies) == (Status.TRUNCATED, 0, [])


def test_a_turn_has_settings_of_its_own(generate, custom, say, chat, engine):
    say("4|", "2<|end|>")
    source = LOOP.replace("generate()", "generate(stop=['!'], max_new_tokens=7, temperature=0.5)").replace(
        'if "=" not in turn', "if trajectory.turns == 2"
    )
    ((sample,),) = generate(custom(source), chat(), max_new_tokens=100, stream="eval/sums")
    for body in engine.bodies:
        params = body["sampling_params"]
        assert (params["stop"], params["max_new_tokens"], params["temperature"]) == (["!"], 7, 0.5)
    assert sample.status is Status.COMPLETED  # the first turn's own limit did not end the trajectory
    assert sample.response == "4<42>2"


@pytest.mark.parametrize("setting", ["temperature=0.5", "top_p=0.9", "min_p=0.1", "regex='[0-9]'", "min_new_tokens=3"])
def test_a_turn_that_is_trained_has_the_distribution_of_the_rollout(generate, custom, chat, engine, setting):
    made = custom(LOOP.replace("generate()", f"generate({setting})"))
    with pytest.raises(GenerationError, match=rf"generate\({re.escape(setting)}\) draws this turn from another distr"):
        generate(made, chat())
    assert engine.bodies == []


def test_a_turn_may_name_the_settings_of_the_rollout(generate, custom, chat, engine):
    same = custom(LOOP.replace("generate()", "generate(temperature=0.7, top_k=-1, ignore_eos=True)"))
    generate(same, chat(), temperature=0.7)
    assert engine.bodies[0]["sampling_params"]["ignore_eos"]


CONTINUING = LOOP + "custom_generate.continues_aborted = True\n"


def test_a_turn_that_was_cut_off_goes_on(generate, custom, say, chat, engine, tokenizer):
    say("1=<|end|>", "6 * ||", "7 =<|end|>", "4<|end|>")
    (sample,) = chat()
    made = custom(CONTINUING)
    generate(made, [sample])
    assert (sample.status, sample.response) == (Status.ABORTED, "1=<42>6 * ")
    sample = Sample.from_dict(sample.to_dict())  # as out of a saved state
    generate(made, [sample])
    assert (sample.status, sample.response) == (Status.COMPLETED, "1=<42>6 * 7 =<42>4")
    assert [body["sampling_params"]["sampling_seed"] for body in engine.bodies] == [
        sampling_seed(5, 10, turn) for turn in (0, 1, 1, 2)
    ]
    assert engine.bodies[2]["input_ids"][-2:] == tokenizer.encode("6 * ")[-2:]
    assert sample.metadata["turns"] == 3


def test_without_saying_so_it_begins_anew(generate, custom, say, chat, engine):
    say("1=<|end|>", "6 * ||", "4<|end|>")
    (sample,) = chat()
    prompt = list(sample.tokens)
    generate(custom(LOOP), [sample])
    assert sample.status is Status.ABORTED
    generate(custom(LOOP), [sample])
    assert engine.bodies[2]["input_ids"] == prompt
    assert (sample.status, sample.response, sample.metadata["turns"]) == (Status.COMPLETED, "4", 1)


def test_messages_are_written_as_the_template_does(generate, custom, say, chat, engine, tokenizer):
    source = LOOP.replace('observe("<42>")', "observe_messages([{'role': 'tool', 'content': '42'}])")
    say("6 * 7 =<|end|>", "no end =", "say 42<|end|>")
    ((sample,),) = generate(custom(source), chat())
    text = tokenizer.decode(sample.response_tokens)
    tool = "<|start|>tool:42<|end|><|start|>assistant:"
    # The end of a turn is written where the model did not write it, and not trained on.
    assert text == f"6 * 7 =<|end|>{tool}no end =<|end|>{tool}say 42<|end|>"
    ended = [token for token, mask in zip(sample.response_tokens, sample.loss_mask, strict=True) if mask]
    assert tokenizer.decode(ended) == "6 * 7 =<|end|>no end =say 42<|end|>"


@pytest.mark.parametrize("together", [True, False])
def test_results_of_several_tools_are_given_in_one_call(generate, custom, say, chat, tokenizer, caplog, together):
    """Else the template writes a turn that the model did not have, which is said."""
    trajectory._say_empty_turn.cache_clear()
    results = [f"{{'role': 'tool', 'content': '{text}'}}" for text in ("4", "2")]
    shown = [f"[{', '.join(results)}]"] if together else [f"[{result}]" for result in results]
    calls = "\n        ".join(f"trajectory.observe_messages({messages})" for messages in shown)
    say("6 * 7 =<|end|>", "say 42<|end|>")
    ((sample,),) = generate(custom(LOOP.replace('trajectory.observe("<42>")', calls)), chat())
    text = tokenizer.decode(sample.response_tokens)
    turn = "<|start|>assistant:"
    between = "" if together else f"{turn}<|end|>"
    tools = f"<|start|>tool:4<|end|>{between}<|start|>tool:2<|end|>{turn}"
    assert text == f"6 * 7 =<|end|>{tools}say 42<|end|>"
    sampled = [token for token, mask in zip(sample.response_tokens, sample.loss_mask, strict=True) if mask]
    assert tokenizer.decode(sampled) == "6 * 7 =<|end|>say 42<|end|>"
    assert ("give all of them in one call" in caplog.text) == (not together)


def test_a_template_that_hides_the_model_is_refused(generate, custom, say, chat, tokenizer):
    source = LOOP.replace('observe("<42>")', "observe_messages([{'role': 'tool', 'content': '42'}])")
    say("=<|end|>")
    template, samples = tokenizer.chat_template, chat(3)
    try:
        tokenizer.chat_template = (
            "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
        )
        with pytest.raises(DataError, match="writes what the model said 0 times when 1 messages follow"):
            generate(custom(source), samples[0:1])
        tokenizer.chat_template = "{{ raise_exception('no tools here') }}"
        with pytest.raises(DataError, match=r"the chat template refuses the messages: no tools here"):
            generate(custom(source), samples[1:2])
        tokenizer.chat_template = None
        with pytest.raises(DataError, match="has no chat template, so messages cannot be written"):
            generate(custom(source), samples[2:3])
    finally:
        tokenizer.chat_template = template


def test_a_trajectory_needs_a_fresh_sample(generate, chat):
    def make(group, context):
        async def unit():
            group[0].append_response([7], log_probs=[-1.0])
            with pytest.raises(GenerationError, match="sample 10 has a response; a trajectory begins with a prompt"):
                Trajectory(group[0], context)
            return group

        return [unit()]

    generate(make, chat())


def test_outside_of_a_function_there_is_no_current_one(chat):
    with pytest.raises(GenerationError, match="this is for custom generate functions while a rollout runs"):
        Trajectory.start(chat()[0])


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.lists(st.integers(0, 270), min_size=1, max_size=6)),
        st.tuples(st.just("abort"), st.lists(st.integers(0, 270), max_size=4)),
        st.tuples(st.just("text"), st.text(max_size=8)),
        st.tuples(st.just("tokens"), st.lists(st.integers(0, 270), max_size=6)),
        st.tuples(st.just("tool"), st.text(alphabet="ab 42é\n", max_size=8)),
    ),
    max_size=12,
)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=STEPS, limit=st.integers(1, 60), max_turns=st.integers(1, 6))
def test_tokens_are_what_was_said_and_what_was_observed(
    steps, limit, max_turns, generate, chat, engine, reply, tokenizer
):
    """Whatever the loop does, nothing is tokenized again, and every list has the same length."""
    engine.bodies.clear()
    said = []  # tokens, and whether a turn was cut off

    def answer(number, body):
        tokens, finish = said.pop(0)
        tokens = tokens[: body["sampling_params"]["max_new_tokens"]]
        return reply(tokens=tokens, version="3", text=tokenizer.decode(tokens), finish={"type": finish})

    engine.answer = answer
    (sample,) = chat()
    prompt, expected = list(sample.tokens), []

    def make(group, context):
        return [play(Trajectory(sample, context, max_turns=max_turns), context)]

    async def play(trajectory, context):
        for kind, content in steps:
            before, left, done = list(sample.tokens), trajectory.tokens_left, trajectory.done
            if kind in ("say", "abort"):
                said[:] = [(content, "abort" if kind == "abort" else "stop")]
                asked = len(engine.bodies)
                await trajectory.generate()
                if done:
                    assert len(engine.bodies) == asked
                else:
                    certain = content[:left][:-1] if kind == "abort" else content[:left]
                    expected.extend((token, 1) for token in certain)
                if sample.status is Status.ABORTED:
                    trajectory = Trajectory(Sample.from_dict(sample.to_dict()), context, max_turns=max_turns)
                    sample.__dict__.update(trajectory.sample.__dict__)
                    trajectory.sample = sample
                continue
            aborted = sample.status is Status.ABORTED
            if kind == "tool":
                trajectory.observe_messages([{"role": "tool", "content": content}])
            else:
                trajectory.observe(content)
            added = sample.tokens[len(before) :]
            if kind == "tokens" and not (done or aborted or len(content) >= left):
                assert added == content
            if done or aborted:
                assert not added
            expected.extend((token, 0) for token in added)
            assert sample.tokens[: len(before)] == before
        return [sample]

    generate(make, [sample], max_new_tokens=limit)
    sample.validate()
    assert sample.tokens == prompt + [token for token, _ in expected]
    mask = [trained for _, trained in expected]
    assert (sample.loss_mask or [1] * sample.response_length) == mask
    assert sample.response_length <= limit and sample.metadata["turns"] <= max_turns
    if 1 in mask:
        assert [value != 0.0 for value in sample.rollout_log_probs] == [one == 1 for one in mask]
        assert sample.weight_versions == [3 if one else -1 for one in mask]
    for body in engine.bodies:
        assert sample.tokens[: len(body["input_ids"])] == body["input_ids"]


PREAMBLE = """\
from slime_rollout import generate_single

def extract_tool_call(response): return response[1:] if response.startswith("!") else None
def execute_tool(call): return str(eval(call))
def compute_reward(sample): return float(sample.response == sample.label)
"""

# The multi-turn function of the seed document, as it stands there.
SEED = '''\
# custom_generate.py
async def custom_generate(args, samples, evaluation=False):
    """Multi-turn generation with tool calling."""
    for sample in samples:
        conversation = sample.prompt
        for turn in range(args.max_turns):
            # Generate response
            response = await generate_single(conversation)
            # Check for tool call
            tool_call = extract_tool_call(response)
            if tool_call:
                tool_result = execute_tool(tool_call)
                conversation.append({"role": "assistant", "content": response})
                conversation.append({"role": "tool", "content": tool_result})
            else:
                break
        sample.response = response
        sample.reward = compute_reward(sample)
    return samples
'''


def test_the_seeds_example(generate, custom, say, chat, tokenizer):
    say("!2+2<|end|>", "4<|end|>", "5<|end|>")
    samples = chat(2)
    prompts = [list(sample.tokens) for sample in samples]
    ((first, second),) = generate(custom(PREAMBLE + SEED), samples)
    assert (first.response, first.reward, first.status) == ("4", 1.0, Status.COMPLETED)
    assert (second.response, second.reward) == ("5", 0.0)
    tool = "<|start|>tool:4<|end|><|start|>assistant:"
    assert first.tokens[: len(prompts[0])] == prompts[0] and second.tokens[: len(prompts[1])] == prompts[1]
    assert tokenizer.decode(first.response_tokens) == f"!2+2<|end|>{tool}4<|end|>"
    trained = [token for token, mask in zip(first.response_tokens, first.loss_mask, strict=True) if mask]
    assert tokenizer.decode(trained) == "!2+2<|end|>4<|end|>"
    assert len(first.rollout_log_probs) == len(first.weight_versions) == first.response_length
    assert first.prompt == second.prompt == [{"role": "user", "content": "2 + 2?"}]  # as it was


def test_the_tokens_are_a_rendering_that_the_model_continues(generate, custom, say, chat, tokenizer):
    """With a template that writes past turns as they were, they are what rendering all messages would have given."""
    say("!2+2<|end|>", "!4+4<|end|>", "8<|end|>")
    ((sample,),) = generate(custom(PREAMBLE + SEED), chat())
    messages = [{"role": "user", "content": "2 + 2?"}]
    for said, seen in (("!2+2", "4"), ("!4+4", "8")):
        messages += [{"role": "assistant", "content": said}, {"role": "tool", "content": seen}]
    messages.append({"role": "assistant", "content": "8"})
    whole = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert tokenizer.decode(sample.tokens) == tokenizer.decode(whole)


def test_a_call_that_nobody_answered_was_cut_off(generate, custom, say, chat):
    say("!2+2<|end|>")
    ((sample,),) = generate(custom(PREAMBLE + SEED), chat(), args={"max_turns": 2})
    assert (sample.status, sample.response) == (Status.TRUNCATED, "!2+2")


def test_messages_without_tokens_are_rendered(generate, custom, say, chat, engine):
    """As rows of chat messages come without `--apply-chat-template`."""
    made = custom(
        "from slime_rollout import generate_single\n"
        "async def custom_generate(args, sample, sampling_params):\n"
        "    assert sample.tokens == [] and sample.prompt[0]['content'] == '2 + 2?'\n"
        "    await generate_single(sample.prompt)\n"
    )
    (sample,) = chat()
    rendered, sample.tokens = sample.tokens, []
    say("4<|end|>")
    ((got,),) = generate(made, [sample])
    assert engine.bodies[0]["input_ids"] == rendered == got.prompt_tokens and got.response == "4"


def test_the_samples_of_a_group_at_once(generate, custom, say, chat, engine):
    source = SEED.replace("for sample in samples:\n", "async def one(sample):\n", 1).replace(
        "    return samples\n", "    await asyncio.gather(*map(one, samples))\n"
    )
    say("4<|end|>")
    (samples,) = generate(custom("import asyncio\n" + PREAMBLE + source), chat(3))
    assert [sample.reward for sample in samples] == [1.0] * 3
    assert len({body["sampling_params"]["sampling_seed"] for body in engine.bodies}) == 3


COPIES = """
from slime_rollout import generate_single
async def custom_generate(args, samples):
    for sample in samples:
        talk = list(sample.prompt)
        said = await generate_single(talk%s)
        talk = [*talk, {"role": "assistant", "content": said}, {"role": "user", "content": "?"}]
        sample.response = await generate_single(talk%s)
"""


def test_whose_conversation_a_copy_is(generate, custom, say, chat):
    say("a<|end|>", "b<|end|>", "c<|end|>", "d<|end|>")
    (samples,) = generate(custom(COPIES % (", sample=sample", ", sample=sample")), chat(2))
    assert [sample.response for sample in samples] == ["b", "d"]
    ((sample,),) = generate(custom(COPIES % ("", ""), name="plain.py"), chat(1))
    assert sample.response == "d"
    with pytest.raises(GenerationError, match="cannot tell which of 2 samples this conversation belongs to: 2 of them"):
        generate(custom(COPIES % ("", ""), name="other.py"), chat(2))


def test_of_different_conversations_the_one_that_goes_on_is_meant(generate, custom, say, chat):
    say("a<|end|>", "b<|end|>")
    (samples,) = generate(custom(COPIES % (", sample=sample", "")), [chat(2)[0], chat(2, "3 + 3?")[1]])
    assert [sample.response for sample in samples] == ["b", "b"]


def test_another_prompt_replaces_the_samples(generate, custom, say, chat, tokenizer):
    say("4<|end|>")
    source = (
        "from slime_rollout import generate_single\n"
        "async def custom_generate(args, sample, sampling_params):\n"
        "    sample.response = await generate_single([{'role': 'system', 'content': 'Add.'}, *sample.prompt])\n"
        "    return sample\n"
    )
    ((sample,),) = generate(custom(source), chat())
    assert tokenizer.decode(sample.prompt_tokens) == (
        "<|start|>system:Add.<|end|><|start|>user:2 + 2?<|end|><|start|>assistant:"
    )
    assert sample.response == "4"


def wrong(change):
    return (
        "from slime_rollout import generate_single\n"
        "async def custom_generate(args, sample, sampling_params):\n"
        "    talk = sample.prompt\n"
        "    said = await generate_single(talk)\n"
        "    answer, more = {'role': 'assistant', 'content': said}, {'role': 'user', 'content': '?'}\n"
        f"    {change}\n"
        "    await generate_single(talk)\n"
        "    return sample\n"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("pass", r"continues with \[\]; first append what generate_single returned"),
        ("talk.append(more)", r"continues with \[{'role': 'user', 'content': '\?'}\]; first append"),
        ("talk += [{**answer, 'content': 'edited'}, more]", "continues with .*edited.*unchanged: the tokens are those"),
        ("talk.append(answer)", "has nothing new for the model; append a message after the assistant's"),
        ("talk[0] = more; talk += [answer, more]", "does not continue the last turn: its first 1"),
    ],
)
def test_a_conversation_that_does_not_go_on(generate, custom, say, chat, change, message):
    say("4<|end|>")
    (sample,) = chat()
    tokens = list(sample.tokens)
    with pytest.raises(GenerationError, match=f"the conversation of sample 10 {message}"):
        generate(custom(wrong(change)), [sample])
    assert (sample.tokens, sample.response_length, sample.status) == (tokens, 0, Status.PENDING)
    assert sample.prompt == [{"role": "user", "content": "2 + 2?"}]


def test_a_text_that_is_not_the_prompt(generate, custom, chat):
    source = wrong("pass").replace("talk = sample.prompt", "talk = 'x'")
    with pytest.raises(GenerationError, match="generate_single got a text that is not the prompt of sample 10"):
        generate(custom(source), chat())


def test_a_sample_of_somebody_else(generate, custom, chat):
    source = COPIES % (", sample=copy.copy(sample)", "")
    with pytest.raises(GenerationError, match="this function was not called with sample 10"):
        generate(custom("import copy\n" + source), chat(2))


ASKS = """
from slime_rollout import get_model_url, post
from slime_rollout.engine.addresses import key_for

async def custom_generate(args, sample, sampling_params):
    assert args.sglang_api_key == "the key"
    assert key_for(get_model_url(args)) == "the key"
    assert key_for("http://tools.example/run") is None
    reply = await post(get_model_url(args), {"input_ids": sample.tokens, "sampling_params": sampling_params})
    sample.append_response(reply["output_ids"], text=reply["text"])
    sample.status = sample.Status.COMPLETED
    return sample
"""


def test_a_request_of_a_functions_own_carries_the_key_to_routers_of_the_run_alone(generate, custom, say, chat, engine):
    say("42<|end|>")
    args = router_args(engine.url, {}) | {"sglang_api_key": "the key"}
    remember_key(HookArgs(args))
    generate(custom(ASKS), chat()[:1], args=args)
    assert [headers.get("Authorization") for headers in engine.headers] == ["Bearer the key"]
