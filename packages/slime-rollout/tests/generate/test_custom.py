import asyncio
import time

import pytest

from slime_core.errors import ConfigError
from slime_core.types import Status
from slime_rollout.config import RolloutConfig
from slime_rollout.errors import GenerationError
from slime_rollout.generate import (
    EngineClient,
    GenerationContext,
    SamplingParams,
    make_generate,
    number_parts,
    single_turn,
)
from slime_rollout.generate.custom import CustomGenerate

ONE = (
    "import copy\nfrom slime_core.types import Status\nasync def custom_generate(args, sample, sampling_params):\n    "
)
ALL = "import copy\nfrom slime_core.types import Status\nasync def custom_generate(args, samples):\n    "


def test_without_a_path_there_is_a_single_turn(tmp_path):
    config = {"hf_checkpoint": "m", "prompt_data": "p", "rollout_batch_size": 1}
    assert make_generate(RolloutConfig.of(**config)) is single_turn
    (tmp_path / "own.py").write_text(ONE + "return sample")
    made = make_generate(RolloutConfig.of(**config, custom_generate_function_path=f"{tmp_path}/own.py"))
    assert isinstance(made, CustomGenerate) and not made.takes_group
    with pytest.raises(ConfigError, match="there_is_none"):
        make_generate(RolloutConfig.of(**config, custom_generate_function_path="there_is_none.fn"))


@pytest.mark.parametrize(
    ("signature", "takes_group"),
    [
        ("args, sample, sampling_params", False),
        ("args, sample, sampling_params, evaluation=False", False),
        ("args, sample, sampling_params, *, evaluation", False),
        ("args, one, params, more=None, **rest", False),
        ("args, samples, evaluation=False", True),
        ("args, samples", True),
        ("args, samples, sampling_params", False),
        ("*args, **rest", False),
    ],
)
def test_the_forms(generate, custom, chat, signature, takes_group):
    made = custom(
        f"async def custom_generate({signature}):\n"
        "    for one in {**locals()}.values():\n"
        "        for sample in one if isinstance(one, (list, tuple)) else [one]:\n"
        "            if hasattr(sample, 'response'):\n"
        f"                sample.response = repr(sorted(locals()))\n"
    )
    assert made.takes_group is takes_group
    units = generate(made, chat(2))
    assert [len(unit) for unit in units] == ([2] if takes_group else [1, 1])


@pytest.mark.parametrize("form", [ONE, ALL], ids=["sample", "samples"])
def test_evaluation_is_told(generate, custom, chat, form):
    source = form.replace("):", ", evaluation=False):") + (
        "for one in ([sample] if 'sample' in locals() else samples): one.response = f'{evaluation} {args.max_turns}'"
    )
    for stream, text in (("rollout", "False 4"), ("eval/sums", "True 4")):
        units = generate(custom(source), chat(2), stream=stream)
        assert [sample.response for unit in units for sample in unit] == [text] * 2


def test_the_sampling_params_have_the_engines_names(generate, custom, chat):
    made = custom(ONE + "sample.metadata['got'] = sampling_params; sample.response = 'x'")
    ((sample,),) = generate(made, chat(), temperature=0.5, stop=("!",))
    got = sample.metadata["got"]
    assert {"temperature", "top_p", "top_k", "max_new_tokens", "stop", "stop_token_ids", "sampling_seed"} <= got.keys()
    assert (got["temperature"], got["stop"]) == (0.5, ["!"])


def test_text_alone_is_tokenized_and_marked(generate, custom, chat, tokenizer):
    ((done,), (cut,), (ended,)) = generate(
        custom(
            ONE + "sample.response = '42' if sample.index < 12 else '42<|end|>'\n"
            "    if sample.index == 11: sample.status = 'truncated'\n    return sample"
        ),
        chat(3),
    )
    plain = tokenizer.encode("42", add_special_tokens=False)
    assert (done.response_tokens, cut.response_tokens, ended.response_tokens) == ([*plain, 0], plain, [*plain, 0])
    assert (done.status, cut.status) == (Status.COMPLETED, Status.TRUNCATED)
    for sample in (done, cut, ended):
        assert sample.metadata["tokenized_by_slime"] is True
        assert (sample.rollout_log_probs, sample.weight_versions, sample.loss_mask) == (None, [], None)


