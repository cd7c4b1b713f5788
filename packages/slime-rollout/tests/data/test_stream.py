import functools
import json
import logging
import struct
import subprocess
import sys
import textwrap

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from slime_core.errors import DataError
from slime_rollout.data import (
    Fate,
    PromptDataset,
    PromptEncoder,
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
    StreamingPrompts,
)

FORMATS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".json.gz", ".parquet", "")
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def text_rows(count, first=0):
    return [{"prompt": f"{place} + 1 =", "label": str(place + 1)} for place in range(first, first + count)]


def mixed_rows(count):
    """Texts and messages, tools, metadata and further fields, some rows without them."""
    rows = text_rows(count)
    for place, row in enumerate(rows):
        row["level"] = place
        if place % 2:
            row["prompt"] = [{"role": "user", "content": row["prompt"]}]
            row["metadata"] = {"tags": ["x", str(place)]}
        if place % 3 == 0:
            row["tools"] = TOOLS
    return rows


@pytest.fixture
def stream(config_of, tokenizer):
    """Makes a source of a stream, or with ``memory`` of the same data in memory."""

    def build(*paths, memory=False, kind=RolloutDataSource, encoding=None, samples=2, **changes):
        paths = tuple(map(str, paths))
        config = config_of(prompt_data=paths, **({} if memory else {"streaming_data": True}), **changes)
        encoder = PromptEncoder.of(config, tokenizer)
        if memory:
            parts = [PromptDataset.load(path, config, encoder) for path in paths]
            dataset = PromptDataset.join(parts, config.data.prompt_data_weights)
        else:
            dataset = StreamingPrompts(config, encoder, encoding=encoding)
        return kind(
            dataset,
            samples_per_prompt=samples,
            shuffle=config.data.rollout_shuffle,
            seed=config.data.rollout_seed,
            args=None,
        )

    return build


@pytest.fixture
def jsonl(write, tmp_path):
    def make(rows, name="p.jsonl"):
        write(rows, tmp_path / name)
        return tmp_path / name

    return make


def take(source, *counts):
    """Samples as plain values, settled as the manager settles them."""
    seen = []
    for count in counts:
        groups = source.get_samples(count)
        seen += [sample.to_dict() for group in groups for sample in group]
        source.ledger.settle(groups, Fate.TRAINED)
        assert source.check_ledger() is None
    return seen


def prompts(samples):
    return [sample["prompt"] for sample in samples[::2]]


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_samples_are_those_of_data_in_memory(stream, write, tmp_path, suffix, shuffle):
    """Order, tokens, labels, tools and metadata, over several epochs; with blocks that hold all rows, shuffled, too."""
    path = tmp_path / f"p{suffix}"
    rows = text_rows(7) if suffix in ("", ".parquet") else mixed_rows(7)
    write(rows, path)
    flags = {"apply_chat_template": True, "rollout_shuffle": shuffle}
    expected = take(stream(path, memory=True, **flags), 20)
    assert take(stream(path, **flags), 3, 17) == expected


def test_columns_with_messages_tools_and_metadata(stream, write, tmp_path):
    rows = [
        {**row, "prompt": [{"role": "user", "content": row["prompt"]}], "metadata": {"a": 1}, "tools": TOOLS}
        for row in text_rows(5)
    ]
    for name in ("p.parquet", "p"):
        write(rows, tmp_path / name)
        flags = {"apply_chat_template": True}
        assert take(stream(tmp_path / name, **flags), 8) == take(stream(tmp_path / name, memory=True, **flags), 8)


def test_several_files_slices_and_limits(stream, jsonl, write, tmp_path):
    """Files behind each other; prompts that are too long leave no trace, and bad rows neither."""
    rows = text_rows(9)
    rows[4]["prompt"] *= 9
    rows[6]["prompt"] = ""
    first = jsonl(rows)
    write(text_rows(6, 50), tmp_path / "q.parquet")
    paths = (f"{first}@[2:8]", f"{tmp_path / 'q.parquet'}@[-3:]", first)
    flags = {"rollout_max_prompt_len": 20, "on_bad_data": "skip"}
    expected = take(stream(*paths, memory=True, **flags), 30)
    assert len(set(prompts(expected))) == 10
    assert take(stream(*paths, **flags), 30) == expected


