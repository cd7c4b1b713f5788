"""What to generate, and how it is scored: one frozen record, checked when it is built. Nothing here imports torch."""

from __future__ import annotations

import json
import math
import urllib.parse
from dataclasses import dataclass
from typing import Any

from slime_core.errors import ConfigError
from slime_core.flags import flag

COMPARING_RULES = ("exact", "first_integer", "math", "deepscaler", "dapo", "f1", "gpqa")
REMOTE_RULES = ("remote_rm", "boxed_remote_rm")
RULES = (*COMPARING_RULES, *(f"boxed_{name}" for name in COMPARING_RULES), *REMOTE_RULES, "random")
DEFAULT_RULE = "exact"
OPD_TYPES = ("sglang",)
BAD_DATA = ("error", "skip")
STREAMING_SHUFFLE_BUFFER = 10_000
# What rendering a prompt decides itself.
_OWN_TEMPLATE_ARGUMENTS = {"conversation", "tools", "tokenize", "return_dict", "return_tensors"}


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Prompts, sampling, rewards and evaluation.

    Raises:
        ConfigError: A value is outside its range, or two settings contradict each other.
    """

    hf_checkpoint: str = flag(
        help="Hugging Face directory: the model that engines start with, its config and tokenizer", metavar="DIR"
    )
    prompt_data: tuple[str, ...] | str = flag(
        help="prompts: JSON Lines (also .gz, .bz2, .xz, .zst), Parquet, directories that `datasets` saved; several are "
        "joined; PATH@[a:b] takes rows a to b as Python does",
        metavar="PATH",
    )
    prompt_data_weights: tuple[float, ...] = flag(
        (), help="share of each data set of --prompt-data in an epoch; without it every prompt comes once"
    )
    input_key: str | None = flag(None, help="field of the prompt in a row; without it `prompt`, then `input`")
    label_key: str | None = flag(None, help="field of the answer in a row; without it `label` where there is one")
    metadata_key: str = flag("metadata", help="field of a row's further values, handed to reward functions")
    tool_key: str = flag("tools", help="field of a row's tools, handed to the chat template and kept in its metadata")
    data_source_path: str | None = flag(
        None,
        help="own source of prompts: a class derived from slime_rollout.data.RolloutDataSource, such as "
        "slime_rollout.data.RolloutDataSourceWithBuffer",
        metavar="PATH",
    )
    buffer_filter_path: str | None = flag(
        None,
        help="own function (args, buffer, num_samples) that chooses groups of a buffered data source",
        metavar="PATH",
    )
    apply_chat_template: bool = flag(False, help="render prompts with the tokenizer's chat template")
    apply_chat_template_kwargs: str = flag(
        "{}", help='further arguments of the chat template, such as {"enable_thinking": false}', metavar="JSON"
    )
    on_bad_data: str = flag(
        "error", choices=BAD_DATA, help="what to do about rows that cannot be used: stop, or count, tell and skip them"
    )
    streaming_data: bool = flag(
        False, help="read --prompt-data as it is needed instead of into memory; held-out sets are read whole"
    )
    streaming_shuffle_buffer: int | None = flag(
        None,
        help="with --streaming-data and --rollout-shuffle: shuffle within blocks of this many rows, which are in "
        f"memory; without it {STREAMING_SHUFFLE_BUFFER}",
        unit="rows",
    )
    num_data_workers: int = flag(
        0,
        help="processes that tokenize --prompt-data ahead; 0 tokenizes in the rollout worker itself",
        unit="processes",
    )
    rollout_batch_size: int = flag(help="prompts per rollout", unit="prompts")
    n_samples_per_prompt: int = flag(1, help="samples of each prompt: the size of a group", unit="samples")
    over_sampling_batch_size: int | None = flag(
        None,
        help="prompts in flight for one rollout, --rollout-batch-size at least; the first to finish are trained on, "
        "and the others go back to the buffer",
        unit="prompts",
    )
    dynamic_sampling_filter_path: str | None = flag(
        None,
        help="function (args, group) that says which scored groups are trained on, such as "
        "slime_rollout.filters.check_reward_nonzero_std; others are generated for those that are not",
        metavar="PATH",
    )
    dynamic_sampling_max_prompts: int | None = flag(
        None, help="most prompts tried for one rollout; 32 times those in flight if not given", unit="prompts"
    )
    partial_rollout: bool = flag(
        False, help="responses that are cut off when a rollout is complete keep their tokens, and go on in the next"
    )
    mask_offpolicy_in_partial_rollout: bool = flag(
        False, help="do not train on the tokens that a response had before it went on"
    )
    async_buffer_size: int | None = flag(
        None,
        help="generate while the trainer works, at most so many rollouts ahead; without it the two take turns",
        unit="rollouts",
    )
    max_weight_staleness: int | None = flag(
        None,
        help="most weight updates between a token and its training; what is older is generated anew",
        unit="versions",
    )
    hook_timeout: float = flag(
        300.0, help="time limit of one call of an own filter or of an own data source", unit="seconds"
    )
    rollout_shuffle: bool = flag(False, help="shuffle the prompts in every epoch")
    rollout_seed: int = flag(42, help="seed of that shuffle")
    rollout_temperature: float = flag(1.0, help="sampling temperature; the trainer divides its logits by it too")
    rollout_top_p: float = flag(1.0, help="nucleus sampling: smallest set of tokens with this much probability")
    rollout_top_k: int = flag(-1, help="sample from this many likeliest tokens; -1 for all", unit="tokens")
    rollout_max_prompt_len: int | None = flag(None, help="leave out prompts longer than this", unit="tokens")
    rollout_max_response_len: int = flag(1024, help="longest response", unit="tokens")
    rollout_max_context_len: int | None = flag(
        None, help="longest prompt and response together; the model's own limit if not given", unit="tokens"
    )
    rollout_stop: tuple[str, ...] = flag((), help="strings that end a response")
    rollout_stop_token_ids: tuple[int, ...] = flag((), help="token ids that end a response, besides the model's own")
    rollout_concurrency: int = flag(512, help="most requests in flight at once", unit="requests")
    rollout_request_timeout: float = flag(
        1800.0, help="time limit of one generation request with all its retries", unit="seconds"
    )
    custom_generate_function_path: str | None = flag(
        None,
        help="own generate function, such as a multi-turn loop with tools: pkg.mod.fn, pkg.mod:fn, file.py:fn or "
        "file.py",
        metavar="PATH",
    )
    custom_generate_timeout: float = flag(3600.0, help="time limit of one call of that function", unit="seconds")
    max_turns: int = flag(10, help="most turns of the model in an interaction, as args.max_turns too", unit="turns")
    rm_type: str | None = flag(
        None,
        choices=RULES,
        help="rule that scores a response, unless its row names another as `rm_type` in its metadata; without "
        f"--custom-rm-path and --opd-type `{DEFAULT_RULE}`",
    )
    custom_rm_path: str | None = flag(
        None, help="own reward function or class: pkg.mod.fn, pkg.mod:fn, file.py:fn or file.py", metavar="PATH"
    )
    custom_rm_kwargs: str | None = flag(
        None, help="JSON object: the constructor arguments of a class at --custom-rm-path", metavar="JSON"
    )
    group_rm: bool = flag(False, help="score all samples of a prompt in one call of the own function")
    rm_timeout: float | None = flag(
        None,
        help="time limit of scoring one sample; without it 10 for rules, 60 for own functions and --rm-url",
        unit="seconds",
    )
    rm_url: str | None = flag(
        None,
        help="address of the service that --rm-type remote_rm asks; with --opd-type sglang, of the teacher's server",
        metavar="URL",
    )
    rm_workers: int = flag(4, help="most processes that score by a rule at once", unit="processes")
    rm_memory_limit: float = flag(2.0, help="most memory of one of them", unit="GiB")
    rm_on_failure: str = flag(
        "zero",
        choices=("zero", "drop"),
        help="a sample that its rule, service or own function cannot score counts as wrong (zero), and is not trained "
        "on (drop); one that gets no log-probs from the teacher ends the run, or is not trained on (drop)",
    )
    opd_type: str | None = flag(
        None,
        help="on-policy distillation: who gives the teacher's log-probs; sglang is a SGLang server at --rm-url",
        metavar="TYPE",
    )
    reward_key: str | None = flag(None, help="entry to train on when the reward is a dictionary")
    eval_prompt_data: tuple[str, ...] = flag(
        (), help="held-out sets: NAME PATH [NAME PATH …]; a single PATH is called `eval`"
    )
    eval_config: str | None = flag(
        None, help="YAML file that names held-out sets, each with settings of its own", metavar="FILE"
    )
    n_samples_per_eval_prompt: int = flag(1, help="samples of each held-out prompt", unit="samples")
    eval_temperature: float | None = flag(
        None, help="sampling temperature of evaluation, 0 for greedy; else as in rollouts"
    )
    eval_top_p: float | None = flag(None, help="nucleus sampling of evaluation; else as in rollouts")
    eval_top_k: int | None = flag(None, help="top-k of evaluation; else as in rollouts", unit="tokens")
    eval_max_response_len: int | None = flag(
        None, help="longest response of evaluation; else as in rollouts", unit="tokens"
    )
    eval_max_context_len: int | None = flag(
        None, help="longest prompt and response together in evaluation; else as in rollouts", unit="tokens"
    )
    eval_max_prompt_len: int | None = flag(
        None, help="leave out held-out prompts longer than this; else as in rollouts", unit="tokens"
    )
    eval_min_new_tokens: int | None = flag(
        None, help="tokens before which no response of evaluation ends by itself", unit="tokens"
    )
    eval_input_key: str | None = flag(None, help="field of the prompt in held-out rows; else as in training")
    eval_label_key: str | None = flag(None, help="field of the answer in held-out rows; else as in training")
    eval_tool_key: str | None = flag(None, help="field of the tools in held-out rows; else as in training")
    eval_reward_key: str | None = flag(
        None, help="entry that evaluation reports when the reward is a dictionary; else as in training"
    )

    def __post_init__(self) -> None:
        self._check_data()
        self._check_counts()
        self._check_collection()
        self._check_sampling()
        self._check_rewards()
        self._check_teacher()

    @property
    def prompt_paths(self) -> tuple[str, ...]:
        """The training data sets, in the order given."""
        return (self.prompt_data,) if isinstance(self.prompt_data, str) else self.prompt_data

    @property
    def shuffle_block(self) -> int:
        """Rows that a stream shuffles among each other."""
        return self.streaming_shuffle_buffer or STREAMING_SHUFFLE_BUFFER

    @property
    def takes_messages(self) -> bool:
        """Whether prompts may be chat messages: a template renders them, or a custom function does."""
        return self.apply_chat_template or self.custom_generate_function_path is not None

    @property
    def chat_template_kwargs(self) -> dict[str, Any]:
        """``--apply-chat-template-kwargs``, read."""
        text = self.apply_chat_template_kwargs
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"--apply-chat-template-kwargs {text} is no JSON ({error}); "
                'give an object such as {"enable_thinking": false}'
            ) from None
        if not isinstance(values, dict):
            raise ConfigError(
                f'--apply-chat-template-kwargs {text} is no JSON object; give one such as {{"enable_thinking": false}}'
            )
        return values

    @property
    def has_eval_sets(self) -> bool:
        """Whether there are held-out sets; `slime_rollout.eval_sets.read_eval_sets` reads them."""
        return bool(self.eval_prompt_data) or self.eval_config is not None

    @property
    def rule(self) -> str | None:
        """The rule that scores; ``None`` when an own function does, or a teacher alone trains."""
        if self.custom_rm_path is not None:
            return None
        return self.rm_type or (DEFAULT_RULE if self.opd_type is None else None)

    def _check_data(self) -> None:
        paths, weights = self.prompt_paths, self.prompt_data_weights
        if not paths or not all(paths):
            raise ConfigError("--prompt-data names no data set; give one or more paths")
        if weights and len(weights) != len(paths):
            raise ConfigError(
                f"--prompt-data-weights has {len(weights)} values and --prompt-data {len(paths)} paths; "
                "give one weight for each path"
            )
        for weight in weights:
            if not (weight > 0 and math.isfinite(weight)):
                raise ConfigError(f"--prompt-data-weights {weight} is no share; give numbers above 0")
        if self.on_bad_data not in BAD_DATA:
            raise ConfigError(f"--on-bad-data {self.on_bad_data} is unknown; allowed: {', '.join(BAD_DATA)}")
        if self.streaming_shuffle_buffer is not None and not (self.streaming_data and self.rollout_shuffle):
            raise ConfigError(
                "--streaming-shuffle-buffer has no effect without --streaming-data and --rollout-shuffle; add both"
            )
        if self.num_data_workers < 0:
            raise ConfigError(f"--num-data-workers {self.num_data_workers} is negative; give 0 or more")
        kwargs = self.chat_template_kwargs
        if kwargs and not self.apply_chat_template:
            raise ConfigError("--apply-chat-template-kwargs has no effect without --apply-chat-template; add that")
        if own := sorted(kwargs.keys() & _OWN_TEMPLATE_ARGUMENTS):
            raise ConfigError(f"--apply-chat-template-kwargs sets {', '.join(own)}, which slime itself sets; leave out")

    @property
    def reward_timeout(self) -> float:
        """Seconds that scoring one sample may take."""
        return self.timeout_of_rule(self.rule)

    def timeout_of_rule(self, rule: str | None) -> float:
        """Seconds that a rule, or an own function in its place, may take for one sample."""
        if self.rm_timeout is not None:
            return self.rm_timeout
        return 60.0 if rule is None or rule in REMOTE_RULES else 10.0

    @property
    def teacher_timeout(self) -> float:
        """Seconds that a teacher's log-probs of one sample may take."""
        return self.rm_timeout if self.rm_timeout is not None else 60.0

    @property
    def custom_rm_arguments(self) -> dict[str, Any] | None:
        """What ``custom_rm_kwargs`` holds."""
        if self.custom_rm_kwargs is None:
            return None
        try:
            given = json.loads(self.custom_rm_kwargs)
        except ValueError as error:
            raise ConfigError(f"--custom-rm-kwargs {self.custom_rm_kwargs} is no JSON: {error}") from None
        if not isinstance(given, dict):
            raise ConfigError(
                f"--custom-rm-kwargs {self.custom_rm_kwargs} is no JSON object; write '{{\"name\": value}}'"
            )
        return given

    def _check_counts(self) -> None:
        for name in (
            "streaming_shuffle_buffer",
            "rollout_batch_size",
            "n_samples_per_prompt",
            "over_sampling_batch_size",
            "dynamic_sampling_max_prompts",
            "async_buffer_size",
            "rollout_max_prompt_len",
            "rollout_max_response_len",
            "rollout_max_context_len",
            "rollout_concurrency",
            "max_turns",
            "n_samples_per_eval_prompt",
            "eval_max_response_len",
            "eval_max_context_len",
            "eval_max_prompt_len",
            "rm_workers",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{_flag_name(name)} {value} is less than 1; give 1 or more")
        for name in ("rollout_request_timeout", "custom_generate_timeout", "hook_timeout", "rm_timeout"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{_flag_name(name)} {value} is no time limit; give seconds above 0")

    @property
    def groups_in_flight(self) -> int:
        """Groups that are started for one rollout, those that are dropped not counted."""
        return self.over_sampling_batch_size or self.rollout_batch_size

    @property
    def most_groups_tried(self) -> int:
        """Groups that may be started for one rollout before it is given up."""
        return self.dynamic_sampling_max_prompts or 32 * self.groups_in_flight

    @property
    def gives_back(self) -> bool:
        """Whether groups come back to the data source by these settings."""
        return self.over_sampling_batch_size is not None or self.dynamic_sampling_filter_path is not None

    @property
    def may_lag(self) -> bool:
        """Whether tokens may come from older weights than those that are trained next."""
        return self.gives_back or self.async_buffer_size is not None or self.data_source_path is not None

    def _check_collection(self) -> None:
        batch, over = self.rollout_batch_size, self.over_sampling_batch_size
        if over is not None and over < batch:
            raise ConfigError(
                f"--over-sampling-batch-size {over} is less than --rollout-batch-size {batch}; give that or more"
            )
        if self.max_weight_staleness is not None and self.max_weight_staleness < 0:
            raise ConfigError(f"--max-weight-staleness {self.max_weight_staleness} is negative; give 0 or more")
        if self.most_groups_tried < self.groups_in_flight:
            raise ConfigError(
                f"--dynamic-sampling-max-prompts {self.dynamic_sampling_max_prompts} is less than the "
                f"{self.groups_in_flight} prompts in flight; give more"
            )
        if self.partial_rollout and not self.gives_back:
            raise ConfigError(
                "--partial-rollout cuts nothing off when no more prompts are in flight than are trained on; give "
                f"--over-sampling-batch-size above {batch}, or leave it out"
            )
        if self.mask_offpolicy_in_partial_rollout and not self.partial_rollout:
            raise ConfigError("--mask-offpolicy-in-partial-rollout is about --partial-rollout; give both or neither")
        if self.async_buffer_size is not None and (over is not None or self.partial_rollout):
            raise ConfigError(
                f"--async-buffer-size {self.async_buffer_size} cuts nothing off and leaves nothing over; leave out "
                "--over-sampling-batch-size and --partial-rollout"
            )

    def _check_sampling(self) -> None:
        if not (self.rollout_temperature > 0 and math.isfinite(self.rollout_temperature)):
            raise ConfigError(
                f"--rollout-temperature {self.rollout_temperature} must be above 0: "
                "the trainer divides by it, and greedy samples of one prompt are all the same"
            )
        if self.eval_temperature is not None and not (
            self.eval_temperature >= 0 and math.isfinite(self.eval_temperature)
        ):
            raise ConfigError(f"--eval-temperature {self.eval_temperature} is negative; give 0 (greedy) or more")
        for name in ("rollout_top_p", "eval_top_p"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ConfigError(f"{_flag_name(name)} {value} must be above 0 and at most 1; 1 leaves no token out")
        for name in ("rollout_top_k", "eval_top_k"):
            value = getattr(self, name)
            if value is not None and value != -1 and value < 1:
                raise ConfigError(f"{_flag_name(name)} {value} must be at least 1, or -1 to leave no token out")
        if self.eval_min_new_tokens is not None and self.eval_min_new_tokens < 0:
            raise ConfigError(f"--eval-min-new-tokens {self.eval_min_new_tokens} is negative; give 0 or more")
        if any(not text for text in self.rollout_stop):
            raise ConfigError("--rollout-stop has an empty string, which would end every response; leave it out")
        if negative := [token for token in self.rollout_stop_token_ids if token < 0]:
            raise ConfigError(f"--rollout-stop-token-ids {negative[0]} is negative; token ids count from 0")

    def _check_rewards(self) -> None:
        if self.rm_type is not None and self.rm_type not in RULES:
            raise ConfigError(
                f"--rm-type {self.rm_type} is unknown; allowed: {', '.join(RULES)}; or give --custom-rm-path"
            )
        if self.rm_type is not None and self.custom_rm_path is not None:
            raise ConfigError(
                f"--rm-type {self.rm_type} and --custom-rm-path {self.custom_rm_path} are both given; give one of them"
            )
        for name, given in (("group_rm", self.group_rm), ("custom_rm_kwargs", self.custom_rm_arguments is not None)):
            if given and self.custom_rm_path is None:
                raise ConfigError(f"{_flag_name(name)} is for an own function; give --custom-rm-path")
        if self.opd_type is None and (self.rm_type in REMOTE_RULES) != (self.rm_url is not None):
            raise ConfigError("--rm-type remote_rm and --rm-url belong together; give both or neither")
        if self.rm_url is not None and not _is_address(self.rm_url):
            raise ConfigError(f"--rm-url {self.rm_url} is no address; write http://HOST:PORT/PATH")
        if self.rule in ("dapo", "boxed_dapo") and self.reward_key not in ("score", "acc"):
            raise ConfigError(
                f"--rm-type {self.rule} gives score (1 or -1) and acc (1 or 0); choose one with --reward-key"
            )
        if not 0.5 <= self.rm_memory_limit <= 1024:
            raise ConfigError(f"--rm-memory-limit {self.rm_memory_limit} is out of range; give 0.5 to 1024 GiB")
        if self.rm_on_failure not in ("zero", "drop"):
            raise ConfigError(f"--rm-on-failure {self.rm_on_failure} is unknown; allowed: zero, drop")

    def _check_teacher(self) -> None:
        if self.opd_type is None:
            return
        if self.opd_type == "megatron":
            raise ConfigError(
                "--opd-type megatron, a teacher inside the trainer, is not built yet; start a SGLang server with the "
                "teacher, and give --opd-type sglang --rm-url http://HOST:PORT"
            )
        if self.opd_type not in OPD_TYPES:
            raise ConfigError(f"--opd-type {self.opd_type} is unknown; allowed: {', '.join(OPD_TYPES)}")
        if self.rm_type in REMOTE_RULES:
            raise ConfigError(
                "--rm-url is the teacher's address with --opd-type sglang, so --rm-type remote_rm cannot have it too; "
                "score by another rule or with --custom-rm-path"
            )
        if self.rm_url is None:
            raise ConfigError("--opd-type sglang needs --rm-url, the address of a SGLang server with the teacher")


def _flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def _is_address(url: str) -> bool:
    """Whether something can be sent there: a client of HTTP would find out with each sample."""
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
