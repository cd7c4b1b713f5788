"""The launcher's own settings: the cluster and the run. No torch and no Ray here."""

from __future__ import annotations

from dataclasses import dataclass

from slime_core.flags import Config, flag


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(Config):
    """How many workers the run has and where Ray finds room for them.

    On a machine without CUDA a "GPU" is a CPU worker process.

    Raises:
        ConfigError: A value is outside its range.
    """

    actor_num_nodes: int = flag(1, unit="nodes", help="nodes that train", least=1, may_change=True)
    actor_num_gpus_per_node: int = flag(
        1, unit="GPUs", help="GPUs (CPU workers without CUDA) that train, per node", least=1, may_change=True
    )
    rollout_num_gpus: int | None = flag(
        None,
        unit="GPUs",
        help="GPUs that generate; with --colocate as many as train, unless given",
        least=1,
        may_change=True,
    )
    colocate: bool = flag(False, help="trainer and engines take turns on the same GPUs", may_change=True)
    ray_placement_timeout: float = flag(
        120.0, unit="seconds", help="longest wait for room on the Ray cluster", above=0, may_change=True
    )
    ray_object_store_memory: int = flag(
        256 * 2**20,
        unit="bytes",
        help="shared memory of an embedded Ray; unused when RAY_ADDRESS names a cluster",
        least=80 * 2**20,
        may_change=True,
    )

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


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """How long the run is, when it evaluates and where it writes.

    Raises:
        ConfigError: A value is outside its range.
    """

    num_rollout: int = flag(
        unit="rollouts", help="rounds of generation and training in the whole run", least=1, may_change=True
    )
    num_steps_per_rollout: int = flag(
        1, unit="steps", help="optimizer steps that train on one rollout, in order", least=1
    )
    eval_interval: int | None = flag(
        None,
        unit="rollouts",
        help="rollouts between two evaluations; first and last only unless given",
        least=1,
        may_change=True,
    )
    skip_eval_before_train: bool = flag(
        False, help="leave out the evaluation before the first rollout", may_change=True
    )
    output_dir: str | None = flag(
        None,
        metavar="DIR",
        help="where logs, metrics and the report go; a new directory in outputs/ unless given",
        may_change=True,
    )
    keep_rollouts: bool = flag(
        False, help="keep the file of every rollout, not only of those since the last checkpoint", may_change=True
    )
    disable_tensorboard: bool = flag(
        False, help="write no TensorBoard files; metrics.jsonl is always written", may_change=True
    )
