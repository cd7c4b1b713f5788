"""Contract tests of user-defined hooks: each is called as in a rollout, with a stand-in engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from aiohttp import web

from slime_core.config import AlgorithmConfig
from slime_core.errors import SlimeError
from slime_core.files import write_whole
from slime_core.hooks import HookArgs
from slime_core.metrics import eval_metrics, rollout_metrics
from slime_core.schedule import train_samples
from slime_core.types import Group, Keep, Prompt, RolloutBatch, Sample, Status
from slime_core.words import counted
from slime_rollout.config import RolloutConfig
from slime_rollout.data import (
    Fate,
    PromptDataset,
    PromptEncoder,
    RolloutDataSource,
    SourceCalls,
    checked_groups,
    load_tokenizer,
    make_data_source,
)
from slime_rollout.filters import make_filter
from slime_rollout.generate import EngineClient, GenerationContext, SamplingParams, make_generate, number_parts
from slime_rollout.generate.context import ROLLOUT_STREAM, with_router
from slime_rollout.generate.custom import TOKENIZED_KEY
from slime_rollout.hooks import GivenHook
from slime_rollout.hooks.rollout_function import find_functions
from slime_rollout.hooks.rollouts import RewardPostProcess, RolloutHooks, SampleHooks
from slime_rollout.hooks.train_data import DataPostprocess
from slime_rollout.reward_config import REMOTE_RULES
from slime_rollout.rewards import find_rule, make_scorer
from slime_rollout.threads import all_of, blaming, call_within

TIME_LIMIT = 60.0
REPLIES = ("The answer is 4.", "I do not know.")
_GROUPS = 2
_PROMPTS = 8
_BLOCKED_SECONDS = 1.0
_TICK = 0.05
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SUMS = (("2 + 2", "4"), ("3 + 4", "7"), ("5 + 5", "10"), ("1 + 8", "9"))


class ContractError(SlimeError):
    """A hook that loads, but breaks its contract."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """Settings, prompts and a stand-in engine's replies, for one trial of each hook."""

    config: RolloutConfig
    args: HookArgs
    tokenizer: Any  # the model's, or a stand-in
    dataset: PromptDataset
    replies: Sequence[str]  # what the engine says, in turn
    time_limit: float  # for all calls of one hook together, in seconds
    turns: set[int] = dataclasses.field(default_factory=set)  # of interactions, from 0, that the engine was asked for

    @classmethod
    def make(
        cls,
        config: RolloutConfig,
        hook_args: HookArgs,
        *,
        has_model: bool,
        has_prompts: bool,
        replies: Sequence[str] = REPLIES,
        time_limit: float = TIME_LIMIT,
    ) -> Trial:
        """The trial of a configuration, with stand-ins for a missing tokenizer and missing prompts."""
        tokenizer = (
            load_tokenizer(config.data.hf_checkpoint, trust_remote_code=config.data.trust_remote_code)
            if has_model
            else make_tokenizer()
        )
        encoder = PromptEncoder.of(config, tokenizer)
        with tempfile.TemporaryDirectory(prefix="slime-hooks-") as directory:
            if has_prompts:
                path = config.data.prompt_paths[0]
                path += "" if path.endswith("]") else f"@[0:{_PROMPTS}]"
            else:
                path = write_prompts(Path(directory) / "prompts.jsonl", chat=config.data.apply_chat_template)
            dataset = PromptDataset.load(path, config, encoder)
        return cls(config, hook_args, tokenizer, dataset, replies, time_limit)

    def source(self) -> RolloutDataSource:
        """The default data source of the prompts."""
        return RolloutDataSource(self.dataset, samples_per_prompt=self.size, args=self.args)

    @property
    def size(self) -> int:
        """Samples of a group, at least two."""
        return max(self.config.selection.n_samples_per_prompt, 2)


def try_hook(hook: GivenHook, trial: Trial) -> str:
    """Call a hook as a rollout would, and say what it did in a few words; a `SlimeError` if it broke its contract."""
    trial = dataclasses.replace(trial, config=hook.config)
    with blaming("it", ContractError):
        return str(call_within(trial.time_limit, "it", _TRIALS[hook.kind.field], trial, flag="--time-limit"))


