import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import ConfigError
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.server import EngineSpec
from slime_rollout.engine.topology_plan import (
    WORKER_TYPES,
    ServedModel,
    ServerGroup,
    Topology,
    check_runs_here,
    main,
    plan_engines,
    read_topology,
    topology_of,
)

GOOD = """
sglang:
  - name: actor
    num_gpus_per_engine: 2
    update_weights: true
    server_groups:
      - {worker_type: prefill, num_gpus: 2, overrides: {chunked_prefill_size: 4096, enable-metrics: true}}
      - worker_type: decode
        num_gpus: 4
        num_gpus_per_engine: 4
        overrides:
          mem_fraction_static: 0.8
          cuda_graph_bs: [1, 2, 4]
          json-model-override-args: {rope_theta: 10000}
          disable_radix_cache: false
      - {worker_type: placeholder, num_gpus: 1}
  - name: judge
    model_path: path/to/judge
    engine_groups: [{num_gpus: 1}]
"""


@pytest.fixture
def read(tmp_path):
    def write(text):
        path = tmp_path / "engines.yaml"
        path.write_text(text)
        return read_topology(str(path))

    return write


def test_all_that_a_file_may_say(read):
    assert read(GOOD) == Topology(
        models=(
            ServedModel(
                name="actor",
                num_gpus_per_engine=2,
                update_weights=True,
                server_groups=(
                    ServerGroup(
                        worker_type="prefill",
                        num_gpus=2,
                        overrides={"chunked-prefill-size": "4096", "enable-metrics": True},
                    ),
                    ServerGroup(
                        worker_type="decode",
                        num_gpus=4,
                        num_gpus_per_engine=4,
                        overrides={
                            "mem-fraction-static": "0.8",
                            "cuda-graph-bs": ("1", "2", "4"),
                            "json-model-override-args": '{"rope_theta": 10000}',
                            "disable-radix-cache": False,
                        },
                    ),
                    ServerGroup(worker_type="placeholder", num_gpus=1),
                ),
            ),
            ServedModel(name="judge", model_path="path/to/judge", server_groups=(ServerGroup(num_gpus=1),)),
        )
    )
    assert read(GOOD).num_gpus == 8


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (GOOD, "", "the file is None; give `name: value` lines with sglang"),
        (GOOD, "- a", "the file is"),
        (GOOD, "sglang: []", "the file: sglang is []; give a list with at least one entry"),
        (GOOD, "sglang: [{", "line 1: invalid YAML: "),
        ("sglang:", "sgland:", "the file: sgland is not a key; did you mean sglang?"),
        (
            "    update_weights:",
            "    update_weight:",
            "model actor: update_weight is not a key; did you mean update_weights",
        ),
        (
            "{worker_type: prefill,",
            "{type: prefill,",
            "model actor, group 1: type is not a key; ",
        ),
        (
            "worker_type: decode",
            "worker_type: decoder",
            "model actor, group 2: worker_type decoder is unknown; ",
        ),
        ("num_gpus: 4\n", "num_gpus: 0\n", "model actor, group 2: num_gpus is 0; give a whole number, 1 or more"),
        ("num_gpus: 4\n", "num_gpus: four\n", "model actor, group 2: num_gpus is 'four'; give a whole number"),
        ("num_gpus: 4\n", "num_gpus: true\n", "model actor, group 2: num_gpus is True; give a whole number"),
        ("        num_gpus: 4\n", "", "model actor, group 2: num_gpus is missing"),
        (
            "num_gpus: 4\n",
            "num_gpus: 4\n        num_gpus: 2\n",
            "line 10: invalid YAML: the key num_gpus is there",
        ),
        ("num_gpus: 4\n", "num_gpus: 4\n        ? [a]\n        : 1\n", "invalid YAML: found unhashable key"),
        (
            "mem_fraction_static: 0.8\n",
            "mem_fraction_static: 0.8\n          mem-fraction-static: 0.7\n",
            "model actor, group 2: the override mem-fraction-static is given twice",
        ),
        ("update_weights: true", "update_weights: 1", "model actor: update_weights is 1; give true or false"),
        ("name: actor", "name: a/b", "model a/b: name 'a/b' is invalid"),
        ("  - name: actor\n    num", "  - num", "model 1: name is missing"),
        ("name: judge", "name: actor", "two models are called actor"),
        ("worker_type: decode", "worker_type: regular", "prefill and decode groups need each other"),
        ("placeholder, num_gpus: 1}", "regular, num_gpus: 1}", "its router sends requests either to regular groups"),
        ("placeholder, num_gpus: 1}", "placeholder, num_gpus: 1, overrides: {a: 1}}", "a placeholder starts nothing"),
        ("[{num_gpus: 1}]", "[{num_gpus: 1, worker_type: encoder}]", "model judge: no server group generates"),
        ("[{num_gpus: 1}]", "[]", "model judge: server_groups is []; give a list"),
        ("[{num_gpus: 1}]", "[1]", "model judge, group 1 is 1; give `name: value` lines"),
        ("engine_groups", "server_groups: []\n    engine_groups", "server_groups and engine_groups are the same"),
        ("cuda_graph_bs: [1, 2, 4]", "cuda_graph_bs:", "the override cuda_graph_bs is None; give a text, a number"),
        ("cuda_graph_bs: [1, 2, 4]", "cuda_graph_bs: [[1]]", "the override cuda_graph_bs is [[1]]"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(read, tmp_path, old, new, message):
    assert old in GOOD
    with pytest.raises(ConfigError) as caught:
        read(GOOD.replace(old, new, 1))
    assert str(caught.value).startswith(f"--sglang-config {tmp_path / 'engines.yaml'}")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml does not exist; give a YAML file"):
        read_topology(str(tmp_path / "none.yaml"))


def test_prefill_servers_are_short_for_two_groups(read):
    written = read(
        "sglang: [{name: default, update_weights: true, server_groups: "
        "[{worker_type: prefill, num_gpus: 2}, {worker_type: decode, num_gpus: 6}]}]"
    )
    assert topology_of(EngineConfig(prefill_num_servers=1, rollout_num_gpus_per_engine=2), 8) == written
    assert topology_of(EngineConfig(rollout_num_gpus_per_engine=2), 8) is None
    with pytest.raises(
        ConfigError, match="--sglang-config f and --prefill-num-servers 1 both say what the engines are"
    ):
        EngineConfig(sglang_config="f", prefill_num_servers=1)
    config = EngineConfig(prefill_num_servers=4, rollout_num_gpus_per_engine=2)
    with pytest.raises(
        ConfigError, match=r"leaves no engine .*num-gpus 8 with 2 per engine are 4 engines; give at most 3"
    ):
        topology_of(config, 8)


@given(st.sets(st.sampled_from(WORKER_TYPES)))
def test_which_groups_make_a_model(types):
    groups = tuple(ServerGroup(worker_type=kind, num_gpus=1) for kind in sorted(types))
    halves, whole = types & {"prefill", "decode"}, "regular" in types
    if (whole and not halves) or (len(halves) == 2 and not whole):
        ServedModel(name="m", server_groups=groups)
    else:
        with pytest.raises(ConfigError):
            ServedModel(name="m", server_groups=groups)


def model(name, *groups, **settings):
    return ServedModel(name=name, server_groups=groups, **settings)


def group(kind="regular", num_gpus=1, **settings):
    return ServerGroup(worker_type=kind, num_gpus=num_gpus, **settings)


def plan(*models, num_gpus, config=None, **settings):
    return plan_engines(
        Topology(models=models),
        config or EngineConfig(),
        EngineSpec(**{"model_path": "hf", "device": "cuda", **settings}),
        num_gpus=num_gpus,
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
    assert planned.encoders == planned.specs[:2]
    assert planned.generating == planned.specs[2:]
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
    with pytest.raises(ConfigError, match="the prefill engines of model a need GPUs"):
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