def test_what_a_function_sets_is_kept(generate, custom, chat):
    made = custom(
        ONE + "sample.tokens, sample.response, sample.response_length = [*sample.tokens, 7, 8], 'x', 2\n"
        "    sample.loss_mask, sample.rollout_log_probs, sample.weight_versions = (1, 0), (-0.5, 0), [3, -1]\n"
        "    sample.reward, sample.metadata['tries'] = {'score': 1, 'style': 0.5}, 3\n"
        "    return sample"
    )
    (sample,) = chat()
    prompt = list(sample.tokens)
    ((got,),) = generate(made, [sample])
    assert got.tokens == [*prompt, 7, 8] and (got.loss_mask, got.rollout_log_probs) == ([1, 0], [-0.5, 0.0])
    assert (got.weight_versions, got.reward, got.metadata["tries"]) == ([3, -1], {"score": 1, "style": 0.5}, 3)
    assert got.status is Status.COMPLETED and "tokenized_by_slime" not in got.metadata


PARTS = (
    "sample.response = 'a'\n    other = copy.deepcopy(sample)\n    other.response = 'b'\n"
    "    third = copy.deepcopy(other)\n    return [sample, other, third]"
)


def test_several_samples_of_one_trajectory(generate, custom, chat):
    units = generate(custom(ONE + PARTS), chat(2))
    group = [sample for unit in units for sample in unit]
    assert [sample.trajectory_id for sample in group] == [10] * 3 + [11] * 3
    assert [sample.response for sample in group] == ["a", "b", "b"] * 2
    fresh = iter(range(100, 200))
    number_parts([group], lambda: next(fresh))
    assert [sample.index for sample in group] == [10, 100, 101, 11, 102, 103]
    number_parts([group], lambda: next(fresh))  # what has a number keeps it
    assert [sample.index for sample in group] == [10, 100, 101, 11, 102, 103]


def test_parts_of_several_samples(generate, custom, chat):
    """Flat or nested, in any order: they come back in the samples' order."""
    source = ALL + (
        "made = []\n    for sample in samples:\n        sample.response = f'{sample.index}a'\n"
        "        other = copy.deepcopy(sample)\n        other.response = f'{sample.index}b'\n"
        "        made.append([sample, other])\n    made.reverse()\n    return made"
    )
    (group,) = generate(custom(source), chat(2))
    assert [sample.response for sample in group] == ["10a", "10b", "11a", "11b"]


def test_an_unfinished_part_begins_the_trajectory_anew(generate, custom, chat):
    source = ONE + PARTS.replace("third = ", "other.status = 'aborted'\n    third = ")
    (sample,) = chat()
    prompt = list(sample.tokens)
    assert generate(custom(source), [sample]) == [[sample]]
    assert (sample.status, sample.tokens, sample.response, sample.trajectory_id) == (Status.ABORTED, prompt, "", None)


def test_a_prompt_that_a_function_changed_is_the_rows_own_again(generate, custom, chat):
    """Or whatever the function puts before it would be there twice."""
    source = ONE + (
        "sample.tokens = [9, *sample.tokens]\n"
        "    sample.append_response([7], text='a', log_probs=[-1.0])\n    sample.status = 'aborted'\n"
    )
    (sample,) = chat()
    prompt = list(sample.tokens)
    for _ in range(2):
        assert generate(custom(source), [sample]) == [[sample]]
        assert (sample.status, sample.tokens, sample.response) == (Status.ABORTED, prompt, "")
    source += "custom_generate.continues_aborted = True"
    made = custom(source, name="continues.py")
    for tokens in ([9, *prompt, 7], [9, 9, *prompt, 7, 7]):  # the second time it goes on, and could have looked
        generate(made, [sample])
        assert sample.tokens == tokens
        assert sample.metadata["rows_prompt"] == {"prompt": sample.prompt, "tokens": prompt}
    sample.status = Status.FAILED
    generate(made, [sample])
    assert sample.tokens == [9, *prompt, 7]


