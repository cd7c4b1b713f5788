import logging

import pytest

from slime_core.errors import DataError
from slime_rollout.config import RolloutConfig
from slime_rollout.data import PromptDataset, PromptEncoder, check_prompt_data, load_tokenizer, read_prompts

GOOD = '{"prompt": "1 + 1 =", "label": "2"}'


@pytest.fixture
def write_lines(tmp_path):
    def write(*lines):
        path = tmp_path / "p.jsonl"
        path.write_text("\n".join(lines), encoding="utf-8")
        return str(path)

    return write


def config(path, **changes):
    return RolloutConfig(**{"hf_checkpoint": "none", "prompt_data": path, "rollout_batch_size": 1, **changes})


def test_one_bad_row_is_told_as_it_is(write_lines):
    path = write_lines(GOOD, "{")
    with pytest.raises(DataError) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(f"{path}:2: invalid JSON")
    assert "rows" not in str(caught.value)


def test_several_bad_rows_are_counted(write_lines):
    path = write_lines(GOOD, "{", GOOD, "[]")
    with pytest.raises(DataError, match=rf"^{path}:2: .*\(2 of 4 rows of {path} are bad; .* --on-bad-data skip\)$"):
        check_prompt_data(config(path))


def test_where_all_rows_are_bad_skipping_is_no_advice(write_lines):
    path = write_lines("{", "{")
    for policy in ("error", "skip"):
        with pytest.raises(DataError, match=rf"^{path}:1: .* \(all 2 rows of {path} are bad\)$"):
            check_prompt_data(config(path, on_bad_data=policy))


def test_skipped_rows_are_counted_and_located(write_lines, caplog):
    path = write_lines("{", GOOD, '{"prompt": 5}', '{"prompt": "a", "label": ["b"]}', '{"prompt": "a"}', GOOD)
    with caplog.at_level(logging.WARNING):
        assert check_prompt_data(config(path, on_bad_data="skip")) == {path: 2}
    (message,) = caplog.messages
    assert message.startswith(f"{path}: skipped 4 of 6 rows: {path}:1: invalid JSON")
    assert f"; {path}:3: 'prompt' must be a string" in message
    assert f"; {path}:4: 'label' must be a string or a number, got a list" in message
    assert message.endswith("; and 1 more")


def test_what_the_template_refuses_is_skipped_and_told_once(write_lines, tokenizer_dir, caplog):
    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.chat_template = "{% if messages[0].content == 'x' %}{{ raise_exception('no x') }}{% endif %}ok"
    encoder = PromptEncoder(tokenizer, apply_chat_template=True)
    path = write_lines(GOOD, '{"prompt": "x", "label": "2"}', "{", GOOD)
    given = config(path, apply_chat_template=True)
    with pytest.raises(DataError, match=r":2: the chat template refuses the messages: no x \(2 of 4 rows"):
        PromptDataset.load(path, given, encoder)
    with caplog.at_level(logging.WARNING):
        dataset = PromptDataset.load(path, config(path, apply_chat_template=True, on_bad_data="skip"), encoder)
    assert len(dataset) == 2
    (message,) = caplog.messages
    assert "skipped 2 of 4 rows" in message
    assert f"{path}:2: the chat template refuses the messages: no x; {path}:3: invalid JSON" in message


def test_a_damaged_file_is_an_error_even_when_skipping(tmp_path):
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(b"not packed")
    with pytest.raises(DataError, match="is damaged or cut off and cannot be decompressed"):
        read_prompts(str(path), on_bad_data="skip")