def _try_generate(trial: Trial) -> str:
    made, evaluated = (asyncio.run(_generate(trial, stream)) for stream in (ROLLOUT_STREAM, "eval/trial"))
    tokens, trained = (
        sum(getattr(one, name) for one in made.samples) for name in ("response_length", "trained_tokens")
    )
    text = (
        f"{_GROUPS * trial.size} samples became {len(made.samples)} with {made.requests} requests; {trained} of "
        f"{tokens} tokens are trained on"
    )
    if any(TOKENIZED_KEY in sample.metadata for sample in made.samples):
        text += "; responses were set as text, so no engine's log-probs are known"
    if (blocked := max(made.blocked, evaluated.blocked)) > _BLOCKED_SECONDS:
        text += (
            f"; nothing else could run for {blocked:.1f} s: await what takes time (asyncio.to_thread, asyncio.sleep)"
        )
    return text


def _try_reward(trial: Trial) -> str:
    groups = _rewarded(trial)
    values = [str(sample.reward) for group in groups for sample in group]
    return f"the rewards of {counted(len(values), 'response')} were {', '.join(values)}"


def _generated(trial: Trial) -> list[Group]:
    """Groups as in a run: made by its generate function and seen by its sample hook."""
    hooks = SampleHooks(trial.config, trial.args)

    async def make() -> list[Sample]:
        made = (await _generate(trial)).samples
        return [await hooks(sample, evaluation=False) for sample in made]

    groups: dict[int, Group] = {}
    for sample in asyncio.run(make()):
        groups.setdefault(sample.group_index, []).append(sample)
    return list(groups.values())


def _rewarded(trial: Trial) -> list[Group]:
    """The same, scored by its custom reward."""
    scorer, groups = make_scorer(trial.config, trial.args, strict=True), _generated(trial)

    async def score() -> None:
        # As in a run, a function of several samples gets those of several prompts, unless it is of a group.
        for samples in groups if scorer.group_reward is not None else [[one for group in groups for one in group]]:
            if scorer.group_reward is not None:
                values = await scorer.group_reward(samples)
            else:
                values = await all_of([scorer.reward(sample) for sample in samples])
            for sample, value in zip(samples, values, strict=True):
                sample.reward = value
                sample.scalar_reward(trial.config.rewards.reward_key)

    asyncio.run(score())
    return groups


def _try_rollout(trial: Trial) -> str:
    config = trial.config.changed(rollout_batch_size=_GROUPS, n_samples_per_prompt=trial.size)
    source = make_data_source(config, trial.dataset, trial.args)

    async def make() -> str:
        async with StandInEngine(trial.tokenizer, trial.replies, trial.turns).serve() as url:
            function, eval_function = find_functions(config, with_router(trial.args, url))
            said = []
            if function is not None:
                groups, _ = await function.collect(0, SourceCalls(source, config))
                trained = sum(sample.trained_tokens for group in groups for sample in group)
                said.append(f"it made {_GROUPS} groups, and {trained} tokens are trained on")
            if eval_function is not None and config.sampling.eval_function_path is not None:
                scores = (await eval_function.evaluate(0, SourceCalls(source, config))).scores
                said.append("it scored " + ", ".join(f"{name} {score:g}" for name, score in scores.items()))
            return "; ".join(said)

    said = asyncio.run(make())
    if problem := source.check_ledger():
        raise ContractError(problem)
    return said


def _try_filter(trial: Trial) -> str:
    keep, key, verdicts = make_filter(trial.config, trial.args), trial.config.rewards.reward_key, []
    for rewards in ((0.0, 1.0), (1.0, 1.0)):
        group = _scored(trial)[0]
        for place, sample in enumerate(group):
            value = rewards[place % 2]
            sample.reward = value if key is None else {**_parts(sample), key: value}
        verdict = Keep() if keep is None else keep(group)
        verdicts.append(
            f"{'keeps' if isinstance(verdict, Keep) else 'drops'} rewards {rewards[0]:g} and {rewards[1]:g}"
        )
    return "it " + ", ".join(verdicts)


def _try_source(trial: Trial) -> str:
    source, again = (make_data_source(trial.config, trial.dataset, trial.args) for _ in range(2))
    first = checked_groups(source.get_samples(3), 3)
    source.add_samples(first)
    state = json.loads(json.dumps(source.state_dict()))
    again.load_state_dict(state)
    second, repeated = (checked_groups(one.get_samples(2), 2) for one in (source, again))
    if second != repeated:
        raise ContractError("after its saved state was loaded, it hands out other groups than without that")
    source.ledger.settle(second, Fate.TRAINED)
    if problem := source.check_ledger():
        raise ContractError(problem)
    back = len({group[0].group_index for group in first} & {group[0].group_index for group in second})
    return f"of 3 returned groups, {back} came among the next 2; it continues from its saved state"