def test_the_rows_prompt_is_kept_only_where_it_is_needed(generate, custom, chat):
    plain = custom(ONE + "sample.response = 'a'")
    other = custom(ONE + "sample.tokens = [9, *sample.tokens]\n    sample.append_response([7])", name="other.py")
    assert not any("rows_prompt" in sample.metadata for (sample,) in generate(plain, chat(2)))
    assert not any("rows_prompt" in sample.metadata for (sample,) in generate(other, chat(2), stream="eval/a"))
    assert all("rows_prompt" in sample.metadata for (sample,) in generate(other, chat(2)))


@pytest.mark.parametrize("form", ["sample", "samples"])
def test_what_is_finished_is_not_seen(generate, custom, chat, form):
    made = custom(
        ONE + "sample.response = 'new'" if form == "sample" else ALL + "for sample in samples: sample.response = 'new'"
    )
    group = chat(3)
    group[1].append_response([7], text="old", log_probs=[-1.0])
    group[1].status = Status.TRUNCATED
    units = generate(made, group)
    assert [sample.response for unit in units for sample in unit] == ["new", "old", "new"]
    for sample in group:
        sample.status = Status.COMPLETED
    assert [sample for unit in generate(made, group) for sample in unit] == group


def test_what_was_cut_off_is_its_prompt_again_unless_the_function_wants_it(generate, custom, chat):
    def cut_off():
        (sample,) = chat()
        sample.append_response([7], text="old", log_probs=[-1.0])
        sample.status = Status.ABORTED
        return sample

    source = ONE + "sample.response = sample.response + f'{sample.status} {sample.response_length}'"
    ((sample,),) = generate(custom(source), [cut_off()])
    assert sample.response == "pending 0"
    source += "\n    sample.status = 'completed'\ncustom_generate.continues_aborted = True"
    ((sample,),) = generate(custom(source, name="continues.py"), [cut_off()])
    assert (sample.response, sample.response_length) == ("oldaborted 1", 1)


def test_a_function_may_do_what_it_likes_with_the_list(generate, custom, chat):
    """It is its own, and so are prompts that are lists."""
    source = ALL + (
        "samples.reverse()\n    made = list(samples)\n    for one in made:\n        one.response = 'a'\n"
        "        one.prompt.append({'role': 'tool', 'content': '4'})\n    samples.clear()\n    return made"
    )
    group = chat(3)
    (made,) = generate(custom(source), group)
    assert made == group and [sample.response for sample in made] == ["a"] * 3
    assert all(sample.prompt == [{"role": "user", "content": "2 + 2?"}] for sample in made)


def test_a_failed_sample_may_be_given_back(generate, custom, chat):
    ((sample,),) = generate(custom(ONE + "sample.status = 'failed'"), chat())
    assert (sample.status, sample.response_length) == (Status.FAILED, 0)


