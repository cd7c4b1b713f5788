"""One engine without a fleet: what is refused, and what is told when it does not come up."""

import itertools
import subprocess
import sys
import time

import pytest

from slime_core.errors import ConfigError
from slime_rollout.engine import EngineStartError
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.fleet import EngineFleet
from slime_rollout.engine.server import (
    MEETING,
    EngineSpec,
    SGLangEngine,
    check_flags,
    folder_environment,
    server_command,
    server_environment,
)
from slime_rollout.http import HttpError, call

pytestmark = pytest.mark.timeout(60)


def spec(**settings):
    return EngineSpec(model_path="model", device="cpu", **settings)


BAD_ARGS = [
    ({"page-sise": "1"}, "did you mean --sglang-page-size?"),
    ({"page-size": "large"}, "--sglang-page-size large is not a whole number"),
    ({"page-size": True}, "--sglang-page-size needs a value"),
    ({"enable-metrics": "yes"}, "--sglang-enable-metrics takes no value"),
    ({"grammar-backend": "yacc"}, "--sglang-grammar-backend yacc is unknown; allowed: xgrammar, none"),
    ({"admin-api-key": "x"}, "--sglang-admin-api-key cannot be given: slime sends engines one key"),
    ({"model-path": "other"}, "--sglang-model-path cannot be given: use --hf-checkpoint"),
]


@pytest.mark.parametrize(("args", "message"), BAD_ARGS)
def test_flags_are_checked_against_the_installed_sglang(sglang_python, tmp_path, args, message):
    config = EngineConfig(sglang_python=sglang_python("exit 3"), sglang_args=args)
    with pytest.raises(ConfigError) as caught:
        SGLangEngine.start(config, spec(), log_path=tmp_path / "logs" / "engine.log")
    assert message in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        EngineFleet.start(
            config,
            model_path="m",
            num_engines=1,
            dtype="float32",
            context_length=None,
            seed=0,
            log_dir=tmp_path / "logs",
        )
    assert message in str(caught.value)
    assert not (tmp_path / "logs").exists()


def test_one_that_ends_is_told_with_the_end_of_its_log(sglang_python, tmp_path):
    config = EngineConfig(sglang_python=sglang_python("echo no such model; exit 3"), sglang_args={"page-size": "2"})
    with (
        SGLangEngine.start(config, spec(), log_path=tmp_path / "logs" / "engine.log") as engine,
        pytest.raises(EngineStartError, match=r"(?s)did not start \(exit code 3\); .*engine\.log:\nno such model"),
    ):
        engine.wait_until_ready(30)


def test_one_that_never_answers_is_given_up_in_time(sglang_python, tmp_path):
    config = EngineConfig(sglang_python=sglang_python("echo loading; exec sleep 600"))
    started = time.monotonic()
    with SGLangEngine.start(config, spec(), log_path=tmp_path / "engine.log") as engine:
        with pytest.raises(EngineStartError, match=r"(?s)does not answer after 0.5 s; see .*engine\.log:\nloading"):
            engine.wait_until_ready(0.5)
        pid = engine.pid
    assert time.monotonic() - started < 20
    assert engine._process.poll() is not None, pid


def test_one_that_is_up_answers_at_its_own_port(quick_python, tmp_path):
    config = EngineConfig(sglang_python=quick_python)
    with SGLangEngine.start(config, spec(), log_path=tmp_path / "engine.log") as engine:
        engine.wait_until_ready(30)
        assert engine.spec.port > 0
        assert call("POST", f"{engine.url}/generate", {})["text"] == "model"
    with pytest.raises(HttpError):
        call("GET", f"{engine.url}/health")


def test_an_engine_on_cuda_that_is_to_sleep_saves_its_memory():
    for device, memory_saver in itertools.product(("cpu", "cuda"), (False, True)):
        given = EngineSpec(model_path="model", device=device, memory_saver=memory_saver)
        wanted = memory_saver and device == "cuda"
        assert ("--enable-memory-saver" in server_command(EngineConfig(), given)) == wanted
        assert ("SGLANG_MEMORY_SAVER_CUDA_GRAPH" in server_environment(EngineConfig(), given)) == wanted


