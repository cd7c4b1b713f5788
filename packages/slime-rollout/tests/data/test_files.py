import datetime
import decimal
import gzip
import importlib
import json
import os
import random
import struct
import sys
import tempfile
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_rollout.config import RolloutConfig
from slime_rollout.data import check_prompt_file, files
from slime_rollout.data.files import Mark, PromptFile
from slime_rollout.data.rows import row_values

datasets.disable_progress_bars()

FORMATS = (".jsonl", ".jsonl.gz", ".jsonl.bz2", ".jsonl.xz", ".jsonl.zst", ".json", ".json.gz", ".parquet", "")

words = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=9)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": words})
    | st.just({"role": "assistant", "tool_calls": [CALL]}),
    min_size=1,
    max_size=3,
)


def rows_of(prompt):
    optional = {
        "label": words,
        "level": st.integers(-(2**63), 2**63 - 1),
        "share": st.floats(allow_nan=False, allow_infinity=False),
        "tools": st.just(TOOLS),
        "metadata": st.fixed_dictionaries({"source": words}, optional={"tags": st.lists(words, min_size=1)}),
    }
    return st.lists(st.fixed_dictionaries({"prompt": prompt}, optional=optional), min_size=1, max_size=6)


def read_prompts(path, **data):
    """The rows of a file, with a template that takes messages, and no rule that wants labels."""
    config = RolloutConfig.of(
        hf_checkpoint="none", prompt_data=path, rollout_batch_size=1, apply_chat_template=True, rm_type="random", **data
    )
    return check_prompt_file(path, config)


def contents(path):
    return [(row.prompt, row.label, row.tools, row.metadata) for row in read_prompts(path)]


def check_same(write, rows, start, stop):
    with tempfile.TemporaryDirectory() as directory:
        expected = None
        for number, suffix in enumerate(FORMATS):
            path = Path(directory) / f"rows{number}{suffix}"
            write(rows, path)
            got = contents(str(path))
            expected = got if expected is None else expected
            assert got == expected, suffix
            assert [row[0] for row in got] == [
                row["prompt"]
                if isinstance(row["prompt"], str)
                else [{"content": None, **message} for message in row["prompt"]]
                for row in rows
            ]
            if expected[start:stop]:
                text = ":".join("" if bound is None else str(bound) for bound in (start, stop))
                assert contents(f"{path}@[{text}]") == expected[start:stop], suffix


bounds = st.none() | st.integers(-7, 7)


@settings(deadline=None, max_examples=12)
@given(rows=rows_of(words) | rows_of(messages), start=bounds, stop=bounds)
def test_every_format_gives_the_same_rows(write, rows, start, stop):
    check_same(write, rows, start, stop)


@pytest.mark.full
@settings(deadline=None, max_examples=400)
@given(rows=rows_of(words) | rows_of(messages), start=bounds, stop=bounds)
def test_every_format_gives_the_same_rows_in_many_cases(write, rows, start, stop):
    check_same(write, rows, start, stop)


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_bad_row_is_located_in_every_format(tmp_path, suffix, write):
    path = tmp_path / f"p{suffix}"
    write([{"prompt": "a"}, {"prompt": "b"}, {"prompt": ""}], path)
    where = f"{path}:3" if "jsonl" in suffix else f"{path}, row 3"
    for name in (str(path), f"{path}@[-1:]"):
        with pytest.raises(DataError) as caught:
            read_prompts(name)
        assert (
            str(caught.value) == f"{where}: 'prompt' must be a string or a list of chat messages, got an empty string"
        )


@pytest.mark.parametrize("suffix", FORMATS)
def test_an_empty_file_and_an_empty_slice(tmp_path, suffix, write):
    path = tmp_path / f"p{suffix}"
    write([{"prompt": "a"}], path)
    with pytest.raises(DataError, match=r"leaves no row: the file has 1; give a slice"):
        read_prompts(f"{path}@[3:9]")
    empty = tmp_path / f"empty{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), empty)
    elif suffix == "":
        datasets.Dataset.from_dict({"prompt": []}).save_to_disk(empty)
    else:
        write([], empty)
    with pytest.raises(DataError, match="is empty; write one row per prompt"):
        read_prompts(str(empty))


