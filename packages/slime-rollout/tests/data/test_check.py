import subprocess
import sys

import pytest

from slime_core.errors import DataError
from slime_rollout.config import RolloutConfig
from slime_rollout.data import check_prompt_data, check_prompt_file

CHAT = [{"role": "user", "content": "2 + 2?"}]


def config(path, **changes):
    return RolloutConfig(**{"hf_checkpoint": "none", "prompt_data": path, "rollout_batch_size": 1, **changes})


def test_counts_every_file_of_a_run(write_rows):
    train = write_rows([{"prompt": "a", "label": "1"}] * 5, "train.jsonl")
    held_out = write_rows([{"prompt": "b", "label": "2"}] * 3, "held_out.jsonl")
    given = config(f"{train}@[1:]", eval_prompt_data=("sums", held_out))
    assert check_prompt_data(given) == {f"{train}@[1:]": 4, held_out: 3}


def test_every_training_set_is_read(write_rows, tmp_path):
    paths = tuple(write_rows([{"prompt": "a", "label": "1"}] * count, f"{count}.jsonl") for count in (1, 2))
    assert check_prompt_data(config(paths)) == dict(zip(paths, (1, 2), strict=True))
    with pytest.raises(DataError, match=r"none\.parquet does not exist"):
        check_prompt_data(config((paths[0], str(tmp_path / "none.parquet"))))


def test_a_bad_held_out_file_is_found_too(write_rows, tmp_path):
    train = write_rows([{"prompt": "a", "label": "1"}])
    with pytest.raises(DataError, match=r"none\.jsonl does not exist"):
        check_prompt_data(config(train, eval_prompt_data=(str(tmp_path / "none.jsonl"),)))


def test_every_held_out_set_is_read_as_it_says(write_rows, tmp_path):
    train = write_rows([{"prompt": "a", "label": "1"}], "train.jsonl")
    held_out = write_rows([{"question": CHAT, "answer": 1}], "held_out.jsonl")
    sets = tmp_path / "sets.yaml"
    own = f"{{path: {held_out}, input_key: question, label_key: answer, apply_chat_template: true}}"
    sets.write_text(f"eval: {{datasets: {{chat: {own}}}}}")
    assert check_prompt_data(config(train, eval_config=str(sets))) == {train: 1, held_out: 1}
    sets.write_text(f"eval: {{datasets: {{plain: {{path: {held_out}, input_key: question}}}}}}")
    with pytest.raises(DataError, match=r"held-out set plain: .*held_out\.jsonl:1: the prompt is chat messages"):
        check_prompt_data(config(train, eval_config=str(sets)))
    sets.write_text(f"eval: {{datasets: {{sums: {{path: {train}, rm_type: f1, label_key: answer}}}}}}")
    with pytest.raises(DataError, match=r"held-out set sums: .*train\.jsonl:1: no field 'answer'"):
        check_prompt_data(config(train, eval_config=str(sets)))


def test_chat_messages_need_the_template(write_rows):
    path = write_rows([{"prompt": "a", "label": "4"}, {"prompt": CHAT, "label": "4"}])
    with pytest.raises(DataError, match=":2: the prompt is chat messages; add --apply-chat-template"):
        check_prompt_file(path, config(path))
    assert len(check_prompt_file(path, config(path, apply_chat_template=True))) == 2
    assert len(check_prompt_file(path, config(path, custom_generate_function_path="own.py"))) == 2


def test_a_rule_needs_a_label_that_it_can_use(write_rows):
    path = write_rows([{"prompt": "a", "label": "4"}, {"prompt": "b"}])
    with pytest.raises(DataError, match=":2: no label, which --rm-type exact compares with"):
        check_prompt_file(path, config(path))
    path = write_rows([{"prompt": "a", "label": "four"}])
    with pytest.raises(DataError, match=":1: the label 'four' has no integer first"):
        check_prompt_file(path, config(path, rm_type="first_integer"))
    assert len(check_prompt_file(path, config(path, custom_rm_path="pkg.mod.fn"))) == 1


def test_of_a_stream_the_first_rows_are_looked_at(write_rows, tmp_path):
    rows = [{"prompt": "a", "label": "1"}] * 200
    path = write_rows([*rows, {}])
    assert check_prompt_data(config(path, streaming_data=True, eval_prompt_data=(f"{path}@[:9]",))) == {
        f"{path}@[:9]": 9
    }
    path = write_rows([*rows[:50], {}, *rows])
    with pytest.raises(DataError, match=":51: no field 'prompt'"):
        check_prompt_data(config(path, streaming_data=True))
    assert check_prompt_data(config(path, streaming_data=True, on_bad_data="skip")) == {}
    with pytest.raises(DataError, match=r":1: no field 'question'.* \(none of the first 100 rows of .* can be used\)$"):
        check_prompt_data(config(path, streaming_data=True, on_bad_data="skip", input_key="question"))
    with pytest.raises(DataError, match="counts from the end of JSON Lines"):
        check_prompt_data(config(f"{path}@[-9:]", streaming_data=True))
    with pytest.raises(DataError, match=r"none\.jsonl does not exist"):
        check_prompt_data(config(str(tmp_path / "none.jsonl"), streaming_data=True))


def test_what_is_skipped_is_told_if_asked_for(write_rows, caplog):
    path = write_rows([{"prompt": "a", "label": "1"}, {}])
    given = config(path, on_bad_data="skip")
    assert check_prompt_data(given, tell=False) == {path: 1}
    assert not caplog.records
    assert check_prompt_data(given) == {path: 1}
    assert len(caplog.records) == 1


def test_checking_loads_no_tokenizer_and_no_http(write_rows):
    path = write_rows([{"prompt": "a", "label": "1"}])
    code = (
        "import sys; from slime_rollout.config import RolloutConfig; from slime_rollout.data import check_prompt_data; "
        f"check_prompt_data(RolloutConfig(hf_checkpoint='none', prompt_data={path!r}, rollout_batch_size=1)); "
        "print({'torch', 'transformers', 'aiohttp', 'pyarrow', 'datasets'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