NONSENSE = {
    "nothing": ("return sample", "sample 10 came back without a response; set response"),
    "a text": ("return 'yes'", "returned 'yes' for sample 10; return what it was called with"),
    "an empty list": ("return []", r"returned '\[\]' for sample 10"),
    "a list of texts": ("return ['yes']", r"returned \"\['yes'\]\" for sample 10"),
    "twice the same": ("sample.response = 'a'; return [sample, sample]", "returned sample 10 twice; make a copy"),
    "another trajectory": (
        "other = copy.deepcopy(sample); other.index = 77; return [sample, other]",
        "returned sample 77 of trajectory 77 for sample 10; leave index and trajectory_id as they are",
    ),
    "another number": (
        "sample.response, sample.index = 'a', 77",
        "returned sample 77 of trajectory 77 for sample 10; leave index",
    ),
    "another group": (
        "sample.response, sample.group_index = 'a', 9",
        "sample 10 was returned in group 9, not 1",
    ),
    "no length": (
        "sample.tokens = [1, 2, 3]; sample.response = 'a'",
        "other tokens than its prompt's and response_len",
    ),
    "too long": ("sample.response_length = 999", "left sample 10: response_length 999 is not between 0 and 23 tokens"),
    "a short mask": ("sample.response, sample.loss_mask = 'abc', [1]", "left sample 10: loss_mask has 1 entries"),
    "a status": ("sample.response, sample.status = 'a', 'fine'", "left sample 10: status 'fine' is unknown"),
    "a number": ("sample.response = 42", "left sample 10: response must be a string, got int"),
    "a reward": ("sample.response, sample.reward = 'a', 'good'", "left sample 10: reward must be a number"),
    "NaN": ("sample.response, sample.reward = 'a', float('nan')", "sample 10 has the reward nan; set a finite number"),
    "NaN by name": ("sample.response, sample.reward = 'a', {'x': float('inf')}", "sample 10 has the reward {'x': inf}"),
    "no rewards": ("sample.response, sample.reward = 'a', {}", "sample 10 has the reward {}"),
    "log-probs": (
        "sample.tokens += [7]; sample.response_length, sample.rollout_log_probs = 1, [float('-inf')]",
        "sample 10 has rollout_log_probs that are not finite",
    ),
    "no prompt": ("sample.tokens, sample.response_length = [7], 1", "a response of 1 tokens and none of the prompt"),
    "an object": ("sample.response, sample.metadata['x'] = 'a', object()", "left sample 10: metadata"),
    "an error of two lines": ("raise ValueError('no\\nno')", r"raised ValueError for sample 10: no no \("),
    "an error": ("raise ValueError('no')", r"raised ValueError for sample 10: no \(.*custom_generate.py, line 4\)"),
    "an exit": ("raise SystemExit('no')", "raised SystemExit for sample 10: no"),
    "its own time limit": ("raise TimeoutError('mine')", "raised TimeoutError for sample 10: mine"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_one_line_that_names_function_and_sample(generate, custom, chat, name):
    body, message = NONSENSE[name]
    (sample,) = chat()
    tokens = list(sample.tokens)
    with pytest.raises(GenerationError, match=message) as caught:
        generate(custom(ONE + body), [sample])
    text = str(caught.value)
    assert text.startswith("--custom-generate-function-path ") and "custom_generate.py" in text and "\n" not in text
    assert (sample.tokens, sample.response_length, sample.status) == (tokens, 0, Status.PENDING)
    assert (sample.index, sample.group_index, sample.trajectory_id) == (10, 1, None)


def test_a_sample_that_is_left_out(generate, custom, chat):
    source = ALL + "for one in samples: one.response = 'a'\n    return samples[:1]"
    with pytest.raises(GenerationError, match="returned nothing for sample 11"):
        generate(custom(source), chat(2))
    with pytest.raises(GenerationError, match="raised ValueError for 2 samples: no"):
        generate(custom(ALL + "raise ValueError('no')", name="other.py"), chat(2))


def test_one_that_hangs_is_stopped(generate, custom, chat):
    made = custom("import asyncio\n" + ONE + "sample.response = 'a'; await asyncio.sleep(3600)", timeout=0.2)
    start = time.monotonic()
    with pytest.raises(GenerationError, match=r"took more than 0.2 s for sample 10; .*--custom-generate-timeout"):
        generate(made, chat())
    assert time.monotonic() - start < 15


def test_a_cancelled_error_of_its_own_is_an_error_like_others(generate, custom, chat):
    """Such as that of a task of the function's that it cancelled, and then awaited."""
    source = (
        "import asyncio\n" + ONE + "tool = asyncio.create_task(asyncio.sleep(600))\n"
        "    asyncio.get_running_loop().call_soon(tool.cancel)\n    await tool"
    )
    with pytest.raises(GenerationError, match="raised CancelledError for sample 10"):
        generate(custom(source), chat())


def test_only_so_many_run_at_once_and_waiting_is_not_counted(generate, custom, chat):
    made = custom(
        "import asyncio\nrunning, most = [], []\nasync def custom_generate(args, sample, sampling_params):\n"
        "    running.append(sample)\n    most.append(len(running))\n    await asyncio.sleep(0.15)\n"
        "    running.pop()\n    sample.response = str(max(most))\n    return sample",
        calls=2,
        timeout=0.6,
    )
    units = generate(made, chat(10))  # 0.75 s in all
    assert units[-1][0].response == "2"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def custom_generate(args, sample, sampling_params): pass", "is not async; write `async def`"),
        ("class custom_generate: pass", "is not async"),
        ("async def custom_generate(args): pass", r"takes \(args\); write \(args, sample, sampling_params"),
        ("async def custom_generate(args, sample): pass", r"takes \(args, sample\); write"),
        ("async def custom_generate(args, samples, more): pass", r"takes \(args, samples, more\); write"),
        ("async def custom_generate(args, sample, sampling_params, *, other): pass", "write"),
        ("async def other(args, samples): pass", "has no function custom_generate or generate; it has other"),
        ("1 / 0", "does not load: ZeroDivisionError: division by zero"),
    ],
)
def test_what_cannot_be_used_is_told_before_anything_runs(custom, source, message):
    with pytest.raises(ConfigError, match=message):
        custom(source)