@pytest.mark.parametrize("suffix", FORMATS[1:])
def test_a_damaged_file_is_one_line(tmp_path, suffix, write):
    path = tmp_path / f"p{suffix}"
    write([{"prompt": f"prompt {number} of many"} for number in range(200)], path)
    inner = path if path.is_file() else next(path.glob("*.arrow"))
    whole = inner.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"no such format", b""):
        inner.write_bytes(damaged)
        with pytest.raises(DataError) as caught:
            read_prompts(str(path))
        assert str(caught.value).startswith(str(path))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".parquet"])
def test_a_missing_file_of_another_format(tmp_path, suffix):
    with pytest.raises(DataError, match="does not exist; give the path of a prompt file"):
        read_prompts(str(tmp_path / f"none{suffix}"))


def test_a_directory_of_several_data_sets_names_them(tmp_path):
    data = datasets.Dataset.from_list([{"prompt": "a"}])
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "d")
    with pytest.raises(DataError, match=r"holds several data sets \(test, train\); give the path of one"):
        read_prompts(str(tmp_path / "d"))
    assert contents(str(tmp_path / "d" / "train")) == [("a", None, None, {})]


@pytest.mark.parametrize(
    ("suffix", "module", "extra"),
    [
        (".parquet", "pyarrow.parquet", "parquet"),
        ("", "pyarrow.parquet", "parquet"),
    ],
)
def test_a_format_whose_extra_is_missing_names_it(tmp_path, monkeypatch, suffix, module, extra, write):
    path = tmp_path / f"p{suffix}"
    write([{"prompt": "a"}], path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        DataError, match=rf"needs {module}, which is not installed; run: .* pip install .*'pyarrow>=19'$"
    ):
        read_prompts(str(path))


def test_columns_become_what_json_has(tmp_path):
    path = tmp_path / "p.parquet"
    table = pa.table(
        {
            "prompt": ["a", "b"],
            "label": pa.array([decimal.Decimal("1.50"), None], pa.decimal128(5, 2)),
            "day": [datetime.date(2024, 2, 29), None],
            "score": [float("nan"), 0.5],
            "pairs": pa.array([[("x", 1)], []], pa.map_(pa.string(), pa.int64())),
        }
    )
    pq.write_table(table, path)
    first, second = read_prompts(str(path))
    assert (first.label, first.metadata) == ("1.50", {"day": "2024-02-29", "pairs": {"x": 1}})
    assert (second.label, second.metadata) == (None, {"score": 0.5, "pairs": {}})


@pytest.mark.parametrize(
    ("value", "words"), [(b"\x00", "a value of the type bytes, which JSON cannot"), (float("inf"), "inf, which JSON")]
)
def test_a_column_that_json_cannot_hold(tmp_path, value, words):
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "image": [value]}), path)
    with pytest.raises(DataError, match=f"row 1: 'image' holds {words}"):
        read_prompts(str(path))


def test_tools_as_their_json_text(tmp_path):
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"], "api": [json.dumps(TOOLS), "[]"]}), path)
    first, second = read_prompts(str(path), tool_key="api")
    assert first.tools == TOOLS
    assert first.metadata == {"tools": TOOLS}
    assert (second.tools, second.metadata) == (None, {})


def test_columns_of_json_are_read(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": "a", "calls": [{"x": 1}]}], "metadata": {"a": 1}},
        {"prompt": [{"role": "user", "content": "b", "calls": [{"y": ["z"]}]}], "metadata": {"a": "x", "n": 2}},
    ]
    text, anything = datasets.Value("string"), datasets.Json()
    message = {"role": text, "content": text, "calls": datasets.List(anything)}
    features = datasets.Features({"prompt": datasets.List(message), "metadata": anything})
    saved = datasets.Dataset.from_list(rows, features=features)
    saved.to_parquet(tmp_path / "p.parquet")
    saved.save_to_disk(tmp_path / "p")
    assert "arrow.json" in str(pq.read_schema(tmp_path / "p.parquet"))
    expected = [(row["prompt"], None, None, row["metadata"]) for row in rows]
    assert contents(str(tmp_path / "p.parquet")) == contents(str(tmp_path / "p")) == expected