def test_weights_spread_the_data_sets_as_in_memory(stream, jsonl):
    """Where the shares come out even, the order is that of data in memory, laps of each data set included."""
    paths = (jsonl(text_rows(5), "a.jsonl"), jsonl(text_rows(11, 100), "b.jsonl"))
    flags = {"prompt_data_weights": (3.0, 1.0)}
    expected = take(stream(*paths, memory=True, **flags), 50)
    source = stream(*paths, **flags)
    assert take(source, 50) == expected
    assert source.epoch == 1  # of the second data set; the first is in its eighth
    few = take(stream(*paths, prompt_data_weights=(1.0, 1.0), rollout_shuffle=True), 22)
    assert sorted(prompts(few)[1::2]) == sorted(row["prompt"] for row in text_rows(11, 100))


def test_the_shuffle_is_within_blocks_anew_in_each_epoch(stream, jsonl):
    path = jsonl(text_rows(10))
    flags = {"rollout_shuffle": True, "streaming_shuffle_buffer": 4}
    order = prompts(take(stream(path, **flags), 20))
    places = [int(prompt.split()[0]) for prompt in order]
    for epoch in (places[:10], places[10:]):
        assert [sorted(epoch[start : start + 4]) for start in (0, 4, 8)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert places[:10] != places[10:]
    assert places == [0, 1, 3, 2, 6, 4, 7, 5, 9, 8, *places[10:]] or places[:4] != [0, 1, 2, 3]
    assert prompts(take(stream(path, **flags, rollout_seed=7), 20)) != order


@pytest.mark.timeout(120)
@pytest.mark.parametrize("shuffle", [False, True])
def test_processes_change_nothing(stream, jsonl, pool, shuffle):
    rows = text_rows(90)
    rows[40]["prompt"] = ""
    rows[41]["prompt"] *= 9
    path = jsonl(rows)
    flags = {"rollout_max_prompt_len": 20, "on_bad_data": "skip", "rollout_shuffle": shuffle}
    flags |= {"streaming_shuffle_buffer": 16} if shuffle else {}
    alone, shared = stream(path, **flags), stream(path, encoding=pool, **flags)
    assert take(shared, 1, 60, 150) == take(alone, 1, 60, 150)
    assert shared.state_dict() == alone.state_dict()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", [False, True])
def test_a_bad_row_ends_the_run_where_it_is_reached(stream, jsonl, request, workers):
    rows = text_rows(8)
    del rows[5]["prompt"]
    path = jsonl(rows)
    source = stream(path, encoding=request.getfixturevalue("pool") if workers else None)
    take(source, 3)
    before = source.state_dict()
    for _ in range(2):  # it stays where it is
        with pytest.raises(DataError, match=r"p\.jsonl:6: no field 'prompt' or 'input'.*--on-bad-data skip\)$"):
            source.get_samples(3)
        assert source.state_dict() == before
    assert prompts(take(source, 2)) == ["3 + 1 =", "4 + 1 ="]
    for _ in range(2):  # also as the first of a batch
        with pytest.raises(DataError, match=":6: no field"):
            source.get_samples(1)
    skipping = stream(path, on_bad_data="skip")
    skipping.load_state_dict(before)  # the run goes on without the row
    assert prompts(take(skipping, 3)) == ["3 + 1 =", "4 + 1 =", "6 + 1 ="]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", [False, True])
def test_a_value_that_cannot_be_read_is_one_bad_row_of_a_stream(stream, tmp_path, request, workers):
    offsets, texts = struct.pack("<4i", 0, 1, 2, 3), b"a\xffb"
    column = pa.Array.from_buffers(pa.string(), 3, [None, pa.py_buffer(offsets), pa.py_buffer(texts)])
    pq.write_table(pa.table({"prompt": ["1 =", "2 =", "3 ="], "label": ["1"] * 3, "x": column}), tmp_path / "p.parquet")
    encoding = request.getfixturevalue("pool") if workers else None
    source = stream(tmp_path / "p.parquet", encoding=encoding)
    with pytest.raises(DataError, match=r"p\.parquet, row 2: a value cannot be read: 'utf-8' codec"):
        source.get_samples(3)
    source = stream(tmp_path / "p.parquet", encoding=encoding, on_bad_data="skip")
    assert prompts(take(source, 4)) == ["1 =", "3 =", "1 =", "3 ="]


def test_an_error_loses_nothing_of_the_buffer(stream, jsonl):
    rows = [*text_rows(3), {"no": "prompt"}]
    source = stream(jsonl(rows), kind=RolloutDataSourceWithBuffer)
    groups = source.get_samples(2)
    source.add_samples(groups)
    with pytest.raises(DataError, match=":4: no field"):
        source.get_samples(4)
    assert source.check_ledger() is None
    again = source.get_samples(3)
    assert [group[0].group_index for group in again] == [0, 1, 2]
    assert all(one is other for one, other in zip(again, groups, strict=False))


def test_a_file_that_breaks_off_is_told_where_it_is_reached(stream, write, tmp_path):
    path = tmp_path / "p.jsonl.gz"
    write(text_rows(3000), path)
    path.write_bytes(path.read_bytes()[:-2000])
    source = stream(path)
    take(source, 100)
    with pytest.raises(DataError, match="is damaged or cut off and cannot be decompressed"):
        take(source, *[500] * 6)


def test_skipped_rows_are_counted_and_logged(stream, jsonl, caplog):
    rows = text_rows(30)
    for place in range(5, 25):
        rows[place]["prompt"] = ""
    rows[27]["prompt"] *= 9
    source = stream(jsonl(rows), on_bad_data="skip", rollout_max_prompt_len=20)
    with caplog.at_level(logging.WARNING):
        take(source, 8)
    told = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[0] for line in told] == [
        f"skipped {bad} of {rows} rows so far" for bad, rows in ((1, 6), (2, 7), (3, 8), (10, 15))
    ]
    assert "p.jsonl:6: 'prompt' must be a string" in told[0]
    caplog.clear()
    source.load_state_dict(json.loads(json.dumps(source.state_dict())))
    with caplog.at_level(logging.WARNING):
        take(source, 3)
    assert (
        caplog.records[0]
        .getMessage()
        .endswith("p.jsonl: epoch 0 left out rows of 30: 20 bad, 1 longer than --rollout-max-prompt-len 20")
    )
    with caplog.at_level(logging.WARNING):
        take(source, 9)
    assert "epoch 1 left out rows of 30: 20 bad, 1 longer" in caplog.text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rollout_max_prompt_len": 1}, "none of the 4 rows can be used: 0 bad, 4 longer than .*max-prompt-len 1"),
        ({"label_key": "x", "on_bad_data": "skip"}, "none of the 4 rows can be used: 4 bad"),
    ],
)
def test_an_epoch_without_a_prompt_is_an_error_and_no_search_without_end(stream, jsonl, change, words):
    source = stream(jsonl(text_rows(4)), **change)
    for _ in range(2):
        with pytest.raises(DataError, match=words):
            source.get_samples(1)


