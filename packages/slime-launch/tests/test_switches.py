"""Switches with a value, in run files and on command lines: ours, Megatron's, SGLang's and the router's, each."""

import pytest

from slime_convert.shape import ModelShape
from slime_core.errors import ConfigError
from slime_launch.config import CONFIGS
from slime_launch.flags import flag_specs, parse_train, read_train, train_groups
from slime_launch.preflight import preflight
from slime_launch.switches import check_switched_off
from slime_megatron.settings.arguments import problems
from slime_megatron.settings.megatron_values import slime_values
from slime_megatron.settings.megatron_words import field_words, said
from slime_rollout.engine.router import router_command
from slime_rollout.engine.router_flags import router_specs
from slime_rollout.engine.server import EngineSpec, server_command

OURS = sorted(spec.name for config in CONFIGS.values() for spec in flag_specs(config) if spec.is_switch)
SHAPE = sorted(
    {spec.name for group in train_groups() for spec in group.flags if spec.is_switch}.difference(OURS),
)
MEGATRON = sorted(
    name for name, word in field_words().items() if word.spec.is_switch and name not in {*OURS, *SHAPE}
)  # fmt: skip
OPPOSITE = {
    "--bf16": ["--fp32"],
    "--fp32": ["--bf16"],
    "--offload": ["--no-offload-train", "--no-offload-rollout"],
    "--offload-train": ["--no-offload-train"],
    "--offload-rollout": ["--no-offload-rollout"],
    "--use-distributed-optimizer": ["--no-use-distributed-optimizer"],
    "--async-save": ["--no-async-save"],
    "--rollout-skip-special-tokens": ["--no-rollout-skip-special-tokens"],
}
ON_IN_THE_MODEL = {
    *("--swiglu", "--qk-layernorm", "--untie-embeddings-and-output-weights", "--use-rotary-position-embeddings"),
    "--disable-bias-linear",
}
ON_IN_MEGATRON = {"cpu": {"--use-cpu-initialization", "--variable-seq-lengths"}, "cuda": {"--variable-seq-lengths"}}
FORMS = {"run.toml": "{} = false\n", "run.yaml": "{}: off\n"}


@pytest.fixture
def plain(flags, to_words):
    """A good command without a switch in it."""
    return [*to_words({name: value for name, value in flags.items() if value}), "--rollout-num-gpus", "1"]


@pytest.fixture
def said_off(plain, tmp_path):
    """Settings of a run file that says that a switch is off, one for each format, and of the command line."""

    def each(name, command=plain):
        for file, form in FORMS.items():
            (tmp_path / file).write_text(form.format(name.removeprefix("--")))
            yield parse_train([*command, "--config", str(tmp_path / file)])
        yield parse_train([*command, f"{name}=false"])
        prefix = next(prefix for prefix in ("--sglang-", "--router-", "--") if name.startswith(prefix))
        yield parse_train([*command, f"{prefix}no-{name.removeprefix(prefix)}"])

    return each


@pytest.mark.parametrize("name", OURS)
def test_a_switch_of_ours_is_its_opposite_or_not_given(name, plain, said_off):
    expected = parse_train([*plain, *OPPOSITE.get(name, [])]).flags()
    for settings in said_off(name):
        assert settings.flags() | {"config": None} == expected


OTHER_MODES = {"--fp32": "--bf16", "--bf16": "--fp32"}


@pytest.mark.parametrize("name", OURS)
def test_a_switch_that_is_off_and_means_another_mode_says_which(name, plain, said_off):
    mode = OTHER_MODES.get(name)
    notes = () if mode is None else (f"{name}=false is {mode}; leave it out for the default",)
    for settings in said_off(name):
        assert settings.notes == notes
    if mode is not None:
        assert parse_train([*plain, mode, f"{name}=false"]).notes == ()


@pytest.mark.parametrize("name", SHAPE)
def test_a_switch_of_the_models_shape_is_refused_where_the_model_has_it(name, workspace, said_off):
    shape = ModelShape.from_hf_config(str(workspace / "hf"))
    for settings in said_off(name):
        if name in ON_IN_THE_MODEL:
            with pytest.raises(ConfigError, match=f"^{name}=false: the model's config says yes; leave it out"):
                check_switched_off(settings, shape)
        else:
            check_switched_off(settings, shape)


@pytest.mark.parametrize("name", MEGATRON)
def test_a_switch_of_megatrons_is_refused_where_it_is_on_and_cannot_be_off(name, workspace, said_off):
    shape = ModelShape.from_hf_config(str(workspace / "hf"))
    for settings in said_off(name):
        config = settings.megatron
        for device, on in ON_IN_MEGATRON.items():
            values = slime_values(shape, config, on_gpu=device == "cuda")
            found = [*problems(config.megatron_args, shape, config, values, said)]
            assert [line.split(" ")[0] for line in found] == ([f"{name}=false"] if name in on else [])
            if settings.megatron.megatron_args:
                assert not any(config.megatron_args.values())


