"""Settings of prompts, sampling and rewards: frozen records, checked when built. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slime_core.algorithms import loss_that
from slime_core.errors import ConfigError
from slime_core.flags import Config, flag
from slime_core.needs import GENERATES, LAGS, ROLLOUTS, SAMPLES, UPDATES, given
from slime_rollout.hook_config import CALLED, HELD_OUT, TIMED_HOOKS, HookConfig, any_given, function_flag, time_limit
from slime_rollout.reward_config import RewardConfig, json_object

SFT_ROLLOUT = "slime.rollout.sft_rollout.generate_rollout"
BUILT_IN_ROLLOUTS = ("slime.rollout.sglang_rollout.generate_rollout", SFT_ROLLOUT)
"""The upstream system's names of rollout functions whose work is built in here."""
LOSS_MASKS = ("qwen", "qwen3", "qwen3_5", "distill_qwen")
PAIRS = loss_that(lambda row: row.on_pairs)
DROPS = any_given(
    *("dynamic_sampling_filter_path", "async_buffer_size", "max_weight_staleness", "custom_generate_function_path")
) | given("rm_on_failure", "replace")
"""Settings that may leave a group out of a rollout, or start more groups than it is made of."""
SAMPLED_SETS = (GENERATES, *HELD_OUT)
# What rendering a prompt decides itself.
_OWN_TEMPLATE_ARGUMENTS = {"conversation", "tools", "tokenize", "return_dict", "return_tensors"}


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config, needs=()):
    """Where prompts come from and how they are rendered."""

    hf_checkpoint: str = flag(
        help="Hugging Face directory: the model that engines start with, FP8 or INT4 too, its config and tokenizer",
        metavar="DIR",
    )
    trust_remote_code: bool = flag(
        False, help="run the Python code that --hf-checkpoint comes with: of its tokenizer, and of its model in engines"
    )
    prompt_data: tuple[str, ...] | str = flag(
        (),
        help="prompts: JSON Lines or one JSON array (also .gz, .bz2, .xz, .zst), Parquet, directories that `datasets` "
        "saved; several are joined; PATH@[a:b] takes rows a to b as Python does",
        metavar="PATH",
    )
    prompt_data_weights: tuple[float, ...] = flag(
        (),
        help="share of each data set of --prompt-data in an epoch; without it every prompt comes once",
        above=0,
        needs=given("prompt_data"),
    )
    input_key: str | None = flag(
        None, help="field of the prompt in a row, such as task.text; without it `prompt`, then `input`"
    )
    label_key: str | None = flag(
        None, help="field of the answer in a row, such as reward_model.ground_truth; without it `label` if there is one"
    )
    metadata_key: str = flag("metadata", help="field of a row's further values, handed to reward functions")
    tool_key: str = flag("tools", help="field of a row's tools, handed to the chat template and kept in its metadata")
    data_source_path: str | None = function_flag(
        "custom source of prompts: a class derived from slime_rollout.data.RolloutDataSource", needs=GENERATES
    )
    buffer_filter_path: str | None = function_flag(
        "custom function (args, buffer, num_samples) that chooses from the buffer", needs=(GENERATES, ROLLOUTS)
    )
    apply_chat_template: bool = flag(False, help="render prompts with the tokenizer's chat template")
    apply_chat_template_kwargs: str = flag(
        "{}",
        help='further arguments of the chat template, such as {"enable_thinking": false}',
        metavar="JSON",
        needs=given("apply_chat_template"),
    )
    chosen_key: str | None = flag(None, help="field of a pair's preferred response; else `chosen`", needs=PAIRS)
    rejected_key: str | None = flag(None, help="field of a pair's other response; else `rejected`", needs=PAIRS)
    loss_mask_type: str | None = flag(
        None,
        choices=LOSS_MASKS,
        help="turns of a conversation that are trained on: all of the assistant's, found from any chat template "
        "(unset, qwen, qwen3, qwen3_5), or its last alone (distill_qwen)",
        needs=loss_that(lambda row: row.trains_on == "conversations") | given("rollout_function_path", SFT_ROLLOUT),
    )
    allow_left_out: bool = flag(
        False,
        help="train on conversations or pairs though the chat template leaves out calls, thinking or words of the "
        "turns that are trained on",
        may_change=True,
        needs=loss_that(lambda row: row.on_data) | given("rollout_function_path", SFT_ROLLOUT),
    )
    on_bad_data: str = flag(
        "error", choices=("error", "skip"), help="for invalid rows: stop, or count, log and skip them", may_change=True
    )
    streaming_data: bool = flag(
        False, help="read --prompt-data as it is needed instead of into memory; held-out sets are read whole"
    )
    streaming_shuffle_buffer: int | None = flag(
        None,
        help="rows of --streaming-data that --rollout-shuffle mixes at once [10000]",
        unit="rows",
        least=1,
        needs=(given("streaming_data"), given("rollout_shuffle")),
    )
    num_data_workers: int = flag(
        0, help="processes that tokenize --prompt-data ahead; 0 for none", unit="processes", least=0, may_change=True
    )
    rollout_shuffle: bool = flag(False, help="shuffle the prompts in every epoch", needs=ROLLOUTS)
    rollout_seed: int = flag(
        42,
        help="seed of that shuffle",
        needs=given("rollout_shuffle") | given("data_source_path") | given("buffer_filter_path"),
    )
    rollout_max_prompt_len: int | None = flag(None, help="leave out prompts longer than this", unit="tokens", least=1)

    @property
    def prompt_paths(self) -> tuple[str, ...]:
        """The training data sets, in the order given."""
        return (self.prompt_data,) if isinstance(self.prompt_data, str) else self.prompt_data

    @property
    def shuffle_block(self) -> int:
        """Rows that a stream shuffles among each other."""
        return self.streaming_shuffle_buffer or 10_000

    @property
    def chat_template_kwargs(self) -> dict[str, Any]:
        """``--apply-chat-template-kwargs``, parsed."""
        return json_object("apply-chat-template-kwargs", self.apply_chat_template_kwargs, '{"enable_thinking": false}')

    def contradictions(self) -> Iterator[str]:
        """Weights that do not match the paths, and arguments of the template that are not for users."""
        paths, weights = self.prompt_paths, self.prompt_data_weights
        if not all(paths):
            yield "--prompt-data names no data set; give one or more paths"
        if weights and len(weights) != len(paths):
            yield f"--prompt-data-weights has {len(weights)} values and --prompt-data {len(paths)} paths; give one each"
        try:
            kwargs = self.chat_template_kwargs
        except ConfigError as error:
            yield str(error)
            return
        if own := sorted(kwargs.keys() & _OWN_TEMPLATE_ARGUMENTS):
            yield f"--apply-chat-template-kwargs sets {', '.join(own)}, which slime itself sets; leave out"


