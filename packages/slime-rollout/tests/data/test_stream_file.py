import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_rollout.data import files
from slime_rollout.data.files import Mark, PromptFile
from slime_rollout.data.rows import row_values

FORMATS = (".jsonl", ".jsonl.gz", ".jsonl.bz2", ".jsonl.xz", ".jsonl.zst", ".parquet", "")
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
    write([] if "jsonl" in suffix else ROWS, path)
    if "jsonl" not in suffix:
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
    if suffix == ".jsonl":
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