def test_a_switch_of_sglangs_that_slime_chooses_is_off(said_off, plain):
    spec = EngineSpec(model_path="m", device="cpu")
    assert "--sleep-on-idle" in server_command(parse_train(plain).engine, spec)
    for settings in said_off("--sglang-sleep-on-idle"):
        assert (settings.engine.sglang_args, settings.engine.sglang_off) == ({}, ("sleep-on-idle",))
        assert "--sleep-on-idle" not in server_command(settings.engine, spec)


def test_a_switch_of_sglangs_with_an_opposite_is_that(said_off):
    for settings in said_off("--sglang-lora-strict-loading"):
        words = server_command(settings.engine, EngineSpec(model_path="m", device="cpu"))
        assert "--no-lora-strict-loading" in words and "--lora-strict-loading" not in words


@pytest.mark.parametrize("name", [spec.name for spec in router_specs().values() if spec.is_switch])
def test_a_switch_of_the_routers_is_not_given(name, plain, said_off):
    expected = router_command(parse_train(plain).engine, port=1, prometheus_port=2)
    for settings in said_off(name):
        assert router_command(settings.engine, port=1, prometheus_port=2) == expected


@pytest.mark.parametrize("name", ["--share-prompts", "--overlap-grad-reduce", "--overlap-param-gather"])
def test_a_flag_that_may_stand_without_its_value_has_on_and_off(name, plain, said_off, tmp_path):
    dest = name.removeprefix("--").replace("-", "_")
    assert {settings.flags()[dest] for settings in said_off(name)} == {"off"}
    (tmp_path / "run.yaml").write_text(f"{name[2:]}: on\n")
    plain += ["--use-distributed-optimizer", *(["--overlap-grad-reduce"] if "gather" in name else [])]
    assert parse_train([*plain, "--config", str(tmp_path / "run.yaml")]).flags()[dest] == "on"


def test_the_command_line_switches_off_what_a_recipe_switches_on(plain, tmp_path):
    (tmp_path / "run.toml").write_text(
        "colocate = true\nbf16 = true\nuse-distributed-optimizer = true\nno-offload-train = true\n"
    )
    command = [*plain, "--config", str(tmp_path / "run.toml")]
    assert parse_train(command).cluster.colocate
    more = ["--fp32", "--no-use-distributed-optimizer", "--offload-train"]
    changed = parse_train([*command, "--no-colocate", *more])
    assert changed == parse_train([*command, "--colocate=false", *more])
    assert not changed.cluster.colocate and not changed.megatron.bf16 and changed.megatron.fp32
    assert not changed.megatron.use_distributed_optimizer and changed.cluster.offloads_train
    assert changed.origins["fp32"] == "command line" and "bf16" not in changed.origins
    kept = parse_train([*command, "--no-offload-train=false", "--fp32=false"])
    assert not kept.cluster.no_offload_train and kept.megatron.bf16 and kept.cluster.offloads_train


def test_the_last_of_a_repeated_switch_counts(plain):
    assert parse_train([*plain, "--colocate=false", "--colocate"]).cluster.colocate
    assert not parse_train([*plain, "--colocate", "--colocate=FALSE"]).cluster.colocate
    assert parse_train([*plain, "--colocate=Yes"]).cluster.colocate


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--colocate=7"], "--colocate=7 must be true or false; --colocate alone is true"),
        (
            ["--rollout-stop", "a", "--colocate=false", "b"],
            "unexpected 'b' after --colocate=false; flags",
        ),
        (["--no-coloate"], "unknown flag --no-coloate"),
        (["--no-lr", "1"], "unknown flag --no-lr"),
        (["--no-colocate=true"], "unknown flag --no-colocate"),
        (["--coloate=false"], "unknown flag --coloate; did you mean --colocate"),
        (["--variable-seq-lengths=false"], "--variable-seq-lengths=false cannot be given: micro-batches differ in"),
        (["--swiglu=false"], "--swiglu=false: the model's config says yes"),
        (
            ["--debug-train-only=false", "--load-debug-rollout-data", "{rollout_id}.npz"],
            "--debug-train-only=false: --load-debug-rollout-data starts no engines; leave it out",
        ),
        (
            ["--colocate", "--sglang-enable-memory-saver=false"],
            "--sglang-enable-memory-saver=false: engines give their memory back .* --no-offload-rollout changes that",
        ),
    ],
)
def test_what_cannot_be_off_is_refused_by_name(words, message, plain):
    with pytest.raises(ConfigError, match=message):
        preflight(*read_train([*plain, *words]))


def test_words_of_other_launchers_may_be_off(plain, tmp_path):
    (tmp_path / "run.yaml").write_text("use-tensorboard: false\nskip-train: false\nfp16: false\n")
    settings = parse_train([*plain, "--config", str(tmp_path / "run.yaml")])
    assert settings.megatron.megatron_args == {"fp16": False}