MOST_LISTED, MOST_KEPT = 4096, 4000
"""Tokens that an engine lists at most (SGLang's ``--sampling-mask-max-tokens``), those that tie with the last one
included; and likeliest tokens that are sampled from where top-p or min-p would keep more."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Config, needs=GENERATES):
    """How responses are sampled: by the engine's parameters, and by a custom generate function."""

    rollout_temperature: float = flag(
        1.0,
        help="sampling temperature; the trainer divides its logits by it too",
        above=0,
        advice="at 0 all samples of a prompt are the same",
        needs=SAMPLES,
    )
    rollout_top_p: float = flag(
        1.0,
        help="nucleus sampling: total probability of the tokens kept",
        above=0,
        most=1,
        advice="1 keeps all tokens",
        needs=SAMPLES,
    )
    rollout_top_k: int = flag(
        -1, help="sample from this many likeliest tokens; -1 for all", unit="tokens", needs=SAMPLES
    )
    rollout_min_p: float = flag(
        0.0,
        help="sample from tokens with at least this part of the likeliest one's probability, in evaluation too; "
        "engines then take no seeds, which SGLang cannot combine with it",
        least=0,
        below=1,
        advice="0 keeps all tokens",
        needs=SAMPLES,
    )
    use_rollout_routing_replay: bool = flag(
        False,
        help="have engines say which experts they chose for each token, and the trainer choose the same (R3), where it "
        "computes old log-probs and trains",
        needs=SAMPLES,
    )
    rollout_max_response_len: int = flag(1024, help="longest response", unit="tokens", least=1)
    rollout_max_context_len: int | None = flag(
        None,
        help="longest prompt and response together; the model's own limit if not given",
        unit="tokens",
        least=1,
        needs=(),
    )
    rollout_stop: tuple[str, ...] = flag((), help="strings that end a response, in whose text they stay")
    rollout_stop_token_ids: tuple[int, ...] = flag((), help="further token ids that end a response", least=0)
    rollout_skip_special_tokens: bool = flag(
        False, help="leave special tokens, such as the end of a turn, out of a response's text, as is done anyway"
    )
    no_rollout_skip_special_tokens: bool = flag(
        False, help="keep special tokens in a response's text, which rewards see"
    )
    rollout_concurrency: int = flag(
        512, help="most requests in flight at once", unit="requests", least=1, may_change=True
    )
    rollout_request_timeout: float = time_limit(1800.0, "time limit of one request with all its retries")
    custom_generate_function_path: str | None = function_flag(
        "custom generate function, such as an agent with tools: pkg.mod.fn, file.py:fn or file.py"
    )
    rollout_function_path: str | None = function_flag(
        "function (args, rollout_id, data_source, evaluation=) that makes whole rollouts in place of slime's own",
        needs=(),
    )
    eval_function_path: str | None = function_flag(
        "the same for evaluations; else --rollout-function-path makes them, too", needs=HELD_OUT
    )
    custom_generate_timeout: float = time_limit(
        3600.0, "time limit of one call of such a function", needs=(GENERATES, CALLED)
    )
    max_turns: int = flag(
        10,
        help="most turns of the model in an interaction, as args.max_turns too",
        unit="turns",
        least=1,
        needs=(GENERATES, CALLED),
    )

    @property
    def skips_special_tokens(self) -> bool:
        """Whether special tokens are left out of responses' texts."""
        return not self.no_rollout_skip_special_tokens

    @property
    def keeps_all_tokens(self) -> bool:
        """Whether tokens are sampled from the whole vocabulary."""
        return (self.rollout_top_p, self.rollout_top_k, self.rollout_min_p) == (1.0, -1, 0.0)

    def contradictions(self) -> Iterator[str]:
        """Stop strings and counts that mean nothing."""
        yield from _wrong_top_k("--rollout-top-k", self.rollout_top_k)
        path = self.rollout_function_path
        if path is not None and "fully_async" in path:
            yield f"--rollout-function-path {path} generates ahead; --async-buffer-size N does that here: give that"
        if self.rollout_skip_special_tokens and self.no_rollout_skip_special_tokens:
            yield "--rollout-skip-special-tokens and --no-rollout-skip-special-tokens contradict each other; give one"
        if any(not text for text in self.rollout_stop):
            yield "--rollout-stop has an empty string, which would end every response; leave it out"