def test_a_function_with_settings(generate, custom, chat):
    made = custom(
        "import functools\nasync def text(args, sample, sampling_params, *, word): sample.response = word\n"
        "custom_generate = functools.partial(text, word='own')\n"
    )
    assert generate(made, chat())[0][0].response == "own"


def test_an_object_that_can_be_called(generate, custom, chat):
    made = custom(
        "class Own:\n    async def __call__(self, args, sample, sampling_params):\n        sample.response = 'own'\n"
        "custom_generate = Own()\n"
    )
    assert generate(made, chat())[0][0].response == "own"


def test_once_the_rollout_has_enough_nothing_is_begun(custom, chat, engine, tokenizer):
    """What waits for its turn stays as it was handed out, and what ran stops at its next turn and goes on later."""

    async def inside():
        async with EngineClient(engine.url, concurrency=8, timeout=20.0) as client:
            context = GenerationContext(client=client, params=SamplingParams(), run_seed=5, tokenizer=tokenizer)
            made = custom(
                "import asyncio\nfrom slime_rollout import Trajectory, current\n"
                "async def custom_generate(args, sample, sampling_params):\n"
                "    trajectory = Trajectory.start(sample)\n"
                "    await trajectory.generate()\n"
                "    current().context.stop.set()\n"
                "    trajectory.observe([7])\n"
                "    while not trajectory.done:\n"
                "        await trajectory.generate()\n"
                "    sample.reward = 0.5\n",
                calls=1,
            )
            return await asyncio.gather(*made(group, context))

    group = chat(2)
    group[1].append_response([9], text="old", log_probs=[-1.0])
    group[1].status = Status.ABORTED
    begun, waiting = (unit[0] for unit in asyncio.run(asyncio.wait_for(inside(), 60)))
    assert (waiting.response_tokens, waiting.status) == ([9], Status.ABORTED)
    assert (begun.response_tokens, begun.status, begun.reward) == ([5, 6, 7], Status.ABORTED, None)
    assert begun.metadata["turns"] == 2  # so that it goes on with the seed of its second turn
    assert len(engine.bodies) == 1
