"""All settings of a run: the launcher's own, and one record with those of every package. No torch and no Ray here."""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime_core.config import POLICY, AlgorithmConfig
from slime_core.flags import Config, flag, flag_specs, flag_values, template_problem
from slime_core.needs import GENERATES, ROLLOUTS, SAMPLES, TRAINERS, UPDATES, given
from slime_core.redact import HIDDEN
from slime_launch.kind import RunKind
from slime_launch.redact import without_secrets
from slime_megatron.service import MegatronConfig
from slime_rollout.checks import HELD_OUT
from slime_rollout.config import SFT_ROLLOUT, RolloutConfig
from slime_rollout.engine import API_KEY, EngineConfig

if TYPE_CHECKING:  # a third of what --help would take
    from slime_rollout.service import Rows

SIDE_BY_SIDE = (GENERATES, TRAINERS)
"""The needs of flags about memory that one half hands to the other: both run."""
_NOW_OF_THE_KIND = RunKind.__dataclass_fields__.keys() - {"has_held_out", "has_critic", "has_reference"}


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(Config, needs=(), may_change=True):
    """How many workers the run has and where Ray finds room for them.

    On a machine without CUDA a "GPU" is a CPU worker process.

    Raises:
        ConfigError: A value is outside its range.
    """

    actor_num_nodes: int = flag(1, unit="nodes", help="nodes that train", least=1)
    actor_num_gpus_per_node: int = flag(
        1, unit="GPUs", help="GPUs (CPU workers without CUDA) that train, per node", least=1
    )
    rollout_num_gpus: int | None = flag(
        None,
        unit="GPUs",
        help="GPUs that generate; with --colocate as many as train, unless given",
        least=1,
        needs=GENERATES,
        harmless=True,
    )
    rollout_max_num_gpus: int | None = flag(
        None,
        unit="GPUs",
        help="GPUs that generate at most: above --rollout-num-gpus, engines are added as nodes of the Ray cluster have "
        "room for them; needs --use-fault-tolerance",
        least=1,
        needs=(GENERATES, given("use_fault_tolerance")),
    )
    train_env_vars: str | None = flag(
        None,
        metavar="JSON",
        help='environment variables of the trainer ranks alone, such as {"NCCL_DEBUG": "WARN"}',
        needs=TRAINERS,
    )
    colocate: bool = flag(False, help="trainer and engines take turns on the same GPUs", needs=GENERATES, harmless=True)
    offload_train: bool = flag(
        False,
        help="trainers give weights, gradients and optimizer state back while engines generate; so with --colocate",
        needs=SIDE_BY_SIDE,
        harmless=True,
    )
    no_offload_train: bool = flag(
        False,
        help="trainers keep their memory, also with --colocate",
        needs=(*SIDE_BY_SIDE, given("colocate")),
        harmless=True,
    )
    offload_rollout: bool = flag(
        False,
        help="engines give weights and KV cache back while trainers work; so with --colocate",
        needs=SIDE_BY_SIDE,
        harmless=True,
    )
    no_offload_rollout: bool = flag(
        False,
        help="engines keep their memory, also with --colocate",
        needs=(*SIDE_BY_SIDE, given("colocate")),
        harmless=True,
    )
    offload: bool = flag(False, help="--offload-train and --offload-rollout", needs=SIDE_BY_SIDE, harmless=True)
    ray_placement_timeout: float = flag(120.0, unit="seconds", help="longest wait for room on the Ray cluster", above=0)
    ray_require_token: bool = flag(
        False, help="refuse a Ray cluster (RAY_ADDRESS) that accepts commands without a token"
    )
    trainer_max_restarts: int = flag(
        3,
        help="with --save: how often the trainers may start again from the last checkpoint, where a rank dies or "
        "hangs, before the run fails; 0 ends the run at once",
        least=0,
        needs=(TRAINERS, given("save")),
    )
    ray_object_store_memory: int = flag(
        256 * 2**20,
        unit="bytes",
        help="shared memory of an embedded Ray; unused when RAY_ADDRESS names a cluster",
        least=80 * 2**20,
    )

    @property
    def train_environment(self) -> dict[str, str]:
        """``--train-env-vars``, parsed."""
        return dict(json.loads(self.train_env_vars or "{}"))

    def contradictions(self) -> Iterator[str]:
        """Environment variables that are not a JSON object of texts; memory that is kept and given back."""
        for half in ("train", "rollout"):
            given = self.offload or getattr(self, f"offload_{half}")
            if given and getattr(self, f"no_offload_{half}"):
                asked = f"--offload-{half}" if getattr(self, f"offload_{half}") else "--offload"
                yield f"{asked} and --no-offload-{half} contradict each other; give one of them"
        try:
            given = json.loads(self.train_env_vars or "{}")
        except ValueError:
            given = None
        if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
            yield (
                f"--train-env-vars {self.train_env_vars} is not a JSON object of texts; give one such as "
                '{"NCCL_DEBUG": "WARN"}'
            )

    @property
    def offloads_train(self) -> bool:
        """Whether trainers give their memory back while engines generate."""
        return not self.no_offload_train and (self.colocate or self.offload or self.offload_train)

    @property
    def offloads_rollout(self) -> bool:
        """Whether engines give their memory back while trainers work."""
        return not self.no_offload_rollout and (self.colocate or self.offload or self.offload_rollout)

    @property
    def actor_gpus(self) -> int:
        """GPUs that train: the number of trainer ranks."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def rollout_gpus(self) -> int:
        """GPUs that generate; 0 where nothing says how many."""
        if self.rollout_num_gpus is not None:
            return self.rollout_num_gpus
        return self.actor_gpus if self.colocate else 0

    @property
    def spare_gpus(self) -> int:
        """GPUs that generate once nodes have room for them."""
        return max(0, (self.rollout_max_num_gpus or 0) - self.rollout_gpus)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config, needs=(), may_change=True):
    """How long the run is, when it evaluates and where it writes.

    Raises:
        ConfigError: A value is outside its range.
    """

    num_rollout: int | None = flag(
        None, unit="rollouts", help="rounds of generation and training in the whole run; 0 only evaluates", least=0
    )
    num_epoch: int | None = flag(
        None,
        unit="epochs",
        help="in place of --num-rollout: times the rows of --prompt-data, divided by --rollout-batch-size",
        least=1,
        needs=ROLLOUTS,
    )
    config: str | None = flag(
        None, metavar="FILE", help="TOML or YAML file of flags, by name; what the command line gives wins over it"
    )
    num_steps_per_rollout: int = flag(
        1,
        unit="steps",
        help="optimizer steps that train on one rollout, in order",
        least=1,
        needs=UPDATES,
        may_change=False,
    )
    megatron_config_path: str | None = flag(
        None,
        metavar="FILE",
        help="YAML file with settings of the actor or the critic that differ from the flags: "
        "`megatron: [{role: critic, overrides: {lr: 1e-5}}]`",
        needs=TRAINERS,
        may_change=False,
    )
    eval_interval: int | None = flag(
        None,
        unit="rollouts",
        help="rollouts between two evaluations; first and last only unless given",
        least=1,
        needs=(*HELD_OUT, ROLLOUTS),
    )
    stall_timeout: float = flag(
        3600.0,
        unit="seconds",
        help="longest time without progress: until another sample is scored, or for one rollout's training, a save or "
        "a start. The wait then ends with what hangs and all stacks; with --save, trainers that hang start again",
        above=0,
    )
    skip_eval_before_train: bool = flag(
        False, help="leave out the evaluation before the first rollout", needs=(*HELD_OUT, ROLLOUTS)
    )
    output_dir: str | None = flag(
        None, metavar="DIR", help="where logs, metrics and the report go; a new directory in outputs/ unless given"
    )
    report_samples: int = flag(
        8,
        help="samples of each rollout whose text, log-probs and advantages are kept for `slime-launch report`, besides "
        "one dropped group for each reason",
        least=0,
    )
    load_debug_rollout_data: str | None = flag(
        None,
        metavar="TEMPLATE",
        help="train on rollouts from files, with {rollout_id} in their name, such as --save-debug-rollout-data wrote; "
        "no engines are started, and no weights sent",
        may_change=False,
    )
    debug_train_only: bool = flag(
        False,
        help="start no engines; needs --load-debug-rollout-data, or a --loss-type on rows of a data set",
        may_change=False,
    )
    debug_rollout_only: bool = flag(
        False,
        help="start no trainers: generate and score with the weights of --hf-checkpoint, and write that down",
        may_change=False,
    )
    save_debug_rollout_data: str | None = flag(
        None, metavar="TEMPLATE", help="file, with {rollout_id} in its name, that each rollout is written to"
    )
    dump_details: str | None = flag(
        None,
        metavar="DIR",
        help="--save-debug-rollout-data and --save-debug-train-data into rollout_data and train_data there",
    )
    keep_rollouts: bool = flag(
        False,
        help="keep the file of every rollout, not only of those since the checkpoint before the last; without --save, "
        "they are in --output-dir",
        needs=UPDATES,
    )
    max_checkpoints_kept: int | None = flag(
        None,
        unit="checkpoints",
        help="newest checkpoints that --save keeps; all unless given",
        least=1,
        needs=(UPDATES, given("save")),
    )
    save_hf: str | None = flag(
        None,
        metavar="TEMPLATE",
        help="directory, with {rollout_id} in its name, that each checkpoint is exported to as a Hugging Face model",
        needs=(UPDATES, given("save")),
    )
    max_logprob_drift: float | None = flag(
        None,
        unit="nats",
        help="largest mean distance of the trainer's log-probs from the engine's in an optimizer step, which "
        "train/train_rollout_logprob_abs_diff has; beyond it the run ends",
        above=0,
        needs=(SAMPLES, *POLICY),
    )
    logprob_drift_action: str = flag(
        "stop",
        choices=("stop", "warn"),
        help="what follows on a distance beyond --max-logprob-drift: the run ends, or says so and goes on",
        needs=given("max_logprob_drift"),
    )
    log_passrate: bool = flag(
        False, help="track pass@1, pass@2, pass@4 … of the samples that are trained on", needs=(SAMPLES, ROLLOUTS)
    )
    disable_tensorboard: bool = flag(False, help="write no TensorBoard files; metrics.jsonl is always written")

    def contradictions(self) -> Iterator[str]:
        """Settings of debugging that need each other."""
        if self.num_rollout is None and self.num_epoch is None:
            yield "missing --num-rollout, or --num-epoch; see --help"
        if self.debug_rollout_only and (self.debug_train_only or self.load_debug_rollout_data is not None):
            other = "--debug-train-only" if self.debug_train_only else "--load-debug-rollout-data"
            yield f"--debug-rollout-only trains nothing and {other} generates nothing; give one of them"
        for name in ("--load-debug-rollout-data", "--save-debug-rollout-data", "--save-hf"):
            template = getattr(self, name.removeprefix("--").replace("-", "_"))
            if problem := template_problem(name, template, ("rollout_id",)):
                yield problem


@dataclass(frozen=True, kw_only=True)
class TrackingConfig(Config, needs=given("use_wandb"), may_change=True):
    """Weights & Biases beside ``metrics.jsonl`` and TensorBoard. ``wandb_key`` is never held: see `wandb_run`."""

    use_wandb: bool = flag(False, help="track in Weights & Biases, too; needs the package wandb", needs=())
    wandb_mode: str = flag(
        "online", choices=("online", "offline", "disabled"), help="send metrics, or write files alone"
    )
    wandb_project: str | None = flag(None, help="project in W&B")
    wandb_group: str | None = flag(None, help="group in W&B, and name of the run")
    wandb_team: str | None = flag(None, help="team or user in W&B that the project is of")
    wandb_host: str | None = flag(None, metavar="URL", help="W&B server, if it is your own")
    wandb_key: str | None = flag(None, metavar="KEY", help="W&B's API key; better set WANDB_API_KEY: others see flags")
    wandb_dir: str | None = flag(
        None, metavar="DIR", help="where W&B writes its files; the run's directory unless given"
    )
    wandb_run_id: str | None = flag(None, help="run in W&B to go on in")
    disable_wandb_random_suffix: bool = flag(
        False, help="take --wandb-group as it is, without random letters at its end", needs=given("wandb_group")
    )
    wandb_always_use_train_step: bool = flag(False, help="draw curves of rollouts and evaluations over optimizer steps")


CONFIGS: dict[str, type[Any]] = {
    "megatron": MegatronConfig,
    "engine": EngineConfig,
    "rollout": RolloutConfig,
    "algorithm": AlgorithmConfig,
    "cluster": ClusterConfig,
    "run": RunConfig,
    "tracking": TrackingConfig,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of one command line.

    Attributes:
        shape: Flags of the model's shape that were given, by name; the rest comes from the Hugging Face config.
        notes: What the command line holds that has no effect, or another name here; said once.
        origins: Where each flag that was given comes from, by name in Python: ``command line`` or ``config file``.
        unread: Flags that could not be read, by name in Python; here they have their defaults.
        switched_off: Switches that the command says are off, by name in Python.
    """

    shape: Mapping[str, Any]
    megatron: MegatronConfig
    engine: EngineConfig
    rollout: RolloutConfig
    algorithm: AlgorithmConfig
    cluster: ClusterConfig
    run: RunConfig
    tracking: TrackingConfig
    notes: tuple[str, ...] = ()
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    switched_off: frozenset[str] = frozenset()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A part of :attr:`kind` that was one of these settings, with a warning."""
            if name not in _NOW_OF_THE_KIND:
                raise AttributeError(f"Settings has no attribute {name!r}", name=name, obj=self)
            text = f"Settings.{name} is now Settings.kind.{name}; the old name goes with the next release"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return getattr(self.kind, name)

    @functools.cached_property
    def kind(self) -> RunKind:
        """What the run has."""
        recorded, evaluates = self.run.load_debug_rollout_data is not None, self.run.num_rollout == 0
        rows = None if recorded else self._rows()
        generates = not recorded and rows is None
        given = self.megatron.load is not None or self.megatron.ref_load is not None
        # An evaluation of the weights that engines start with needs no trainers.
        trains = not self.run.debug_rollout_only and (given or not evaluates or not generates)
        return RunKind(
            generates=generates,
            trains=trains,
            rows=rows,
            is_recorded=recorded,
            only_evaluates=evaluates,
            has_held_out=self.rollout.evaluation.has_eval_sets and not recorded,
            has_critic=self.algorithm.needs_critic,
            has_reference=self.algorithm.needs_reference,
            trainer_sleeps=self.cluster.offloads_train and generates and trains,
            engines_sleep=self.cluster.offloads_rollout and generates and trains,
        )

    def _rows(self) -> Rows | None:
        if self.algorithm.on_data:
            return "pairs" if self.algorithm.on_pairs else "conversations"
        return "conversations" if self.rollout.sampling.rollout_function_path == SFT_ROLLOUT else None

    @property
    def compares_samples(self) -> bool:
        """Whether rewards that are equal within every group change no weight."""
        return self.algorithm.compares_samples and self.rollout.hooks.custom_reward_post_process_path is None

    @property
    def num_rollout(self) -> int:
        """Rounds of the whole run. `slime_launch.preflight` makes ``--num-epoch`` a number of them."""
        return self.run.num_rollout or 0

    @property
    def samples_per_prompt(self) -> int:
        """Samples that a row of ``--prompt-data`` becomes."""
        return 2 if self.algorithm.on_pairs else self.rollout.selection.n_samples_per_prompt

    @property
    def placed(self) -> ClusterConfig:
        """The workers that have to find room on the cluster: those of the halves that the run has."""
        if not self.kind.generates:
            return dataclasses.replace(self.cluster, colocate=False, rollout_num_gpus=None, rollout_max_num_gpus=None)
        if not self.kind.trains and self.cluster.colocate:
            return dataclasses.replace(self.cluster, colocate=False, rollout_num_gpus=self.cluster.rollout_gpus)
        return self.cluster

    def flags(self) -> dict[str, Any]:
        """Every flag by its name in Python, given or not, as plain values that JSON can hold: what hooks get as args.

        For what is written down or sent, see :meth:`public_flags`.
        """
        values: dict[str, Any] = dict(self.shape)
        for part in CONFIGS:
            values |= flag_values(getattr(self, part))
        values |= self.megatron.megatron_args
        values |= {f"router_{name.replace('-', '_')}": value for name, value in self.engine.router_args.items()}
        values |= {sglang_dest(name): value for name, value in self.engine.sglang_args.items()}
        if API_KEY in self.engine.sglang_args:
            values[sglang_dest(API_KEY)] = HIDDEN
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def public_flags(self) -> dict[str, Any]:
        """The same with every secret in them replaced, for the manifest and trackers."""
        return without_secrets(self.flags())


def free_flags() -> frozenset[str]:
    """Flags that may differ when a run is continued, by their names in Python."""
    return frozenset(spec.dest for config in CONFIGS.values() for spec in flag_specs(config) if spec.may_change)


def sglang_dest(name: str) -> str:
    """Name in Python of an SGLang flag: ``mem-fraction-static`` is ``sglang_mem_fraction_static``."""
    return f"sglang_{name.replace('-', '_')}"
