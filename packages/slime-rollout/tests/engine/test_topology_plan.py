import re
import shlex
from pathlib import Path

import pytest

from slime_core.errors import ConfigError
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.topology import ServedModel, ServerGroup, Topology
from slime_rollout.engine.topology_plan import check_runs_here, main, plan_engines


def model(name, *groups, **settings):
    return ServedModel(name=name, server_groups=groups, **settings)


def group(kind="regular", num_gpus=1, **settings):
    return ServerGroup(worker_type=kind, num_gpus=num_gpus, **settings)


def plan(*models, num_gpus, config=None, **settings):
    return plan_engines(
        Topology(models=models),
        config or EngineConfig(),
        hf_checkpoint="hf",
        num_gpus=num_gpus,
        **{"device": "cuda", **settings},
    )


def flags(command):
    """A command line as names with values."""
    words = shlex.split(command)[3:]
    names = [place for place, word in enumerate(words) if word.startswith("--")]
    return {words[a]: words[a + 1 : b] for a, b in zip(names, [*names[1:], len(words)], strict=True)}


def test_gpus_are_given_out_in_order():
    made = plan(
        model("actor", group(num_gpus=4, num_gpus_per_engine=2), group("placeholder", 3)),
        model("judge", group(num_gpus=2), model_path="judge", num_gpus_per_engine=1),
        num_gpus=9,
        config=EngineConfig(rollout_num_gpus_per_engine=2),
        seed=5,
        context_length=100,
    )
    assert made.lines() == [
        "actor (trained): regular engine on GPUs 0 to 1",
        "actor (trained): regular engine on GPUs 2 to 3",
        "judge: regular engine on GPU 7",
        "judge: regular engine on GPU 8",
    ]
    started = [flags(command) for command in made.commands()]
    assert [one["--base-gpu-id"] for one in started] == [["0"], ["2"], ["7"], ["8"]]
    assert [one["--tp-size"] for one in started] == [["2"], ["2"], ["1"], ["1"]]
    assert [one["--random-seed"] for one in started] == [["5"], ["6"], ["7"], ["8"]]
    assert [one["--model-path"] for one in started] == [["hf"], ["hf"], ["judge"], ["judge"]]
    assert [one.get("--context-length") for one in started] == [["100"], ["100"], None, None]
    assert len({one["--port"][0] for one in started}) == made.num_engines == 4


def test_prefill_and_decode():
    made = plan(
        model("m", group("prefill", 2, num_gpus_per_engine=2), group("decode", 2), num_gpus_per_engine=2), num_gpus=4
    )
    prefill, decode = (flags(command) for command in made.commands())
    assert prefill["--disaggregation-mode"] == ["prefill"]
    assert prefill["--disaggregation-bootstrap-port"] != prefill["--port"]
    assert decode["--disaggregation-mode"] == ["decode"]
    assert "--disaggregation-bootstrap-port" not in decode


def test_encoders_come_first_and_are_known_to_those_that_read_prompts():
    made = plan(model("m", group("prefill"), group("decode"), group("encoder", 2)), num_gpus=4)
    (planned,) = made.models
    assert [spec.worker_type for spec in planned.specs] == ["encoder", "encoder", "prefill", "decode"]
    assert planned.encoders == list(planned.specs[:2])
    assert planned.generating == list(planned.specs[2:])
    first, second, prefill, decode = (flags(command) for command in made.commands())
    assert "--encoder-only" in first and "--encoder-only" in second
    assert prefill["--encoder-urls"] == [f"http://127.0.0.1:{one['--port'][0]}" for one in (first, second)]
    assert "--language-only" in prefill
    assert "--encoder-urls" not in decode


