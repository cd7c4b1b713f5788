"""One engine without a fleet: what is refused, and what is told when it does not come up."""

import time

import pytest

from slime_core.errors import ConfigError
from slime_rollout.engine import EngineStartError
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.fleet import EngineFleet
from slime_rollout.engine.server import EngineSpec, SGLangEngine, server_command
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


def test_flags_of_one_engine_win():
    config = EngineConfig(rollout_num_gpus_per_engine=2, sglang_args={"page-size": "1", "enable-metrics": True})
    words = server_command(config, spec(tp_size=4, sglang_args={"page-size": "8", "enable-metrics": False}))
    assert words[words.index("--page-size") + 1] == "8"
    assert words[words.index("--tp-size") + 1] == "4"
    assert "--enable-metrics" not in words
    common = server_command(config, spec())
    assert common[common.index("--tp-size") + 1] == "2"
    assert "--enable-metrics" in common
