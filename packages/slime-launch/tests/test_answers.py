"""The table of other launchers' flags is whole, points at flags that there are, and is what `train` goes by."""

import re
from pathlib import Path

import pytest

from slime_launch.answers import Outcome, flag_line, foreign_answer, table, upstream_answer
from slime_launch.errors import FlagError
from slime_launch.flags import OTHERS, parse_train
from support.known_flags import KNOWN

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


def test_a_setting_of_verls_is_answered(flags, to_words):
    with pytest.raises(FlagError, match="here it is --lr 1e-6"):
        parse_train(["actor_rollout_ref.actor.optim.lr=1e-6", *to_words(flags)])
    with pytest.raises(FlagError, match=r"here it is --kl-coef 0\.001$"):
        parse_train(["algorithm.use_kl_in_reward=True", *to_words(flags)])


@pytest.mark.parametrize("section", ["openrlhf", "trl", "verl"])
def test_rows_that_depend_on_others_name_rows(section):
    rows = [row for row in table()[section].values() if isinstance(row, dict)]
    assert {row[key] for row in rows for key in ("when", "unless") if key in row} <= table()[section].keys()
