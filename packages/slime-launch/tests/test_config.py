"""All settings of a run."""

import sys
from types import SimpleNamespace

import pytest

from slime_core.errors import ConfigError
from slime_launch.calls import Watch
from slime_launch.flags import parse_train
from slime_launch.trainers import start_ranks


def test_every_flag_reaches_hooks_by_name(flags, to_words):
    values = parse_train([*to_words(flags), "--sglang-mem-fraction-static", "0.8"]).flags()
    assert values["rollout_batch_size"] == 4
    assert values["lr"] == 1e-6
    assert values["sglang_mem_fraction_static"] == "0.8"


def test_one_directory_for_all_dumps(flags, to_words):
    settings = parse_train(to_words(flags | {"--dump-details": "d", "--save-debug-train-data": "t{rollout_id}{rank}"}))
    assert settings.run.save_debug_rollout_data == "d/rollout_data/{rollout_id}.npz"
    assert settings.megatron.save_debug_train_data == "t{rollout_id}{rank}"


def test_variables_of_the_trainers(flags, to_words, monkeypatch, tmp_path):
    settings = parse_train(to_words(flags | {"--train-env-vars": '{"NCCL_DEBUG": "WARN"}'}))
    options = {}

    class Actor:
        def options(self, **given):
            options.update(given)
            return SimpleNamespace(remote=lambda *_: None)

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(remote=lambda _: Actor()))
    place = SimpleNamespace(
        trainer=(0,),
        strategy=lambda _: None,
        layout=SimpleNamespace(cuda=True, trainer_resources=lambda: {"num_cpus": 0.5}),
        on_several_nodes=False,
    )
    start_ranks(place, 1, settings.cluster.train_environment, log_dir=tmp_path, watch=Watch())
    given = options["runtime_env"]["env_vars"]
    assert given["NCCL_DEBUG"] == "WARN"
    assert given.keys() == {"NCCL_DEBUG", "PYTHONSAFEPATH", "RAY_kill_child_processes_on_worker_exit"}
    for wrong in ("{", "[1]", '{"A": 1}'):
        with pytest.raises(ConfigError, match="is not a JSON object of texts"):
            parse_train(to_words(flags | {"--train-env-vars": wrong}))
