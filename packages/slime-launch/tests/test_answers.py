"""The table of other launchers' flags is whole, points at flags that there are, and is what `train` goes by."""

import re
from pathlib import Path

import pytest

from slime_launch.answers import Outcome, flag_line, foreign_answer, table, upstream_answer
from slime_launch.errors import FlagError
from slime_launch.flags import OTHERS, command, parse_train
from slime_launch.translate import family_problem, items, translate_upstream

KNOWN = {spec.name: spec for group in command(["--a-flag-of-megatrons"])[0] for spec in group.flags}
UPSTREAM = (Path(__file__).parent / "data" / "upstream_flags.txt").read_text().split()


def test_every_flag_of_upstream_has_an_answer():
    assert len(UPSTREAM) == len(set(UPSTREAM)) == 237
    without = [name for name in UPSTREAM if upstream_answer(name, KNOWN) is None and "sglang" not in name]
    assert without == []


def test_flags_of_upstream_that_are_not_here_are_answered_in_a_line_each(flags, to_words):
    """By `train` itself, not by `migrate` alone: said to have no effect, or refused with what to use instead."""
    missing = {name for name in UPSTREAM if name not in KNOWN and "sglang" not in name}
    accepted = {f"--{name}" for name in table()["no-effect"]} - {"--model-name"}  # whose value must be a family
    values = {"--train-backend": ["megatron"], "--distributed-backend": ["nccl"]}
    own = {name: [name, *values.get(name, ["1"])] for name in sorted(missing - {"--model-name"})}
    refused = own.keys() - accepted
    with pytest.raises(FlagError) as caught:
        parse_train([*to_words(flags), *(word for name in sorted(refused) for word in own[name])])
    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines] == sorted(refused)
    assert all(": " in line and "see --help" not in line and "did you mean" not in line for line in lines)
    [note] = parse_train([*to_words(flags), *(word for name in accepted & missing for word in own[name])]).notes
    assert all(f"{name} (" in note for name in accepted & missing)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--rm-type", "ifbench"], "--custom-rm-path"),
        (["--rm-type", "geo3k"], "--custom-rm-path"),
        (["--advantage-estimator", "opo"], "--custom-reward-post-process-path"),
        (["--advantage-estimator", "gpg"], "--custom-reward-post-process-path"),
        (["--advantage-estimator", "remax"], "take rloo"),
        (["--loss-type", "sapo"], "--custom-loss-function-path"),
        (["--loss-type", "clip_cov"], "--custom-loss-function-path"),
    ],
    ids=" ".join,
)
def test_a_name_that_other_libraries_know_is_answered_with_what_to_give(flags, to_words, given, told):
    with pytest.raises(FlagError) as caught:
        parse_train([*to_words({name: value for name, value in flags.items() if name != given[0]}), *given])
    [line] = [line for line in str(caught.value).splitlines() if line.startswith(given[0])]
    _, _, advice = line.partition("; ")
    assert given[1] in advice and told in advice


def test_a_flag_that_is_built_is_the_same_whatever_the_table_says():
    assert upstream_answer("--use-wandb", {"--use-wandb"}).outcome is Outcome.SAME
    assert upstream_answer("--enable-mtp-training", {}).outcome is Outcome.NOT_BUILT
    assert flag_line("--use-wandb", {"--use-wandb"}) is None


def test_no_row_stands_in_two_sections_of_upstreams():
    sections = [set(table()[name]) for name in ("no-effect", "renamed", "not-built")]
    assert sum(map(len, sections)) == len(set.union(*sections))


@pytest.mark.parametrize("section", ["no-effect", "renamed", "not-built", "openrlhf", "trl", "verl"])
def test_no_row_is_about_a_flag_that_the_parser_knows(section):
    assert [name for name in table()[section] if f"--{name}" in KNOWN] == []


@pytest.mark.parametrize("section", ["openrlhf", "trl", "verl"])
def test_others_lead_to_flags_that_there_are_or_are_upstreams(section):
    for name, row in table()[section].items():
        to = row if isinstance(row, str) else row.get("to", "")
        assert not to or to in KNOWN or to in UPSTREAM or to.startswith("--sglang-"), name
        assert foreign_answer(f"--{name}" if section == "openrlhf" else name, KNOWN) is not None


def test_openrlhfs_earlier_names_and_defaults_are_of_rows_that_there_are():
    rows = table()["openrlhf"]
    assert set(table()["openrlhf-before"].values()) <= rows.keys()
    assert table()["openrlhf-defaults"].keys() <= rows.keys()
    flags = {flag for row in rows.values() if isinstance(row, dict) for flag in [row.get("second")] if flag}
    flags |= {to for row in rows.values() if isinstance(row, dict) for to in row.get("beside", {}).values() if to}
    assert flags <= KNOWN.keys()
    assert foreign_answer("--init_kl_coef", KNOWN) == foreign_answer("--algo.kl.init_coef", KNOWN)


def test_what_an_answer_advises_is_built():
    """A flag of ours in a text is one that the parser knows, so that no advice outlives what it names."""
    texts = {f"{section}: {name}": str(row) for section, rows in table().items() for name, row in rows.items()}
    told = {name: set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text)) for name, text in texts.items()}
    unknown = {name: flags - KNOWN.keys() - OTHERS.keys() for name, flags in told.items()}
    assert {name: flags for name, flags in unknown.items() if any("--sglang-" not in one for one in flags)} == {}