def test_a_position_belongs_to_its_file_order_and_settings(stream, jsonl):
    path = jsonl(text_rows(6))
    flags = {"rollout_shuffle": True}
    state = stream(path, **flags).state_dict()
    stream(jsonl(text_rows(6), "copy.jsonl"), **flags).load_state_dict(state)
    others = {
        "bytes 111 → 131": (jsonl(text_rows(7), "other.jsonl"), flags),
        "digest": (jsonl([*text_rows(5), {"prompt": "5 + 1 =", "label": "7"}], "label.jsonl"), flags),
        "settings": (f"{path}@[0:3]", flags),
        "shuffle 10000 → False": (path, {}),
        "shuffle 10000 → 50": (path, {**flags, "streaming_shuffle_buffer": 50}),
        "seed 42 → 7": (path, {**flags, "rollout_seed": 7}),
    }
    for words, (other, changed) in others.items():
        with pytest.raises(DataError, match=words.replace("111 → 131", ".* → ")):
            stream(other, **changed).load_state_dict(state)
    for changed in ({"apply_chat_template": True}, {"metadata_key": "x"}, {"rollout_max_prompt_len": 20}):
        with pytest.raises(DataError, match=r"other prompts or another order \(settings"):
            stream(path, **flags, **changed).load_state_dict(state)
    with pytest.raises(DataError, match="--streaming-data"):
        stream(path, memory=True, **flags).load_state_dict(state)
    with pytest.raises(DataError, match="--streaming-data"):
        stream(path, **flags).load_state_dict(stream(path, memory=True, **flags).state_dict())