@dataclass(frozen=True, kw_only=True)
class SelectionConfig(Config, needs=GENERATES):
    """How many groups are generated, which of them are trained on, and how old they may be."""

    rollout_batch_size: int = flag(help="prompts per rollout", unit="prompts", least=1, needs=())
    n_samples_per_prompt: int = flag(
        1, help="samples of each prompt: the size of a group", unit="samples", least=1, needs=ROLLOUTS
    )
    over_sampling_batch_size: int | None = flag(
        None,
        help="prompts in flight; the first to finish are trained on, the others go back",
        unit="prompts",
        least=1,
        needs=(GENERATES, ROLLOUTS),
    )
    dynamic_sampling_filter_path: str | None = function_flag(
        "function (args, group) that decides which scored groups are trained on, such as "
        "slime_rollout.filters.check_reward_nonzero_std; others are generated for those that are not, with "
        "check_reward_nonzero_std_with_fallback only what is in flight",
        needs=(GENERATES, ROLLOUTS),
    )
    dynamic_sampling_max_prompts: int | None = flag(
        None,
        help="most prompts tried for one rollout; 32 times those in flight if not given",
        unit="prompts",
        least=1,
        needs=(GENERATES, ROLLOUTS, DROPS),
    )
    partial_rollout: bool = flag(
        False,
        help="responses that are cut off when a rollout is complete keep their tokens, and go on in the next",
        needs=given("over_sampling_batch_size") | given("dynamic_sampling_filter_path"),
    )
    mask_offpolicy_in_partial_rollout: bool = flag(
        False, help="do not train on the tokens that a response had before it went on", needs=given("partial_rollout")
    )
    async_buffer_size: int | None = flag(
        None, help="rollouts that are generated ahead while the trainer works; else none", unit="rollouts", least=1
    )
    max_weight_staleness: int | None = flag(
        None,
        help="most updates between a token and its training; older ones start again",
        unit="versions",
        least=0,
        needs=(GENERATES, LAGS),
        harmless=True,
    )
    update_weights_interval: int = flag(
        1,
        help="rollouts between two sends of the weights to the engines, which get them before an evaluation and a "
        "checkpoint, too",
        unit="rollouts",
        least=1,
        needs=(GENERATES, UPDATES),
    )
    hook_timeout: float = time_limit(300.0, "time limit of a call of a custom filter or data source", needs=TIMED_HOOKS)

    @property
    def groups_in_flight(self) -> int:
        """Groups in flight for one rollout."""
        return self.over_sampling_batch_size or self.rollout_batch_size

    @property
    def most_groups_tried(self) -> int:
        """Groups that may be started for one rollout before it fails."""
        return self.dynamic_sampling_max_prompts or 32 * self.groups_in_flight

    @property
    def gives_back(self) -> bool:
        """Whether groups may come back to the data source."""
        return self.over_sampling_batch_size is not None or self.dynamic_sampling_filter_path is not None

    @property
    def most_behind(self) -> int:
        """Updates between a token and its training: the limit or, without one, as far as is generated ahead.

        Without a limit a response that takes longer than others is older.
        """
        if self.max_weight_staleness is not None:
            return self.max_weight_staleness
        return max((self.async_buffer_size or 0) + self.update_weights_interval - 1, 1)

    def contradictions(self) -> Iterator[str]:
        """Settings that exclude each other."""
        batch, over = self.rollout_batch_size, self.over_sampling_batch_size
        tried, in_flight = self.most_groups_tried, self.groups_in_flight
        if over is not None and over < batch:
            yield f"--over-sampling-batch-size {over} is less than --rollout-batch-size {batch}; give that or more"
        if tried < in_flight:
            yield f"--dynamic-sampling-max-prompts {tried} is less than the {in_flight} prompts in flight; give more"
        late, bound = self.update_weights_interval - 1, self.max_weight_staleness
        if bound is not None and bound < late:
            yield (
                f"--update-weights-interval {late + 1} leaves engines {late} updates behind, and "
                f"--max-weight-staleness {bound} allows {bound}; give {late} or more"
            )
        if self.async_buffer_size is not None and (over is not None or self.partial_rollout):
            yield "--async-buffer-size leaves nothing over; leave out --over-sampling-batch-size and --partial-rollout"