def test_an_engine_on_a_cpu_reuses_the_memory_that_it_frees():
    code = "import resource\nfor _ in range(2): b'x' * (64 << 20); print(resource.getrusage(0).ru_minflt)"
    environment = server_environment(EngineConfig(), EngineSpec(model_path="model", device="cpu"))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    first, second = map(int, done.stdout.split())
    assert first > 10_000 and second - first < 100


def test_flags_of_one_engine_win():
    config = EngineConfig(rollout_num_gpus_per_engine=2, sglang_args={"page-size": "1", "enable-metrics": True})
    words = server_command(config, spec(tp_size=4, sglang_args={"page-size": "8", "enable-metrics": False}))
    assert words[words.index("--page-size") + 1] == "8"
    assert words[words.index("--tp-size") + 1] == "4"
    assert "--enable-metrics" not in words
    common = server_command(config, spec())
    assert common[common.index("--tp-size") + 1] == "2"
    assert "--enable-metrics" in common


def test_a_key_is_in_the_environment_of_an_engine_and_not_among_its_words():
    random = EngineConfig().with_key()
    given, none = (EngineConfig(sglang_args={"api-key": text}).with_key() for text in ("theirs", ""))
    assert len(random.key) > 30 and random.key != EngineConfig().with_key().key and random.key not in repr(random)
    assert (given.key, none.key, EngineConfig().key) == ("theirs", None, None)
    for config in (random, given, none):
        words = server_command(config, spec())
        assert "--api-key" not in words and config.key not in words
        assert server_environment(config, spec()).get("SLIME_API_KEY") == config.key
        assert ("-m" in words) == (config.key is None)


def test_one_group_of_engines_cannot_have_a_key_of_its_own():
    with pytest.raises(ConfigError, match="use --sglang-api-key"):
        check_flags(EngineConfig(), [spec(sglang_args={"api-key": "x"})])


def test_an_engine_computes_with_its_own_number_of_threads(monkeypatch):
    """The worker that starts it has one, and torch takes the smaller of the two variables."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    environment = server_environment(EngineConfig(engine_threads=3), EngineSpec(model_path="model", device="cpu"))
    assert (environment["OMP_NUM_THREADS"], environment["MKL_NUM_THREADS"]) == ("3", "3")


@pytest.mark.parametrize(
    ("changes", "sglang_args", "meets_in_a_file"),
    [
        ({}, {}, True),
        ({}, {"data-parallel-size": "2"}, False),  # each replica is a group of its own, and they would meet in one file
        ({}, {"dp-size": "2"}, False),
        ({}, {"dp-size": "2", "enable-dp-attention": True}, True),
        ({}, {"dist-init-addr": "10.0.0.1:5000"}, False),
        ({"meeting_point": "10.0.0.1:5000", "nodes": 2}, {}, False),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_where_ranks_of_an_engine_meet(monkeypatch, tmp_path, device, changes, sglang_args, meets_in_a_file):
    monkeypatch.delenv(MEETING, raising=False)
    given = EngineSpec(model_path="model", port=5, device=device, sglang_args=sglang_args, **changes)
    found = folder_environment(EngineConfig(), given, tmp_path)
    assert found["TMPDIR"] == str(tmp_path)
    assert found.get(MEETING) == (f"file://{tmp_path}/ranks" if meets_in_a_file else None)
    assert ("MASTER_PORT" in found) == (meets_in_a_file and device == "cpu")


def test_where_somebody_else_lets_them_meet_stays(monkeypatch, tmp_path):
    monkeypatch.setenv(MEETING, "env://")
    given = EngineSpec(model_path="model", port=5, device="cpu")
    assert folder_environment(EngineConfig(), given, tmp_path) == {"TMPDIR": str(tmp_path)}
