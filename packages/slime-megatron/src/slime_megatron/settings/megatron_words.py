"""The words of Megatron's command line that are not flags of slime's, and what each does here. No torch here.

Most name a field of one of Megatron's configs, under the spelling of Megatron's own command line, and are read from the
installed Megatron-core; :mod:`slime_megatron.settings.arguments` says what becomes of the field. The others are
answered by tables.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from slime_core.flags import FlagSpec
from slime_megatron.settings import arguments
from slime_megatron.settings.arguments import classes
from slime_megatron.settings.megatron_fields import MegatronField, megatron_fields, training_words

# Where Megatron's command line spells a field otherwise than the field is named.
_SPELLED = {
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "num_moe_experts": "--num-experts",
    "layernorm_epsilon": "--norm-epsilon",
    "gated_linear_unit": "--swiglu",
    "bucket_size": "--ddp-bucket-size",
    "pad_buckets_for_high_nccl_busbw": "--ddp-pad-buckets-for-high-nccl-busbw",
    "average_in_collective": "--ddp-average-in-collective",
    "reduce_scatter_with_fp32_accumulation": "--ddp-reduce-scatter-with-fp32-accumulation",
    "nccl_ub": "--use-nccl-ub",
}
_SWITCHED_OFF = {
    "apply_rope_fusion": ("--no-rope-fusion",),
    "masked_softmax_fusion": ("--no-masked-softmax-fusion",),
    "bias_activation_fusion": ("--no-bias-swiglu-fusion", "--no-bias-gelu-fusion"),
    "bias_dropout_fusion": ("--no-bias-dropout-fusion",),
    "persist_layer_norm": ("--no-persist-layer-norm",),
    "check_for_nan_in_grad": ("--no-check-for-nan-in-loss-and-grad",),
    "overlap_p2p_comm": ("--no-overlap-p2p-communication",),
    "align_param_gather": ("--no-align-param-gather",),
    "grad_reduce_in_fp32": ("--grad-reduce-in-bf16",),
    "muon_split_qkv": ("--muon-no-split-qkv",),
    "tp_comm_overlap_ag": ("--disable-tp-comm-overlap-ag",),
    "tp_comm_overlap_rs": ("--disable-tp-comm-overlap-rs",),
    "tp_comm_bulk_dgrad": ("--disable-tp-comm-bulk-dgrad",),
    "tp_comm_bulk_wgrad": ("--disable-tp-comm-bulk-wgrad",),
    "tp_comm_split_ag": ("--disable-tp-comm-split-ag",),
    "tp_comm_split_rs": ("--disable-tp-comm-split-rs",),
}
_SWITCHED_ON = {"attention_output_gate": ("--use-gated-attention",)}

_DATA = "Megatron's data loader is not used"
_SPEED = "it changes speed alone"
_FORMAT = "checkpoints are torch_dist, written and read by all ranks"
_METRICS = "metrics.jsonl and TensorBoard have slime's metrics"
_NEW = "--load gives weights alone; a run goes on from --save"
_OTHER_MODELS = "only decoders are trained"
_MACHINERY = "slime has no such machinery"
# Words that are not a field, * for any end, and that change nothing.
_NO_EFFECT = {
    "seq-length encoder-seq-length decoder-seq-length": "rows are packed, and as long as their samples",
    "no-position-embedding": "positions are rotary",
    "enable-experimental": "nothing that runs here is behind that switch",
    "use-mcore-models": "Megatron-core's layers are used always",
    "make-vocab-size-divisible-by": "padding rows of the vocabulary change no result",
    "use-flash-attn": "what computes attention follows from the layers and the precision",
    "init-method-xavier-uniform data-parallel-random-init": "weights are read from a checkpoint",
    "no-align-grad-reduce": "each stage reduces its gradients as soon as it has them",
    "no-scatter-gather-tensors-in-pipeline": "Megatron-core decides it",
    "disable-gloo-process-groups distributed-backend": "process groups have the device's backend",
    "local-rank": "Ray places the ranks",
    "manual-gc* no-manual-gc-* empty-unused-memory-level train-sync-interval": _SPEED,
    "dataloader-type num-workers data-cache-path no-mmap-bin-files no-create-attention-mask-*": _DATA,
    "num-dataset-builder-threads": _DATA,
    "*ckpt-fully-parallel-* ckpt-assume-* use-dist-ckpt auto-detect-ckpt-format dist-ckpt-format": _FORMAT,
    "dist-ckpt-strictness use-persistent-ckpt-worker": _FORMAT,
    "no-load-optim no-load-rng finetune": _NEW,
    "override-opt* use-checkpoint-opt*": "a run that goes on has the flags that it began with",
    "use-checkpoint-args": "the model's shape is its config's",
    "no-save-rng": "random states are saved always",
    "exit-on-missing-checkpoint": "without any checkpoint nothing starts",
    "exit-signal-handler": "SIGTERM stops a run, and the same command goes on from its last checkpoint",
    "use-pytorch-profiler": "--profile writes traces of torch's profiler",
    "log-interval log-throughput log-timers-* log-memory-* log-world-size-* log-params-norm": _METRICS,
    "no-log-* log-validation-* log-progress log-energy timing-log-* tensorboard-log-* tensorboard-queue-*": _METRICS,
    "use-tensorboard logging-level": _METRICS,
    "disable-msc": "no object storage is used",
}
# Words that are not a field, and that cannot be given: what to use, or why.
_REFUSED = {
    "train-iters train-samples exit-interval exit-duration-in-mins": "give --num-rollout",
    "data-path train-data-path data-args-path per-split-* mock-data split": "give --prompt-data",
    "valid-data-path test-data-path eval-iters *-validation*": "give --eval-prompt-data",
    "tokenizer-* vocab-file merge-file tiktoken-* legacy-tokenizer vocab-extra-ids": "give --hf-checkpoint",
    "tensorboard-dir": "give --output-dir",
    "pretrained-checkpoint": "give --load",
    "ckpt-step": "give the checkpoint's own directory as --load, such as DIR/iter_0000010",
    "ckpt-convert-*": "slime-convert converts checkpoints",
    "moe-use-upcycling moe-upcycling-*": "slime does not make experts of a dense model",
    "lr-decay-samples": "give --lr-decay-iters",
    "lr-warmup-samples warmup": "give --lr-warmup-iters or --lr-warmup-fraction",
    "lr-wsd-*": "--lr-decay-style has constant, linear and cosine",
    "*-weight-decay weight-decay-incr-*": "the weight decay is constant; give --weight-decay",
    "rampup-batch-size decrease-batch-size-*": "each step has equally many samples; give --global-batch-size",
    "batch-size": "give --micro-batch-size",
    "model-parallel-size": "give --tensor-model-parallel-size",
    "num-layers-per-virtual-* num-virtual-stages-*": "give --virtual-pipeline-model-parallel-size",
    "checkpoint-activations": "give --recompute-granularity full, --recompute-method and --recompute-num-layers",
    "ddp-num-buckets": "give --ddp-bucket-size",
    "distributed-timeout-seconds-*": "give --distributed-timeout-minutes",
    "fp16-lm-cross-entropy": "precision follows --bf16",
    "use-torch-fsdp2 torch-fsdp2-* enable-full-sharding-* no-strict-fsdp-*": "FSDP is not supported",
    "use-sharp sharp-* nccl-communicator-* high-priority-* tp-comm-overlap-cfg": "process groups are Megatron's own",
    "use-tp-pp-dp-mapping lazy-mpu-init": "the order of the ranks is Megatron's own",
    "use-mp-args-from-*": "a checkpoint is read in any layout; give the flags",
    "use-legacy-models": "only Megatron-core's models are trained",
    "spec": "the layers follow from the model's config; only slime_plugins.models.… and local may be given",
    "non-persistent-* replication* save-retain-interval": "checkpoints are written to --save alone",
    "eod-mask-loss reset-position-ids reset-attention-mask": "samples and their loss masks say it",
    "error-injection-* rerun-mode iterations-to-skip skip-train result-rejected-*": _MACHINERY,
    "adlr-* one-logger* enable-one-logger enable-ft-* calc-ft-* inprocess-* yaml-cfg": _MACHINERY,
    "straggler-* log-straggler disable-straggler-* check-weight-hash-* check-for-spiky-*": _MACHINERY,
    "run-workload-* workload-* dump-param-* config-logger*": _MACHINERY,
    "sft sft-* perform-rl-step rl-* grpo-* langrl-*": "it is of Megatron's own post-training",
    "retro-* bert-* ict-* biencoder-* retriever-* indexer-* titles-* evidence-* block-data-*": _OTHER_MODELS,
    "vision-* swin-* dino-* img-* num-classes num-channels patch-dim classes-* head-lr-mult": _OTHER_MODELS,
    "hybrid-* mask-factor mask-prob mask-type": _OTHER_MODELS,
    "inference-* moe-pad-experts-*": "engines generate, not Megatron",
}
_BECOMES = {"forwarded": "given to Megatron-core", "shape": "compared with the model", "no effect": "no effect"}
_SPECS = ("slime_plugins.models.", "local")


class Word(NamedTuple):
    """A word that names a field.

    Attributes:
        spec: How it is parsed; its ``dest`` is the word's own name.
        field: The field of Megatron's.
        value: The field's value if a switch is given.
    """

    spec: FlagSpec
    field: str
    value: Any = None

    @property
    def becomes(self) -> str:
        """The text of what becomes of it."""
        return next((_BECOMES[kind] for kind in classes(self.field) if kind in _BECOMES), "refused")

    @property
    def reason(self) -> str:
        """Why it cannot be given, or has no effect; empty where it may be given."""
        return arguments.reason(self.field)

    @property
    def has_no_effect(self) -> bool:
        """Whether it has none, whatever the model is."""
        return arguments.has_no_effect(self.field)

    @property
    def is_refused(self) -> bool:
        """Whether the field takes no other value than the one it has."""
        return classes(self.field) in ((), ("refused",))


class WordAnswer(NamedTuple):
    """The answer to a word that names no field: it has no effect, or cannot be given; and why."""

    has_no_effect: bool
    reason: str


@functools.cache
def field_words() -> dict[str, Word]:
    """Every word that names a field of the installed Megatron's configs, by the word.

    Raises:
        ConfigError: Megatron-core is not installed.
    """
    fields, found = megatron_fields(), {}
    for name, field in fields.items():
        if field.is_function or name.startswith("_") or "ours" in classes(name):
            continue
        for word in _own_words(name, field):
            found[word] = _word(word, name, field, not field.default if field.hint is bool else True)
    for off, table in ((False, _SWITCHED_OFF), (True, _SWITCHED_ON)):
        found |= {word: _word(word, name, fields[name], off) for name, words in table.items() for word in words}
    for word, (dest, switches_off) in training_words().items():
        if dest in fields and word not in found and "ours" not in classes(dest):
            found[word] = _word(word, dest, fields[dest], not switches_off)
    return found


def megatron_args(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by field, from the values of words by their names in Python; other names are left out.

    A switch that is ``False`` sets its field to the opposite, unless it is one that switches something off.
    """
    args = {}
    for word in field_words().values():
        if word.spec.dest in given:
            value = given[word.spec.dest]
            if not word.spec.is_switch:
                args[word.field] = _fitting(word, value)
            elif value:
                args[word.field] = word.value
            elif word.value is True:
                args.setdefault(word.field, False)
    return args