def _as_in_rollouts(what: str, **more: Any) -> Any:
    """A flag of evaluation that by default has the value of the rollouts' flag. Upstream's scripts leave such flags in
    where they evaluate nothing, and nothing is lost."""
    return flag(None, help=f"for evaluation: {what}; else as in rollouts", harmless=True, **more)


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Config, needs=HELD_OUT, may_change=True):
    """Held-out prompts, and how their sampling differs from that of rollouts."""

    eval_prompt_data: tuple[str, ...] = flag(
        (), help="held-out sets: NAME PATH [NAME PATH …]; a single PATH is called `eval`", needs=()
    )
    eval_config: str | None = flag(
        None, help="YAML file that names held-out sets, each with settings of its own", metavar="FILE", needs=()
    )
    n_samples_per_eval_prompt: int = flag(
        1, help="samples of each held-out prompt", unit="samples", least=1, harmless=True
    )
    eval_temperature: float | None = _as_in_rollouts(
        "temperature, 0 for greedy", least=0, advice="0 is greedy", needs=SAMPLED_SETS
    )
    eval_top_p: float | None = _as_in_rollouts(
        "nucleus sampling", above=0, most=1, advice="1 keeps all tokens", needs=SAMPLED_SETS
    )
    eval_top_k: int | None = _as_in_rollouts("top-k", unit="tokens", needs=SAMPLED_SETS)
    eval_max_response_len: int | None = _as_in_rollouts("longest response", unit="tokens", least=1, needs=SAMPLED_SETS)
    eval_max_context_len: int | None = _as_in_rollouts("longest prompt and response together", unit="tokens", least=1)
    eval_max_prompt_len: int | None = _as_in_rollouts("leave out longer prompts", unit="tokens", least=1)
    eval_min_new_tokens: int | None = flag(
        None, help="shortest response of evaluation; else no limit", unit="tokens", least=0, needs=SAMPLED_SETS
    )
    eval_input_key: str | None = _as_in_rollouts("field of the prompt")
    eval_label_key: str | None = _as_in_rollouts("field of the answer")
    eval_tool_key: str | None = _as_in_rollouts("field of the tools")
    eval_reward_key: str | None = _as_in_rollouts("entry to report when the reward is a dictionary", needs=SAMPLED_SETS)

    @property
    def has_eval_sets(self) -> bool:
        """Whether there are held-out sets; `slime_rollout.eval_sets.read_eval_sets` reads them."""
        return bool(self.eval_prompt_data) or self.eval_config is not None

    def contradictions(self) -> Iterator[str]:
        """A top-k or names of sets that mean nothing."""
        yield from _wrong_top_k("--eval-top-k", self.eval_top_k)
        given = self.eval_prompt_data
        if len(given) > 1 and len(given) % 2:
            words = " ".join(given)
            yield f"--eval-prompt-data got {len(given)} values ({words}); give pairs of NAME PATH, or one PATH"


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Config):
    """Everything about prompts, sampling, rewards and evaluation; ``RolloutConfig.of(flag=value, ...)`` makes one.

    Raises:
        ConfigError: Values are outside their range, or contradict each other: all of them, a line each.
    """

    data: DataConfig
    sampling: SamplingConfig
    selection: SelectionConfig
    rewards: RewardConfig
    evaluation: EvalConfig
    hooks: HookConfig

    @property
    def rollout_function(self) -> str | None:
        """The user's function that makes whole rollouts; ``None`` where slime does."""
        path = self.sampling.rollout_function_path
        return None if path in BUILT_IN_ROLLOUTS else path

    @property
    def eval_function(self) -> str | None:
        """The user's function that makes whole evaluations; ``None`` where slime does."""
        path = self.sampling.eval_function_path or self.rollout_function
        return None if path in BUILT_IN_ROLLOUTS else path

    @property
    def takes_messages(self) -> bool:
        """Whether prompts may be chat messages: a template renders them, or a custom function does."""
        custom = self.sampling.custom_generate_function_path or self.rollout_function
        return self.data.apply_chat_template or custom is not None

    @property
    def may_lag(self) -> bool:
        """Whether tokens may come from older weights than those that are trained next."""
        selection = self.selection
        ahead = selection.async_buffer_size is not None or selection.update_weights_interval > 1
        custom = self.data.data_source_path or self.rollout_function
        return selection.gives_back or ahead or custom is not None


def _wrong_top_k(name: str, value: int | None) -> Iterator[str]:
    if value is not None and value != -1 and value < 1:
        yield f"{name} {value} must be at least 1, or -1 to leave no token out"