class StreamMachine(RuleBasedStateMachine):
    """Random use of a buffered source of a stream, compared with the one that its fresh groups come from."""

    make: classmethod

    def __init__(self):
        super().__init__()
        self.source, self.straight = self.make(), self.make()
        self.fresh = []  # of the straight one, as dictionaries
        self.out, self.waiting = [], 0
        self.next = 0
        self.saved = []

    def expected(self, index):
        while len(self.fresh) <= index:
            groups = self.straight.get_samples(3)
            self.fresh += [[sample.to_dict() for sample in group] for group in groups]
            self.straight.ledger.settle(groups, Fate.TRAINED)
        return self.fresh[index]

    @rule(count=st.integers(0, 7))
    def get(self, count):
        groups = self.source.get_samples(count)
        assert len(groups) == count
        for group in groups:
            index = group[0].group_index
            assert [sample.to_dict() for sample in group] == self.expected(index)
        fresh = [group[0].group_index for group in groups][min(self.waiting, count) :]
        assert fresh == list(range(self.next, self.next + len(fresh)))
        self.next += len(fresh)
        self.waiting -= min(self.waiting, count)
        self.out += groups

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def settle_some(self, data):
        groups = data.draw(st.lists(st.sampled_from(self.out), unique_by=id, max_size=4))
        self.source.ledger.settle(groups, Fate.TRAINED)
        self.leave(groups)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give_back(self, data):
        groups = data.draw(st.lists(st.sampled_from(self.out), unique_by=id, max_size=3))
        self.source.add_samples(groups)
        self.leave(groups)
        self.waiting += len(groups)

    def leave(self, groups):
        left = set(map(id, groups))
        self.out = [group for group in self.out if id(group) not in left]

    @rule()
    def save(self):
        self.saved.append(json.dumps([self.source.state_dict(), self.next, self.waiting + len(self.out)]))

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), same=st.booleans())
    def restore(self, data, same):
        state, self.next, self.waiting = json.loads(data.draw(st.sampled_from(self.saved)))
        self.source = self.source if same else self.make()
        self.source.load_state_dict(state)
        assert self.source.state_dict() == state
        self.out = []


@pytest.fixture
def machine(stream, write, tmp_path):
    """Machines over files with bad and long rows, in blocks of 4: of one format, or of two with weights."""

    def build(suffixes, encoding=None):
        paths = [tmp_path / f"p{number}{suffix}" for number, suffix in enumerate(suffixes)]
        for number, path in enumerate(paths):
            rows = text_rows(11, 20 * number)
            rows[3]["prompt"], rows[8]["prompt"] = "", rows[8]["prompt"] * 9
            write(rows, path)
        flags = {"rollout_shuffle": True, "streaming_shuffle_buffer": 4}
        flags |= {"rollout_max_prompt_len": 20, "on_bad_data": "skip"}
        flags |= {"prompt_data_weights": (2.0, 1.0)} if len(paths) == 2 else {}
        made = functools.partial(stream, *paths, kind=RolloutDataSourceWithBuffer, encoding=encoding, **flags)
        return type("Machine", (StreamMachine,), {"make": staticmethod(made)})

    return build


