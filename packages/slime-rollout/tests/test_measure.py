"""Lengths of rows before a run: what is counted, what is kept of it, and what is only said."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from slime_core.errors import ConfigError, DataError
from slime_rollout import measure
from slime_rollout.config import RolloutConfig
from slime_rollout.data import load_tokenizer
from slime_rollout.data_service import DataSpec
from slime_rollout.measure import RowLengths, measure_prompts, measure_rows

LONG = "the weather is 42 degrees " * 4


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tokenizer(tokenizer_dir):
    return load_tokenizer(tokenizer_dir)


@pytest.fixture
def rows(tmp_path):
    return tmp_path / "rows.jsonl"


@pytest.fixture
def config_of(tokenizer_dir, rows):
    def build(*prompts, **changes):
        rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        return RolloutConfig.of(
            hf_checkpoint=tokenizer_dir, rollout_batch_size=1, prompt_data=str(rows), rm_type="random", **changes
        )

    return build


def tokens(tokenizer, text):
    return len(tokenizer(text)["input_ids"])


def test_every_prompt_is_counted(config_of, rows, tokenizer):
    found = measure_prompts(config_of("a", LONG))
    assert found.files == {str(rows): RowLengths(used=2, left_out=0, longest=tokens(tokenizer, LONG))}
    assert found.longest == tokens(tokenizer, LONG)
    assert found.notices == []


@pytest.mark.parametrize("workers", [0, 1])
def test_what_the_run_leaves_out_is_not_counted_as_used(config_of, rows, workers):
    config = config_of("a", LONG, rollout_max_prompt_len=5, num_data_workers=workers)
    found = measure_prompts(config)
    assert found.files[str(rows)] == RowLengths(used=1, left_out=1, longest=1)
    assert found.notices == [f"{rows}: 1 of 2 rows are left out, too long or without a token to train on"]
    with pytest.raises(DataError, match="all 1 prompts are longer than --rollout-max-prompt-len 5"):
        measure_prompts(config_of(LONG, rollout_max_prompt_len=5))


def test_what_was_counted_is_kept_until_something_changes(config_of, rows, monkeypatch):
    """The second time no tokenizer is loaded, whatever else the command says; other rows and settings are counted."""
    loads, load = [], measure.load_tokenizer
    monkeypatch.setattr(measure, "load_tokenizer", lambda *given, **how: loads.append(given) or load(*given, **how))
    config = config_of("a", LONG)
    first = measure_prompts(config)
    assert len(loads) == 1
    assert measure_prompts(config.changed(rollout_temperature=0.5)) == first
    assert len(loads) == 1
    measure_prompts(config.changed(rollout_max_prompt_len=5))
    assert len(loads) == 2
    assert measure_prompts(config_of("a", LONG, "b")).files[str(rows)].used == 3
    assert len(loads) == 3


def test_an_error_is_kept_too(config_of, tmp_path):
    config = config_of("", "a")
    messages = []
    for _ in range(2):
        with pytest.raises(DataError) as caught:
            measure_prompts(config)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "rows.jsonl:1" in messages[0]
    assert measure_prompts(config.changed(on_bad_data="skip")).longest == 1


def test_where_the_time_is_up_it_is_said_and_nothing_is_kept(config_of, rows):
    config = config_of("a", LONG)
    found = measure_prompts(config, seconds=0.0)
    assert found.files == {}
    assert found.notices == [f"{rows}: not all rows were tokenized within 0 s; each is checked when its turn comes"]
    assert measure_prompts(config).files[str(rows)].used == 2


def test_a_stream_is_said_to_be_one(config_of, rows):
    found = measure_prompts(config_of("a", streaming_data=True))
    assert (found.files, found.notices) == (
        {},
        [f"{rows} is streamed: the length of a prompt is known when its turn comes"],
    )


def test_a_cache_that_cannot_be_written_only_costs_time(config_of, rows, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert measure_prompts(config_of("a")).files[str(rows)].used == 1


def test_pairs_are_counted_by_their_longer_side(tokenizer_dir, rows, tokenizer):
    pairs = [{"prompt": "a", "chosen": LONG, "rejected": "b"}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    config = RolloutConfig.of(hf_checkpoint=tokenizer_dir, rollout_batch_size=1, prompt_data=str(rows))
    found = measure_rows(DataSpec(rollout=config, rows="pairs", max_length=None))
    longest = tokens(tokenizer, "a") + tokens(tokenizer, LONG) + 1
    assert found.files == {str(rows): RowLengths(used=2, left_out=0, longest=longest)}


def test_a_file_of_the_model_that_cannot_be_read_is_named(config_of, tokenizer_dir, tmp_path):
    model = Path(shutil.copytree(tokenizer_dir, tmp_path / "model"))
    (model / "chat_template.jinja").unlink()
    (model / "chat_template.jinja").symlink_to("chat_template.jinja")
    config = config_of("a")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, hf_checkpoint=str(model)))
    with pytest.raises(ConfigError, match=r"chat_template.jinja cannot be read \(Too many levels of symbolic links\)"):
        measure_prompts(config)