def _scored(trial: Trial) -> list[Group]:
    """Groups as hooks find them that come after the reward: those of a run, whose rewards go 0 and 1 in turn.

    What the functions of a run put into samples is in them: metadata, and a reward's further parts. A reward that a
    service would give has only the entry of ``--reward-key``.
    """
    rewards, key = trial.config.rewards, trial.config.rewards.reward_key
    groups = _generated(trial) if rewards.custom_rm_path is None else _rewarded(trial)
    if rewards.rule is not None and rewards.rule not in REMOTE_RULES:
        rule = find_rule(rewards.rule)
        for sample in (sample for group in groups for sample in group):
            sample.reward = rule.score(sample.response, sample.label or "", sample.metadata)
    for place, sample in enumerate(sample for group in groups for sample in group):
        value = float(place % 2)
        sample.reward = value if key is None else {**_parts(sample), key: value}
    return groups


def _parts(sample: Sample) -> dict[str, Any]:
    return sample.reward if isinstance(sample.reward, dict) else {}


def _try_samples(trial: Trial) -> str:
    hooks, samples = SampleHooks(trial.config, trial.args), asyncio.run(_generate(trial)).samples

    async def see() -> list[Sample]:
        trained = [await hooks(sample, evaluation=False) for sample in samples[1:]]
        return [await hooks(samples[0], evaluation=True), *trained]

    seen, before = asyncio.run(see()), [one.trained_tokens for one in samples]
    after = [one.trained_tokens for one in seen]
    return f"of {len(seen)} samples {sum(before)} tokens are trained on, {sum(after)} afterwards"


def _try_groups(trial: Trial) -> str:
    hooks, groups, source = RolloutHooks(trial.config, trial.args), _scored(trial), trial.source()
    hooks.see_groups(groups, _scored(trial)[:1], source.get_samples)
    removed = sum(sample.remove_sample for group in groups for sample in group)
    return f"it marked {removed} of {sum(map(len, groups))} samples with remove_sample"


def _try_log(trial: Trial) -> str:
    hooks, samples = RolloutHooks(trial.config, trial.args), [one for group in _scored(trial) for one in group]
    usual, extra = rollout_metrics(samples, trial.config.rewards.reward_key), {"response_tokens": 1.0}
    return _compared(usual | extra, hooks.log(0, samples, usual, dict(extra), 1.0))


def _try_eval_log(trial: Trial) -> str:
    hooks, samples = RolloutHooks(trial.config, trial.args), [one for group in _scored(trial) for one in group]
    key = trial.config.rewards.reward_key
    usual = eval_metrics("trial", samples, key)
    return _compared(usual, asyncio.run(hooks.log_eval(0, {"trial": samples}, usual, lambda name: key)))


def _compared(before: dict[str, float], after: dict[str, float]) -> str:
    added, left = sorted(after.keys() - before.keys()), len(before.keys() & after.keys())
    return f"of {len(before)} metrics {left} are left, and it added {', '.join(added) or 'none'}"


def _try_rewards(trial: Trial) -> str:
    samples = [one for group in _scored(trial) for one in group]
    raw, rewards = RewardPostProcess(trial.config, trial.args)(samples)
    return f"raw rewards {', '.join(f'{value:g}' for value in raw)} became {', '.join(f'{one:g}' for one in rewards)}"


def _try_train_data(trial: Trial) -> str:
    batch, key = RolloutBatch(rollout_id=0, groups=_scored(trial)), trial.config.rewards.reward_key
    samples = train_samples(batch.columns().samples, AlgorithmConfig(), key)
    after = DataPostprocess(trial.config, trial.args)(0, samples)
    tokens = [sum(int(one.loss_mask.sum()) for one in ones) for ones in (samples, after)]
    return (
        f"of {len(samples)} samples {tokens[0]} tokens are trained on, {tokens[1]} afterwards; rewards "
        f"{', '.join(f'{one.reward:g}' for one in samples)} became {', '.join(f'{one.reward:g}' for one in after)}"
    )


class _Made(NamedTuple):
    """Samples, the requests they took, and the longest time in which nothing else could run, in seconds."""

    samples: Group
    requests: int
    blocked: float