BAD_TEXT = pa.Array.from_buffers(
    pa.string(), 3, [None, pa.py_buffer(struct.pack("<4i", 0, 1, 2, 3)), pa.py_buffer(b"a\xffb")]
)
TWICE = pa.array([[("x", 1)], [("x", 1), ("x", 2)], []], pa.map_(pa.string(), pa.int64()))
FAR = pa.array([0, 2**62, 1], pa.timestamp("us"))


@pytest.mark.parametrize(
    ("suffix", "column", "words"),
    [
        (".parquet", BAD_TEXT, "'utf-8' codec can't decode"),
        ("", BAD_TEXT, "'utf-8' codec can't decode"),
        (".parquet", TWICE, "duplicate key was 'x'"),
        (".parquet", FAR, "date value out of range"),
        ("", FAR, "date value out of range"),
    ],
)
def test_a_value_that_python_cannot_hold_is_one_bad_row(tmp_path, suffix, column, words, caplog):
    """As in JSON Lines: told with its place, or left out; its neighbours stay."""
    path = tmp_path / f"p{suffix}"
    table = pa.table({"prompt": ["a", "b", "c"], "x": column})
    if suffix:
        pq.write_table(table, path)
    else:
        datasets.Dataset(table).save_to_disk(path)
    for name in (str(path), f"{path}@[1:2]"):
        with pytest.raises(DataError) as caught:
            read_prompts(name)
        assert str(caught.value).startswith(f"{path}, row 2: a value cannot be read: ")
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
    rows = read_prompts(str(path), on_bad_data="skip")
    assert [(row.where, row.prompt) for row in rows] == [(f"{path}, row 1", "a"), (f"{path}, row 3", "c")]
    assert f"skipped 1 of 3 rows: {path}, row 2: " in caplog.text


@pytest.mark.parametrize("suffix", FORMATS[:-1])
def test_capital_letters_in_the_end_of_a_name(tmp_path, suffix, write):
    path = tmp_path / f"p{suffix}"
    write([{"prompt": "a"}], path)
    assert contents(str(path.rename(tmp_path / f"P{suffix.upper()}"))) == [("a", None, None, {})]


def saved_table(path, table):
    datasets.Dataset(table).save_to_disk(path)
    [data] = path.glob("*.arrow")
    return data


def nested(texts):
    """Columns whose texts lie at different depths."""
    pairs = [[{"content": text, "n": 1}] for text in texts]
    return {"prompt": texts, "label": ["x"] * len(texts), "metadata": pairs}


@pytest.mark.parametrize("old", [4, 5])
def test_an_offset_outside_a_mapped_file_is_refused(tmp_path, old):
    """It ended the process, or the bytes behind the text became part of a row."""
    texts = ["abcd", "e" * 5, "f" * 6]
    data = saved_table(tmp_path / "p", pa.table(nested(texts)))
    content = data.read_bytes()
    offsets = struct.pack("<4i", 0, 4, 9, 15)
    places = [at for at in range(len(content)) if content.startswith(offsets, at)]
    assert len(places) == 2  # of the column, and of the texts in the lists
    for place in places:
        for value in (16, 2**20, 2**31 - 1, -1):
            changed = struct.pack("<4i", 0, 4, *((9, value) if old == 5 else (value, 15)))
            data.write_bytes(content[:place] + changed + content[place + len(changed) :])
            with pytest.raises(
                DataError, match=r"p is damaged or cut off and cannot be read as a directory of"
            ) as caught:
                read_prompts(str(tmp_path / "p"))
            assert "\n" not in str(caught.value)