def said(name: str, value: Any) -> str:
    """An argument as it is typed."""
    words = [word for word in field_words().values() if word.field == name]
    for word in words:
        if not word.spec.is_switch:
            shown = " ".join(map(str, value)) if isinstance(value, list | tuple) else value
            return f"{word.spec.name} {shown}"
        if word.value == value:
            return word.spec.name
    return f"{words[0].spec.name}=false" if words and value is False else f"{name} {value}"


def word_answer(word: str, values: Sequence[str]) -> WordAnswer | None:
    """The answer to a word, with its values, that names no field; ``None`` if Megatron has no such word."""
    name = word.removeprefix("--").replace("_", "-")
    if name == "spec" and values and values[0].startswith(_SPECS):
        return WordAnswer(True, "the layers follow from the model's config")
    for pattern, answer in other_words().items():
        if fnmatchcase(f"--{name}", pattern):
            return answer
    if word in training_words():
        return WordAnswer(False, "Megatron has it, but slime does not know what it would change here; leave it out")
    return None


def other_words() -> dict[str, WordAnswer]:
    """The words that name no field, as the tables have them, with what becomes of them."""
    kinds = ((True, _NO_EFFECT), (False, _REFUSED))
    rows = [(names, WordAnswer(no_effect, why)) for no_effect, table in kinds for names, why in table.items()]
    return {f"--{name}": found for names, found in rows for name in names.split()}