USE = functools.partial(settings, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("suffixes", [(".jsonl",), (".jsonl.gz", ".parquet")])
@pytest.mark.parametrize("workers", [False, True])
def test_saving_and_restoring_at_any_time(machine, request, suffixes, workers, caplog):
    caplog.set_level(logging.ERROR, "slime_rollout")
    made = machine(suffixes, request.getfixturevalue("pool") if workers else None)
    run_state_machine_as_test(made, settings=USE(max_examples=8, stateful_step_count=20))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("suffixes", [(".jsonl",), (".jsonl.zst",), (".jsonl.gz", ".parquet"), ("", ".jsonl")])
@pytest.mark.parametrize("workers", [False, True])
def test_saving_and_restoring_at_any_time_in_many_cases(machine, request, suffixes, workers, caplog):
    caplog.set_level(logging.ERROR, "slime_rollout")
    made = machine(suffixes, request.getfixturevalue("pool") if workers else None)
    run_state_machine_as_test(made, settings=USE(max_examples=150, stateful_step_count=40))


READ_THROUGH = """
    import ctypes, gc, json, pathlib, sys
    sys.modules["torch"] = None  # transformers would import it, for many seconds
    import pyarrow.parquet
    from slime_rollout.config import RolloutConfig
    from slime_rollout.data import Fate, PromptEncoder, RolloutDataSource, StreamingPrompts, load_tokenizer

    def status(file, name):
        lines = pathlib.Path("/proc/self", file).read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

    def measure(path, groups):
        gc.collect()  # what the measurement before left must not count as held at the start
        ctypes.CDLL(None).malloc_trim(0)
        pyarrow.default_memory_pool().release_unused()
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        memory, begun = status("status", "VmRSS"), status("io", "rchar")
        config = RolloutConfig.of(
            hf_checkpoint="none", prompt_data=path, rollout_batch_size=1, streaming_data=True, rollout_shuffle=True,
            streaming_shuffle_buffer=100,
        )
        source = RolloutDataSource(StreamingPrompts(config, encoder), samples_per_prompt=1, shuffle=True, seed=1)
        first = None
        for _ in range(groups):
            source.ledger.settle(source.get_samples(1), Fate.TRAINED)
            first = first or status("io", "rchar") - begun
        return {
            "first": first, "all": status("io", "rchar") - begun, "memory": 1024 * (status("status", "VmHWM") - memory)
        }

    encoder = PromptEncoder(load_tokenizer(sys.argv[1]), apply_chat_template=False)
    measure(sys.argv[2], 1)  # what is imported and made once
    print(json.dumps([measure(path, int(groups)) for path, groups in zip(sys.argv[2::2], sys.argv[3::2])]))
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_memory_and_start_do_not_grow_with_the_file(tokenizer_dir, tmp_path, suffix):
    """A file of 48 MB is read through, and one a quarter as large."""
    words = []
    for size in (12, 48):
        words += [str(big_file(tmp_path / f"{size}{suffix}", size)), str(size * 40)]
    code = [sys.executable, "-c", textwrap.dedent(READ_THROUGH), tokenizer_dir, *words]
    done = subprocess.run(code, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    small, large = json.loads(done.stdout)
    assert large["all"] > 40e6, (small, large)
    assert large["first"] < min(10e6, small["first"] + 1e5), (small, large)
    assert large["memory"] < min(24e6, small["memory"] + 8e6), (small, large)


def big_file(path, megabytes):
    """Rows of 25 kB, mostly metadata. A Parquet file has them all in one row group."""
    rows = [{"prompt": f"{place} + 1 =", "label": "1", "metadata": {"x": f"{place:05}" * 4980}} for place in range(40)]
    if path.suffix == ".parquet":
        whole = pa.concat_tables([pa.Table.from_pylist(rows)] * megabytes)
        pq.write_table(whole, path, row_group_size=10**6, use_dictionary=False, compression="none")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) * megabytes)
    return path
