"""Generation before the scripted engine, which says what a test has written."""

import asyncio

import pytest
from transformers import AutoTokenizer

from slime_core.hooks import HookArgs
from slime_core.types import Sample
from slime_rollout.generate import EngineClient, GenerationContext, SamplingParams


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir):
    return AutoTokenizer.from_pretrained(tokenizer_dir)


@pytest.fixture
def chat(tokenizer):
    """Samples of one chat prompt."""

    def make(count=1, content="2 + 2?", **changes):
        messages = [{"role": "user", "content": content}]
        tokens = list(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        )
        return [
            Sample(
                index=10 + place,
                group_index=1,
                prompt=[dict(message) for message in messages],
                label="4",
                tokens=list(tokens),
                **changes,
            )
            for place in range(count)
        ]

    return make


@pytest.fixture
def say(engine, reply, tokenizer):
    """Script the engine: one text for each request, in order; what it says after the last is that again.

    A text that ends with ``<|end|>`` stops by itself; one that ends with a bar is cut off by the length limit, and one
    that ends with two by an abort.
    """

    def script(*texts):
        def answer(number, body):
            text = texts[min(number, len(texts) - 1)]
            kind = "abort" if text.endswith("||") else "length" if text.endswith("|") and text[-2] != ">" else "stop"
            tokens = tokenizer.encode(text.rstrip("|") if kind != "stop" else text, add_special_tokens=False)
            if kind == "abort":
                tokens.append(0)  # drawn when it was told to stop, and whether it ends the response was not looked at
            limit = body["sampling_params"]["max_new_tokens"]
            if len(tokens) > limit:
                tokens, kind = tokens[:limit], "length"
            shown = tokenizer.decode(tokens, skip_special_tokens=True)
            return reply(text=shown, tokens=tokens, version=str(number + 1), finish={"type": kind})

        engine.answer = answer

    return script


@pytest.fixture
def generate(engine, tokenizer):
    """Run a group through a way of generating; the samples of each unit."""

    def run(make, group, *, stream="rollout", args=None, turns=None, **params):
        async def inside():
            async with EngineClient(engine.url, concurrency=8, timeout=20.0, retry_delays=()) as client:
                context = GenerationContext(
                    client=client,
                    params=SamplingParams(**params),
                    run_seed=5,
                    stream=stream,
                    tokenizer=tokenizer,
                    args=HookArgs({"max_turns": 4, **(args or {})}),
                    turns=turns,
                )
                return await asyncio.gather(*make(group, context))

        return asyncio.run(asyncio.wait_for(inside(), 60))

    return run


@pytest.fixture
def custom(tmp_path):
    """A custom generate function from its source."""
    from slime_rollout.generate.custom import CustomGenerate

    def write(source, *, timeout=20.0, calls=64, name="custom_generate.py"):
        (tmp_path / name).write_text(source, encoding="utf-8")
        return CustomGenerate(f"{tmp_path}/{name}", timeout=timeout, calls=calls)

    return write
