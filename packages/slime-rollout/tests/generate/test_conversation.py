import pytest

from slime_core.types import Status
from slime_rollout.errors import GenerationError

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
        ("pass", r"goes on with \[\]; append what generate_single returned"),
        ("talk.append(more)", r"goes on with \[{'role': 'user', 'content': '\?'}\]; append"),
        ("talk += [{**answer, 'content': 'edited'}, more]", "goes on with .*edited.*as it is: the tokens are those"),
        ("talk.append(answer)", "has nothing new for the model; append a message after the assistant's"),
        ("talk[0] = more; talk += [answer, more]", "does not go on from the last turn: its first 1"),
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
    with pytest.raises(GenerationError, match="sample 10 is none that this function was called with"):
        generate(custom("import copy\n" + source), chat(2))