def test_text_that_is_not_utf8_hides_no_offset(tmp_path):
    data = saved_table(tmp_path / "p", pa.table(nested(["abcd", "e" * 5, "f" * 6])))
    content = data.read_bytes().replace(b"abcd", b"ab\xff\xfe")
    offsets = struct.pack("<4i", 0, 4, 9, 15)
    data.write_bytes(content)
    with pytest.raises(DataError, match="row 1: a value cannot be read: 'utf-8' codec"):
        read_prompts(str(tmp_path / "p"))
    at = content.rindex(offsets)
    data.write_bytes(content[:at] + struct.pack("<4i", 0, 4, 9, 2**30) + content[at + 16 :])
    with pytest.raises(DataError, match="p is damaged or cut off"):
        read_prompts(str(tmp_path / "p"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["/etc/passwd", "../other.arrow", "pipe", "missing", "."])
def test_a_saved_data_set_lies_in_its_directory(tmp_path, name):
    data = saved_table(tmp_path / "p", pa.table({"prompt": ["a"]}))
    (tmp_path / "other.arrow").write_bytes(data.read_bytes())
    os.mkfifo(tmp_path / "p" / "pipe")
    state = tmp_path / "p" / "state.json"
    state.write_text(state.read_text().replace(data.name, name))
    with pytest.raises(DataError, match=f"state.json names '{name}', which is not a file in its directory"):
        read_prompts(str(tmp_path / "p"))


def test_columns_of_the_same_name_are_refused(tmp_path):
    path = tmp_path / "p.parquet"
    names = ["prompt", "prompt", "label"]
    pq.write_table(pa.Table.from_arrays([pa.array([text]) for text in "abc"], names=names), path)
    with pytest.raises(
        DataError, match=r"p\.parquet has several columns of the same name \(prompt\); rename or remove"
    ):
        read_prompts(str(path))


ROWS = [{"prompt": f"p{place}" * (1 + place % 3), "label": str(place)} for place in range(9)]


BOUNDS = st.none() | st.integers(-12, 12)


def check_reading_goes_on(write, suffix, data):
    """Whatever the slice: the rows are those that were written, and from behind any of them come the following."""
    start, stop = data.draw(BOUNDS), data.draw(BOUNDS)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"rows{suffix}"
        write(ROWS, path)
        name = f"{path}@[{'' if start is None else start}:{'' if stop is None else stop}]"
        if not range(len(ROWS))[start:stop]:
            with pytest.raises(DataError, match="leaves no row"):
                list(PromptFile(name).rows())
            return
        expected = ROWS[start:stop]
        file = PromptFile(name)
        for _ in range(2):  # the second time, the beginning of the slice is known
            read = list(file.rows())
            assert [row_values(raw) for _, raw in read] == expected
        for place, (mark, _) in enumerate(read, 1):
            assert [row_values(raw) for _, raw in file.rows(mark)] == expected[place:]


@settings(deadline=None, max_examples=6)
@given(data=st.data())
@pytest.mark.parametrize("suffix", FORMATS)
def test_reading_goes_on_at_every_place(write, suffix, data):
    check_reading_goes_on(write, suffix, data)


@pytest.mark.full
@settings(deadline=None, max_examples=100)
@given(data=st.data())
@pytest.mark.parametrize("suffix", FORMATS)
def test_reading_goes_on_at_every_place_in_many_cases(write, suffix, data):
    check_reading_goes_on(write, suffix, data)


def test_blank_lines_and_a_last_line_without_an_end(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('\n  \n{"prompt": "a"}\n\r\n{"prompt": "b"}\n\n{"prompt": "é"}')
    read = list(PromptFile(str(path)).rows())
    assert [raw.where for _, raw in read] == [f"{path}:3", f"{path}:5", f"{path}:7"]
    assert [mark.row for mark, _ in read] == [1, 2, 3]
    assert read[-1][0] == Mark(3, 7, path.stat().st_size)
    assert [raw for _, raw in PromptFile(f"{path}@[1:2]").rows()] == [read[1][1]]


@pytest.mark.parametrize("text", ["[-3:]", "[:-1]", "[-5:-2]"])
def test_a_stream_of_json_lines_cannot_be_counted_from_its_end(write, tmp_path, text):
    path = tmp_path / "p.jsonl"
    write(ROWS, path)
    with pytest.raises(DataError, match=r"counts from the end of JSON Lines") as caught:
        PromptFile(f"{path}@{text}", streamed=True)
    assert str(caught.value).endswith("; count from the beginning, use Parquet, or leave out --streaming-data")
    assert "\n" not in str(caught.value)


def test_what_is_behind_a_slice_is_not_looked_at(tmp_path, monkeypatch):
    """There may be gigabytes, and damage."""
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "b"}\n' + b"x" * 40)
    monkeypatch.setattr(files, "_LONGEST", 30)
    name = f"{path}@[0:2]"
    read = list(PromptFile(name).rows())
    assert [row_values(raw)["prompt"] for _, raw in read] == ["a", "b"]
    assert list(PromptFile(name).rows(read[-1][0])) == []
    with pytest.raises(DataError, match="leaves no row; give a slice"):
        PromptFile(f"{path}@[2:1]")


@pytest.mark.parametrize("suffix", FORMATS)
def test_an_empty_file_is_told(write, tmp_path, suffix):
    path = tmp_path / f"p{suffix}"
    write([] if "json" in suffix else ROWS, path)
    if "json" not in suffix:
        name = f"{path}@[20:]"
        with pytest.raises(DataError, match="leaves no row: the file has 9"):
            PromptFile(name)
        return
    with pytest.raises(DataError, match="is empty; write one row per prompt"):
        next(PromptFile(str(path)).rows())
    write(ROWS, path)
    with pytest.raises(DataError, match="leaves no row: the file has 9"):
        next(PromptFile(f"{path}@[20:]").rows())


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_missing_file_and_one_of_another_format(tmp_path, suffix):
    path = tmp_path / f"p{suffix}"
    if suffix:
        with pytest.raises(DataError, match=r"does not exist; give the path of a prompt file"):
            PromptFile(str(path))
    path.mkdir() if not suffix else path.write_bytes(b"{}")
    if suffix in (".jsonl", ".json"):
        return
    with pytest.raises(DataError) as caught:
        next(PromptFile(str(path)).rows())
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(30)  # who opens it for reading would wait for a writer
def test_a_pipe_is_refused_with_and_without_streaming(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    for streamed in (False, True):
        with pytest.raises(DataError) as caught:
            PromptFile(str(path), streamed=streamed)
        assert str(caught.value) == (
            f"the prompt file {path} is a pipe or a device, which can be read only once; prompts are read more often: "
            "write them into a file, and give that"
        )


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_file_that_grows_meanwhile_is_told(write, tmp_path, suffix):
    path = tmp_path / f"p{suffix}"
    write(ROWS, path)
    file = PromptFile(str(path))
    inner = path if suffix else next(path.glob("*.arrow"))
    inner.write_bytes(inner.read_bytes() + b"x")
    with pytest.raises(DataError, match=r"changed while it was read .* start a new run"):
        next(file.rows())


@pytest.mark.parametrize("suffix", FORMATS)
def test_the_digest_tells_files_apart(write, tmp_path, suffix):
    def digest(name, rows):
        path = tmp_path / f"{name}{suffix}"
        write(rows, path)
        return PromptFile(str(path)).digest

    # A directory has a fingerprint that differs each time it is made; a copy has the same.
    if suffix:
        assert digest("a", ROWS) == digest("b", ROWS)
    others = [ROWS[1:], ROWS[:-1], [{**ROWS[0], "prompt": "P0"}, *ROWS[1:]], [*ROWS[:-1], {**ROWS[-1], "label": "9"}]]
    digests = [digest(f"c{number}", rows) for number, rows in enumerate([ROWS, *others])]
    assert len(set(digests)) == 5


def test_a_line_without_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' + b"x" * 40 + b"\n")
    monkeypatch.setattr(files, "_LONGEST", 30)
    rows = PromptFile(str(path)).rows()
    next(rows)
    with pytest.raises(DataError, match=r"p\.jsonl:2: over 0 MiB long; is this JSON"):
        next(rows)


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".json.gz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_one_array_is_its_rows_whatever_the_name(tmp_path, suffix, indent):
    rows = [{"prompt": 'a "quoted" [text], {with} \\ brackets', "label": "1"}, {"prompt": "é" * 300_000, "label": "2"}]
    text = "\ufeff \n" + json.dumps(rows, indent=indent, ensure_ascii=False) + "\n"
    path = tmp_path / f"p{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    assert [(row.where, row.prompt) for row in read_prompts(str(path))] == [
        (f"{path}, row {number}", row["prompt"]) for number, row in enumerate(rows, 1)
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"prompt": "a"}, {"prompt": "b"}', "is damaged or cut off: its JSON array has no end"),
        ('[{"prompt": "a"}, {"prompt": "b', "is damaged or cut off: its JSON array has no end"),
        ('[{"prompt": "a"}]\n[{"prompt": "b"}]', "something follows its JSON array; write one array, or one object"),
        ('[{"prompt": "a"},, {"prompt": "b"}]', ", row 2: invalid JSON"),
        ('[{"prompt": "a"}, ["b"]]', ", row 2: a row must be a JSON object, got a list"),
        ('[{"prompt": "a"}, {"prompt": "b"}}]', ", row 2: invalid JSON"),
        ("[]", "is empty; write one row per prompt"),
        ('{\n  "prompt": "a"\n}', ":1: invalid JSON: "),
    ],
)
def test_what_is_no_array_of_rows_is_told_in_a_line(tmp_path, text, words):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        read_prompts(str(path))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_element_without_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_LONGEST", 1 << 20)
    path = tmp_path / "p.json"
    path.write_text('[{"prompt": "' + "x" * (5 << 20) + '"}]')
    with pytest.raises(DataError, match="row 1: over 1 MiB long"):
        read_prompts(str(path))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("suffix", "content", "problem"),
    [
        (".gz", b'{"prompt": "a", "label": "1 + 1"}\n', "over 200 times its size; unpack it"),
        (".bz2", b" ", "over 200 times its size; unpack it"),
        (".xz", b"\0", "over 200 times its size; unpack it"),
        (".xz", b"[1,\n", "over 4 MiB long"),
    ],
    ids=["rows", "spaces", "zeros", "array"],
)
def test_a_small_file_that_unpacks_to_much_is_refused(tmp_path, suffix, content, problem):
    """Rows take more memory than their text: a few kilobytes could fill any."""
    path = tmp_path / f"p.jsonl{suffix}"
    with importlib.import_module({".gz": "gzip", ".bz2": "bz2", ".xz": "lzma"}[suffix]).open(path, "wb") as file:
        for _ in range(6):
            file.write(content * (2**20 // len(content)))
    with pytest.raises(DataError, match=problem):
        list(PromptFile(str(path)).rows())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_a_compressed_file_with_holes_is_refused(tmp_path, suffix, write):
    write([{"prompt": "a"}], tmp_path / f"p.jsonl{suffix}")
    os.truncate(tmp_path / f"p.jsonl{suffix}", 2**40)
    with pytest.raises(DataError, match=r"has 1,099,511,627,776 bytes, and [\d,]+ on the disk: it has holes"):
        PromptFile(str(tmp_path / f"p.jsonl{suffix}"))


def test_what_is_packed_as_usual_is_read(tmp_path):
    rows = [{"prompt": random.Random(number).randbytes(2000).hex()} for number in range(2000)]
    with gzip.open(tmp_path / "p.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    assert sum(1 for _ in PromptFile(str(tmp_path / "p.jsonl.gz")).rows()) == len(rows)