def test_flags_without_effect_are_accepted_and_said_in_one_line(flags, to_words):
    words = [*to_words(flags), "--use-tensorboard", "--train-backend", "megatron"]
    settings = parse_train([*words, "--log-probs-chunk-size", "1024", "--sglang-server-concurrency", "64"])
    assert settings.rollout.sampling.rollout_concurrency == 64
    line, renamed = settings.notes
    for name in ("--use-tensorboard", "--train-backend", "--log-probs-chunk-size"):
        assert f"{name} (" in line
    assert renamed == "--sglang-server-concurrency 64 is --rollout-concurrency 64 here"
    assert parse_train(to_words(flags)).notes == ()


def test_a_value_that_would_have_an_effect_is_refused(flags, to_words):
    with pytest.raises(FlagError, match="--train-backend fsdp is not built; allowed: megatron") as caught:
        parse_train([*to_words(flags), "--train-backend", "fsdp", "--num-rolout", "3"])
    assert "did you mean --num-rollout" in str(caught.value)


def test_a_model_name_must_be_of_the_same_family(workspace):
    hf = str(workspace / "hf")
    for name in ("qwen3", "Qwen3Config", "Qwen3ForCausalLM"):
        assert family_problem(name, hf) is None
    assert "is another family than" in family_problem("glm4", hf)
    assert family_problem("glm4", None) is None


@pytest.mark.parametrize("name", ["check_reward_nonzero_std", "check_reward_nonzero_std_with_fallback"])
def test_upstreams_own_filters_are_ours(name):
    flag = "--dynamic-sampling-filter-path"
    translated = translate_upstream([flag, f"slime.rollout.filter_hub.dynamic_sampling_filters.{name}"], KNOWN)
    assert translated.words == [flag, f"slime_rollout.filters.{name}"]


@pytest.mark.parametrize("flag", ["--rollout-function-path", "--eval-function-path"])
@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("slime.rollout.sleep_rollout.sleep", "leave it out"),
        ("slime.rollout.sglang_streaming_rollout.generate_rollout_streaming", "leave it out; with --partial-rollout"),
        ("slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout", "use --data-source-path or"),
        ("slime.rollout.none.of_these", "give a function of your own, or leave it out"),
    ],
)
def test_upstreams_other_rollouts_are_refused_with_what_to_do(flag, path, advice, flags, to_words):
    with pytest.raises(FlagError, match=f"^{flag} {path} is upstream's own; {advice}") as caught:
        parse_train([*to_words(flags), flag, path])
    assert len(str(caught.value).splitlines()) == 1


def test_upstreams_fully_asynchronous_rollout_is_a_buffer(flags, to_words):
    path = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
    settings = parse_train([*to_words(flags), "--rollout-function-path", path])
    assert settings.rollout.selection.async_buffer_size == 1 and settings.rollout.rollout_function is None
    assert settings.notes == (f"--rollout-function-path {path} is --async-buffer-size 1 here",)
    given = parse_train([*to_words(flags), "--rollout-function-path", path, "--async-buffer-size", "3"])
    assert given.rollout.selection.async_buffer_size == 3 and len(given.notes) == 1


def test_upstreams_distillation_needs_no_functions():
    module = "slime.rollout.on_policy_distillation"
    words = ["--custom-rm-path", f"{module}.reward_func", "--custom-reward-post-process-path"]
    translated = translate_upstream([*words, f"{module}.post_process_rewards", "--lr", "1"], KNOWN)
    assert translated.words == ["--lr", "1"]
    assert translated.problems == []


def test_other_functions_of_upstreams_are_refused_with_what_to_give():
    translated = translate_upstream(["--custom-rm-path", "slime.rollout.rm_hub.math"], KNOWN)
    assert translated.problems == [
        "--custom-rm-path slime.rollout.rm_hub.math is upstream's own; give --rm-type with the name of the rule"
    ]


def test_paths_of_ours_that_upstreams_became():
    from slime_core.user_functions import load_function

    for row in table()["paths"].values():
        if "to" in row:
            assert callable(load_function(row["to"], "--x"))


def test_a_setting_of_verls_is_answered(flags, to_words):
    with pytest.raises(FlagError, match="here it is --lr 1e-6"):
        parse_train(["actor_rollout_ref.actor.optim.lr=1e-6", *to_words(flags)])
    with pytest.raises(FlagError, match=r"here it is --kl-coef 0\.001$"):
        parse_train(["algorithm.use_kl_in_reward=True", *to_words(flags)])


@pytest.mark.parametrize("section", ["openrlhf", "trl", "verl"])
def test_rows_that_depend_on_others_name_rows(section):
    rows = [row for row in table()[section].values() if isinstance(row, dict)]
    assert {row[key] for row in rows for key in ("when", "unless") if key in row} <= table()[section].keys()


def test_items():
    found = items(["a.b=1", "++c.d=[2,3]", "--x=4", "--y", "5", "-6", "e.f=7"])
    assert [(item.name, item.values) for item in found] == [
        ("a.b", ("1",)),
        ("c.d", ("[2,3]",)),
        ("--x", ("4",)),
        ("--y", ("5", "-6", "e.f=7")),
    ]
