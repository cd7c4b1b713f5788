import bz2
import gzip
import logging
import lzma
import subprocess
import sys
import tracemalloc

import pytest

from slime_core.errors import DataError
from slime_rollout.config import RolloutConfig
from slime_rollout.data import (
    PromptDataset,
    PromptEncoder,
    check_prompt_data,
    check_prompt_file,
    load_tokenizer,
)
from slime_rollout.data.files import PromptFile, split_slice


def read_prompts(path, **data):
    """The rows of a file, with a template that takes messages, and no rule that wants labels."""
    config = RolloutConfig.of(
        hf_checkpoint="none", prompt_data=path, rollout_batch_size=1, apply_chat_template=True, rm_type="random", **data
    )
    return check_prompt_file(path, config)


def test_a_row_keeps_all_it_says(write_rows):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    path = write_rows(
        [
            {"prompt": "2 + 2 =", "label": 4, "level": "easy", "metadata": {"source": "sums", "level": "hard"}},
            {"input": messages, "label": None},
        ]
    )
    first, second = read_prompts(path)
    assert (first.prompt, first.label) == ("2 + 2 =", "4")
    assert first.metadata == {"level": "hard", "source": "sums"}
    assert (second.prompt, second.label, second.metadata) == (messages, None, {})
    assert second.where == f"{path}:2"


def test_named_fields(write_rows):
    path = write_rows([{"question": "2 + 2 =", "answer": "4", "info": {"a": 1}, "prompt": "not this"}])
    (row,) = read_prompts(path, input_key="question", label_key="answer", metadata_key="info")
    assert (row.prompt, row.label, row.metadata) == ("2 + 2 =", "4", {"prompt": "not this", "a": 1})


def test_tasks_by_number_and_labels_that_a_function_reads(write_rows):
    """A whole number is a prompt as text; an object is not a label, and left out of the label it is in the metadata."""
    path = write_rows([{"index": 7, "reward_model": {"ground_truth": "2"}}])
    (row,) = read_prompts(path, input_key="index")
    assert (row.prompt, row.label, row.metadata) == ("7", None, {"reward_model": {"ground_truth": "2"}})
    with pytest.raises(DataError, match="got an object; leave --label-key out, and it is in the sample's metadata"):
        read_prompts(path, input_key="index", label_key="reward_model")


def test_a_generate_function_may_score_what_has_no_label(write_rows):
    path = write_rows([{"prompt": "a"}])
    config = RolloutConfig.of(hf_checkpoint="none", prompt_data=path, rollout_batch_size=1)
    with pytest.raises(DataError, match="no label, which --rm-type exact compares with"):
        check_prompt_file(path, config)
    assert len(check_prompt_file(path, config.changed(custom_generate_function_path="own.py:generate"))) == 1
    with pytest.raises(DataError, match="no label, which --rm-type exact compares with"):
        check_prompt_file(path, config.changed(custom_generate_function_path="own.py:generate", rm_type="exact"))