def _own_words(name: str, field: MegatronField) -> Sequence[str]:
    """How a field is spelled: as Megatron's command line does, as the field says, or by its name."""
    if name in _SPELLED:
        return (_SPELLED[name],)
    if name in _SWITCHED_OFF:
        return ()
    own = f"--{name.replace('_', '-')}"
    return field.words or ((f"--no-{own[2:]}",) if field.hint is bool and field.default is True else (own,))


def _word(word: str, name: str, field: MegatronField, value: Any) -> Word:
    kind, nargs, choices = _parsed(field.hint)
    dest = word[2:].replace("-", "_")
    spec = FlagSpec(word, dest, kind, None, field.help, choices=choices, nargs=nargs)
    return Word(spec, name, value if spec.is_switch else None)


def _kinds(hint: Any) -> list[Any]:
    """The types that a value may have, without ``None``."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return [kind for kind in (typing.get_args(hint) if is_union else (hint,)) if kind is not types.NoneType]


def _parsed(hint: Any) -> tuple[type, str | None, tuple[str, ...] | None]:
    """Type, number and choices of a word's values."""
    kinds = _kinds(hint)
    if bool in kinds:
        return bool, None, None
    for kind in kinds:
        if typing.get_origin(kind) is typing.Literal:
            return str, None, tuple(map(str, typing.get_args(kind)))
        if typing.get_origin(kind) in (list, tuple):
            item = typing.get_args(kind)[0]
            return item if isinstance(item, type) else str, "+", None
    scalars = [kind for kind in kinds if kind in (int, float, str)]
    # Of a list or a number, the list comes later in the annotation.
    several = [kind for kind in kinds if typing.get_origin(kind) is list]
    return (scalars[0] if scalars else str), "+" if several else None, None


def _fitting(word: Word, value: Any) -> Any:
    """The values of a word as its field has them: one alone is not a list where it need not be."""
    kinds = _kinds(megatron_fields()[word.field].hint)
    if not isinstance(value, tuple) or any(typing.get_origin(kind) is tuple for kind in kinds):
        return value
    return value[0] if len(value) == 1 and word.spec.type in kinds else list(value)