def test_overrides_win_and_false_leaves_a_switch_out(sglang_python):
    config = EngineConfig(
        sglang_python=sglang_python(), sglang_args={"mem-fraction-static": "0.5", "enable-metrics": True}
    )
    own = {"mem-fraction-static": "0.9", "enable-metrics": False}
    made = plan(model("m", group(), group(overrides=own)), num_gpus=2, config=config)
    common, special = (flags(command) for command in made.commands())
    assert common["--mem-fraction-static"] == ["0.5"] and "--enable-metrics" in common
    assert special["--mem-fraction-static"] == ["0.9"] and "--enable-metrics" not in special


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"mem-fraction-statik": "0.9"}, "did you mean --sglang-mem-fraction-static?"),
        ({"mem-fraction-static": "much"}, "--sglang-mem-fraction-static much is not a number"),
        ({"mem-fraction-static": False}, "--sglang-mem-fraction-static needs a value"),
        ({"tp-size": "2"}, "--sglang-tp-size cannot be given: use --rollout-num-gpus-per-engine"),
        (
            {"disaggregation-mode": "decode"},
            "model m, group 1: the override disaggregation-mode follows from ",
        ),
    ],
)
def test_overrides_are_flags_of_the_installed_sglang(sglang_python, own, message):
    with pytest.raises(ConfigError) as caught:
        plan(model("m", group(overrides=own)), num_gpus=1, config=EngineConfig(sglang_python=sglang_python()))
    assert message in str(caught.value)


def test_gpus_that_do_not_add_up():
    with pytest.raises(ConfigError, match=r"uses 3 GPUs \(a 1, b 2\), and --rollout-num-gpus is 4; make them the same"):
        plan(model("a", group()), model("b", group(num_gpus=2), model_path="b"), num_gpus=4)
    with pytest.raises(ConfigError, match="model a, group 1: num_gpus 3 must be a multiple of the 2 GPUs of an engine"):
        plan(model("a", group(num_gpus=3), num_gpus_per_engine=2), num_gpus=3)


def test_which_model_is_trained(tmp_path):
    def trained(*models):
        made = plan(*models, num_gpus=len(models))
        return made.trained and made.trained.name

    assert trained(model("a", group(), model_path="other"), model("b", group())) == "b"
    assert trained(model("a", group(), model_path="other"), model("b", group(), model_path="./hf")) == "b"
    assert trained(model("a", group(), model_path="x", update_weights=True)) == "a"
    assert trained(model("a", group(), update_weights=False)) is None
    with pytest.raises(ConfigError, match="the models a, b would all get the trainer's weights; set `update"):
        trained(model("a", group()), model("b", group()))


def test_weights_go_to_engines_of_one_size():
    groups = (group(num_gpus=2, num_gpus_per_engine=2), group())
    with pytest.raises(ConfigError, match="engines of the trained model a have 1 and 2 GPUs"):
        plan(model("a", *groups), num_gpus=3)
    plan(model("a", *groups, model_path="other"), num_gpus=3)


def test_without_gpus_only_regular_engines_run():
    groups = (group("prefill"), group("decode"))
    check_runs_here(plan(model("a", *groups), num_gpus=2))
    check_runs_here(plan(model("a", group()), num_gpus=1, device="cpu"))
    with pytest.raises(ConfigError, match="the prefill group of model a needs GPUs"):
        check_runs_here(plan(model("a", *groups), num_gpus=2, device="cpu"))


def test_the_plan_is_printed(tmp_path, capsys):
    file = tmp_path / "engines.yaml"
    file.write_text("sglang: [{name: a, server_groups: [{num_gpus: 2}]}]")
    words = [str(file), "--hf-checkpoint", "hf", "--device", "cuda", "--rollout-num-gpus"]
    assert main([*words, "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0::2] == ["a (trained): regular engine on GPU 0", "a (trained): regular engine on GPU 1"]
    assert all("-m sglang.launch_server --model-path hf" in line for line in lines[1::2])
    assert main([*words, "3"]) == 2
    assert capsys.readouterr().err.startswith("--sglang-config uses 2 GPUs (a 2), and --rollout-num-gpus is 3")


def test_the_file_on_the_page_uses_eight_gpus(tmp_path, capsys):
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(sglang:.*?)```", page, re.DOTALL)
    file = tmp_path / "engines.yaml"
    file.write_text(text.replace(", overrides: {mem_fraction_static: 0.8}", ""))
    assert main([str(file), "--hf-checkpoint", "hf", "--rollout-num-gpus", "8", "--device", "cuda"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()[0::2]] == [
        *["actor (trained)"] * 2,
        *["judge"] * 2,
    ]