async def _generate(trial: Trial, stream: str = ROLLOUT_STREAM) -> _Made:
    """The samples that the run's generate function makes."""
    make, engine = make_generate(trial.config), StandInEngine(trial.tokenizer, trial.replies, trial.turns)
    source, samples = trial.source(), []
    async with (
        engine.serve() as url,
        EngineClient(url, concurrency=64, timeout=trial.time_limit, retry_delays=()) as client,
        _longest_gap() as gap,
    ):
        context = GenerationContext(
            client=client,
            params=SamplingParams.for_rollout(trial.config),
            run_seed=1,
            stream=stream,
            tokenizer=trial.tokenizer,
            args=with_router(trial.args, url),
        )
        for group in source.get_samples(_GROUPS):
            parts = [part for unit in await all_of(make(group, context)) for part in unit]
            if aborted := [part for part in parts if part.status is Status.ABORTED]:
                raise ContractError(f"sample {aborted[0].index} came back aborted, and nothing was aborted")
            number_parts([parts], source.fresh_index)
            samples += parts
    return _Made(samples, engine.requests, gap[0])


@contextlib.asynccontextmanager
async def _longest_gap() -> AsyncIterator[list[float]]:
    """The longest time that the event loop was blocked within the block, in seconds."""
    gap = [0.0]

    async def tick() -> None:
        while True:
            start = time.monotonic()
            await asyncio.sleep(_TICK)
            gap[0] = max(gap[0], time.monotonic() - start - _TICK)

    ticking = asyncio.create_task(tick())
    try:
        await asyncio.sleep(0)
        yield gap
        await asyncio.sleep(2 * _TICK)
    finally:
        ticking.cancel()


_TRIALS: dict[str, Callable[[Trial], str]] = {
    "data_source_path": _try_source,
    "buffer_filter_path": _try_source,
    "custom_generate_function_path": _try_generate,
    "rollout_function_path": _try_rollout,
    "eval_function_path": _try_rollout,
    "custom_rm_path": _try_reward,
    "dynamic_sampling_filter_path": _try_filter,
    "rollout_sample_hook_path": _try_samples,
    "rollout_sample_filter_path": _try_groups,
    "rollout_all_samples_process_path": _try_groups,
    "custom_reward_post_process_path": _try_rewards,
    "rollout_data_postprocess_path": _try_train_data,
    "custom_rollout_log_function_path": _try_log,
    "custom_eval_rollout_log_function_path": _try_eval_log,
}


def make_tokenizer() -> Any:
    """A byte tokenizer with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
    )


def write_prompts(path: Path, *, chat: bool) -> str:
    """Write a prompt file of small sums; returns its path."""
    rows = []
    for question, answer in _SUMS:
        prompt: Prompt = [{"role": "user", "content": f"{question}?"}] if chat else f"{question} ="
        rows.append({"prompt": prompt, "label": answer})
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


class StandInEngine:
    """Answers ``/generate`` as SGLang does: the n-th turn of every interaction with the n-th reply, in a cycle."""

    def __init__(self, tokenizer: Any, replies: Sequence[str], turns: set[int] | None = None) -> None:
        self._tokenizer, self._replies = tokenizer, replies
        self._turns = set() if turns is None else turns
        self._said: list[tuple[list[int], int]] = []
        self.requests = 0

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """Serve within the block; gives the address."""
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        runner = web.AppRunner(app, shutdown_timeout=1.0, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()

    async def _generate(self, request: web.Request) -> web.Response:
        self.requests += 1
        body = await request.json()
        asked = body.get("input_ids") or self._tokenizer(str(body.get("text")), add_special_tokens=False)["input_ids"]
        turn = max((turn + 1 for said, turn in self._said if asked[: len(said)] == said), default=0)
        self._turns.add(turn)
        text = self._replies[turn % len(self._replies)]
        params = body.get("sampling_params") or {}
        tokens, finish = self._sample(text, params)
        self._said.append(([*asked, *tokens], turn))
        reply = {
            "text": self._tokenizer.decode(tokens, skip_special_tokens=params.get("skip_special_tokens", True)),
            "output_ids": tokens,
            "meta_info": {
                "finish_reason": finish,
                "weight_version": "1",
                "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            },
        }
        return web.Response(body=orjson.dumps(reply), content_type="application/json")

    def _sample(self, text: str, params: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        tokens = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        for count in range(1, len(tokens) + 1):
            said = self._tokenizer.decode(tokens[:count])
            if found := [stop for stop in params.get("stop") or [] if stop in said]:
                return tokens[:count], {"type": "stop", "matched": found[0]}
        tokens.append(self._tokenizer.eos_token_id)
        limit = int(params.get("max_new_tokens") or 128)
        if len(tokens) > limit:
            return tokens[:limit], {"type": "length", "length": limit}
        return tokens, {"type": "stop", "matched": tokens[-1]}