def test_blank_lines_count_as_lines_but_are_no_rows(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('\n{"prompt": "a"}\n\n  \n{"prompt": "b"}')
    assert [row.where for row in read_prompts(str(path))] == [f"{path}:2", f"{path}:5"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a"', "invalid JSON"),
        ('{"prompt": NaN}', "invalid JSON"),
        (b'{"prompt": "\xff"}', "invalid JSON"),
        ('["a"]', "must be a JSON object, got a list"),
        ('{"text": "a"}', "no field 'prompt' or 'input' for the prompt; the row has ['text']"),
        ('{"prompt": 7.5}', "'prompt' must be a string or a list of chat messages, got a number"),
        ('{"prompt": null}', "got null"),
        ('{"prompt": ""}', "got an empty string"),
        ('{"prompt": []}', "got an empty list"),
        ('{"prompt": {"role": "user", "content": "a"}}', "got an object"),
        ('{"prompt": ["a"]}', "'prompt', message 1 must be an object"),
        ('{"prompt": [{"role": "user", "content": "a"}, {"content": "b"}]}', "message 2 needs a 'role'"),
        ('{"prompt": [{"role": "user", "content": 5}]}', "message 1 needs 'content' as a string, got a number"),
        ('{"prompt": "a", "label": ["b"]}', "'label' must be a string or a number, got a list"),
        ('{"prompt": "a", "label": true}', "'label' must be a string or a number, got true or false"),
        ('{"prompt": "a", "label": 12345678901234567890123}', "'label' is a number of too many digits"),
        ('{"prompt": "a", "tools": ["add"]}', "'tools' must be a list of objects that describe tools, got a list"),
        ('{"prompt": "a", "tools": "add"}', "'tools' is a string, but not the JSON of a list of tools"),
        ('{"prompt": "a", "tools": 5}', "'tools' must be a list of objects that describe tools, got a number"),
        ('{"prompt": "a", "metadata": "b"}', "'metadata' must be an object, got a string"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path, line, words):
    path = tmp_path / "p.jsonl"
    line = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b'{"prompt": "good"}\n' + line + b"\n")
    with pytest.raises(DataError) as caught:
        read_prompts(str(path))
    assert str(caught.value).startswith(f"{path}:2: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_label_key_that_was_given_must_be_there(write_rows):
    path = write_rows([{"prompt": "a", "answer": "1"}, {"prompt": "b"}])
    with pytest.raises(DataError, match=r":2: no field 'answer', which --label-key names; the row has \['prompt'\]"):
        read_prompts(path, label_key="answer")


def test_files_that_cannot_serve(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_prompts(str(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="cannot be read: File name too long"):
        read_prompts(str(tmp_path / ("a" * 300)))
    with pytest.raises(DataError, match=r"datasets.save_to_disk did not write \(it has no state.json\)"):
        read_prompts(str(tmp_path))
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match="is empty"):
        read_prompts(str(tmp_path / "empty.jsonl"))


@pytest.mark.parametrize("text", ["[2:5]", "[:3]", "[-2:]", "[:]", "[-4:-1]", "[:-9]", "[3:99]"])
def test_a_slice_takes_the_rows_that_python_takes(write_rows, text):
    path = write_rows([{"prompt": str(number)} for number in range(10)])
    expected = [str(number) for number in eval(f"list(range(10)){text}")]
    assert [row.prompt for row in read_prompts(f"{path}@{text}")] == expected


def test_an_empty_slice_is_an_error(write_rows):
    path = write_rows([{"prompt": "a"}])
    with pytest.raises(DataError, match="leaves no row: the file has 1"):
        read_prompts(f"{path}@[3:9]")


def test_only_a_whole_slice_is_one():
    assert split_slice("a@b/c.jsonl") == ("a@b/c.jsonl", slice(None))
    assert split_slice("c.jsonl@[3]") == ("c.jsonl@[3]", slice(None))
    assert split_slice("c.jsonl@[-:2]") == ("c.jsonl@[-:2]", slice(None))
    assert split_slice("c.jsonl@[1:2]") == ("c.jsonl", slice(1, 2))


def test_windows_line_ends_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n')
    assert [(row.where, row.prompt) for row in read_prompts(str(path))] == [(f"{path}:1", "a"), (f"{path}:3", "b")]
    path.write_bytes(b"\xef\xbb\xbf\r\n")
    with pytest.raises(DataError, match="is empty"):
        read_prompts(str(path))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gzip.compress(b"{}", mtime=0), "gzip; rename it to end in .gz"),
        (bz2.compress(b"{}"), "bzip2; rename it to end in .bz2"),
        (lzma.compress(b"{}"), "xz; rename it to end in .xz"),
        (b"\x28\xb5\x2f\xfd", "Zstandard; rename it to end in .zst"),
        (b"PK\x03\x04", "zip; compress it with gzip instead"),
        (b"PAR1", "Parquet; rename it to end in .parquet"),
        ('{"prompt": "a"}\n'.encode("utf-16"), "UTF-16; write it in UTF-8"),
    ],
)
def test_a_file_whose_name_hides_its_format(tmp_path, content, words):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    for policy in ("error", "skip"):
        with pytest.raises(DataError) as caught:
            read_prompts(str(path), on_bad_data=policy)
        assert str(caught.value) == f"{path} is not JSON Lines but {words}"


def test_of_a_key_that_comes_twice_the_last_counts(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "prompt": "b"}')
    assert [row.prompt for row in read_prompts(str(path))] == ["b"]


def test_an_input_stands_in_for_a_null_prompt(write_rows):
    path = write_rows([{"prompt": None, "input": "a"}, {"prompt": "b", "input": "c"}])
    assert [row.prompt for row in read_prompts(path)] == ["a", "b"]


def test_something_like_a_slice_is_told_how_slices_are_written(write_rows):
    path = write_rows([{"prompt": "a"}])
    for text in ("[::2]", "[0:1", "[0:x]"):
        with pytest.raises(DataError, match=r"does not exist; .*; a slice is @\[a:b\], with whole numbers"):
            read_prompts(f"{path}@{text}")


def test_a_slice_keeps_no_other_rows_in_memory(tmp_path):
    """64 MB of rows behind, before or next to the slice."""
    path = tmp_path / "p.jsonl"
    path.write_bytes((b'{"prompt": "' + b"x" * 9980 + b'"}\n') * 6400)
    for text, count in (("[0:5]", 5), ("[6390:]", 10), ("[6000:6003]", 3)):
        tracemalloc.start()
        assert len(list(PromptFile(f"{path}@{text}").rows())) == count
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4e6


CHAT = [{"role": "user", "content": "2 + 2?"}]


def config(path, **changes):
    return RolloutConfig.of(**{"hf_checkpoint": "none", "prompt_data": path, "rollout_batch_size": 1, **changes})


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


def test_what_is_skipped_is_logged(write_rows, caplog):
    path = write_rows([{"prompt": "a", "label": "1"}, {}])
    given = config(path, on_bad_data="skip")
    assert check_prompt_data(given) == {path: 1}
    assert len(caplog.records) == 1


def test_checking_loads_no_tokenizer_and_no_http(write_rows):
    path = write_rows([{"prompt": "a", "label": "1"}])
    code = (
        "import sys; from slime_rollout.config import RolloutConfig; from slime_rollout.data import check_prompt_data; "
        f"check_prompt_data(RolloutConfig.of(hf_checkpoint='none', prompt_data={path!r}, rollout_batch_size=1)); "
        "print({'torch', 'transformers', 'aiohttp', 'pyarrow', 'datasets'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == "set()"


GOOD = '{"prompt": "1 + 1 =", "label": "2"}'


@pytest.fixture
def write_lines(tmp_path):
    def write(*lines):
        path = tmp_path / "p.jsonl"
        path.write_text("\n".join(lines), encoding="utf-8")
        return str(path)

    return write


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
    path = write_lines("{", GOOD, '{"prompt": 5.5}', '{"prompt": "a", "label": ["b"]}', '{"prompt": "a"}', GOOD)
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
