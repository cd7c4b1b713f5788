"""The same rows in every format are the same prompts."""

import datetime
import decimal
import json
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
from slime_rollout.data import RowFields, read_prompts

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

datasets.disable_progress_bars()

FORMATS = (".jsonl", ".jsonl.gz", ".jsonl.bz2", ".jsonl.xz", ".jsonl.zst", ".parquet", "")

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
        (".jsonl.zst", zstd.__name__, "zstd"),
    ],
)
def test_a_format_whose_extra_is_missing_names_it(tmp_path, monkeypatch, suffix, module, extra, write):
    path = tmp_path / f"p{suffix}"
    write([{"prompt": "a"}], path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=rf"needs {module}, which is not installed; install 'slime-rollout\[{extra}\]'"):
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
    first, second = read_prompts(str(path), RowFields(tool_key="api"))
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


def test_columns_of_the_same_name_are_refused(tmp_path):
    path = tmp_path / "p.parquet"
    names = ["prompt", "prompt", "label"]
    pq.write_table(pa.Table.from_arrays([pa.array([text]) for text in "abc"], names=names), path)
    with pytest.raises(
        DataError, match=r"p\.parquet has several columns of the same name \(prompt\); rename or remove"
    ):
        read_prompts(str(path))
