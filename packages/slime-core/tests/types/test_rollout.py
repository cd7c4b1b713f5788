import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import DataError, FormatVersionError
from slime_core.types import RolloutBatch, Sample, Status

FINITE = st.floats(allow_nan=False, allow_infinity=False)
SAMPLE = Sample(index=0, group_index=0, prompt="p")


def make_batch(group_sizes, reward=1.0):
    groups, index = [], 0
    for group, size in enumerate(group_sizes):
        groups.append([Sample(index=index + i, group_index=group, prompt="naïve ", reward=reward) for i in range(size)])
        index += size
    return RolloutBatch(
        rollout_id=4,
        groups=groups,
        weight_version=3,
        metrics={"a": 0.1},
        seconds={"generate": 2.0},
    )


@given(st.lists(st.integers(0, 3), max_size=4), FINITE)
def test_round_trip_is_lossless(group_sizes, reward):
    batch = make_batch(group_sizes, reward)
    assert RolloutBatch.from_jsonl(batch.to_jsonl()) == batch


def test_line_separators_inside_text_do_not_split_a_sample():
    batch = make_batch([1])
    batch.samples[0].response = "one\u2028two\x85three\r\nfour"
    assert RolloutBatch.from_jsonl(batch.to_jsonl()) == batch


def test_numbers_survive_to_the_last_bit():
    batch = make_batch([1], math.nextafter(0.1, 1))
    assert RolloutBatch.from_jsonl(batch.to_jsonl()).samples[0].reward == math.nextafter(0.1, 1)


def test_a_truncated_or_foreign_file_is_refused():
    text = make_batch([2, 1]).to_jsonl()
    with pytest.raises(DataError, match="rollout 4: 2 samples, its head says 3"):
        RolloutBatch.from_jsonl("".join(text.splitlines(keepends=True)[:-1]))
    with pytest.raises(DataError, match="rollout 4: 4 samples, its head says 3"):
        RolloutBatch.from_jsonl(text + text.splitlines(keepends=True)[-1])
    with pytest.raises(DataError, match="a rollout file is empty"):
        RolloutBatch.from_jsonl("")
    head, *rest = text.splitlines()
    foreign = json.dumps(json.loads(head) | {"format_version": 99})
    with pytest.raises(FormatVersionError, match="a rollout file: format_version 99; this slime reads 1"):
        RolloutBatch.from_jsonl("\n".join([foreign, *rest]))
    with pytest.raises(DataError, match="not JSON"):
        RolloutBatch.from_jsonl(text[:-20])


@pytest.mark.parametrize("key", ["rollout_id", "group_sizes", "metrics", "seconds"])
def test_a_head_that_lacks_an_entry_is_refused(key):
    head, *rest = make_batch([1]).to_jsonl().splitlines()
    lacking = {name: value for name, value in json.loads(head).items() if name != key}
    with pytest.raises(DataError, match=f"missing or of a wrong type .*{key}.*; generate that rollout again"):
        RolloutBatch.from_jsonl("\n".join([json.dumps(lacking), *rest]))


@pytest.mark.parametrize("damage", [{"tokens": None}, {"loss_mask": 1}, {"response_length": "2"}])
def test_a_sample_with_an_entry_of_a_wrong_type_is_refused(damage):
    head, row = make_batch([1]).to_jsonl().splitlines()
    with pytest.raises(DataError, match="line 2 of a rollout file: an entry is missing or of a wrong type"):
        RolloutBatch.from_jsonl("\n".join([head, json.dumps(json.loads(row) | damage)]))


def test_numbers_that_are_none_survive_json_lines():
    batch = make_batch([1])
    batch.samples[0].tokens, batch.samples[0].response_length = [1, 2, 3], 3
    batch.samples[0].rollout_log_probs = [math.nan, -math.inf, -0.0]
    assert repr(RolloutBatch.from_jsonl(batch.to_jsonl())) == repr(batch)


@pytest.mark.parametrize("sizes", [[-1, 2], [1.0], "1", None, [[1]]])
def test_a_head_with_impossible_group_sizes_is_refused(sizes):
    head, row = make_batch([1]).to_jsonl().splitlines()
    with pytest.raises(DataError, match="a rollout file: group_sizes"):
        RolloutBatch.from_jsonl("\n".join([json.dumps(json.loads(head) | {"group_sizes": sizes}), row]))


@pytest.mark.parametrize("row", ["[" * 100_000, '{"index": ' + "9" * 5000 + "}", "", "3", "nul"])
def test_a_line_that_is_no_object_is_refused(row):
    head = make_batch([1]).to_jsonl().splitlines()[0]
    with pytest.raises(DataError, match="line 2 of a rollout file is no"):
        RolloutBatch.from_jsonl(f"{head}\n{row}\n")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rollout_id": "4"}, "a rollout: rollout_id must be an integer, got '4'"),
        ({"rollout_id": -1}, "a rollout: rollout_id is -1; it must be 0 or more"),
        ({"groups": None}, "rollout 4: groups must be a list of lists of samples, got NoneType"),
        ({"groups": [SAMPLE]}, "rollout 4: groups must be a list of lists of samples, got list"),
        ({"groups": [["s"]]}, "rollout 4: groups must hold samples, got str"),
        ({"weight_version": "1"}, "rollout 4: weight_version must be an integer, got '1'"),
        ({"weight_version": -1}, "rollout 4: weight_version is -1; it must be 0 or more"),
        ({"metrics": [1.0]}, "rollout 4: metrics must be a dictionary, got list"),
        ({"metrics": {"a": "b"}}, r"rollout 4: metrics\['a'\] must be a number, got 'b'"),
        ({"seconds": {3: 1.0}}, "rollout 4: seconds has the key 3; its numbers are named by strings"),
    ],
)
def test_validation_names_the_field_and_the_values(fields, message):
    with pytest.raises(DataError, match=message):
        RolloutBatch(**({"rollout_id": 4, "groups": [[SAMPLE]]} | fields))


@pytest.mark.parametrize("write", [RolloutBatch.to_bytes, RolloutBatch.to_jsonl])
def test_what_would_not_come_back_is_refused(write):
    batch = make_batch([1])
    batch.samples[0].metadata = {"order": (1, 2)}
    with pytest.raises(DataError, match=r"metadata\.order is a tuple"):
        write(batch)
    batch = make_batch([1])
    batch.metrics = None
    with pytest.raises(DataError, match="rollout 4: metrics must be a dictionary"):
        write(batch)


def test_json_lines_tell_two_lone_surrogates_from_one_character():
    sample = Sample(index=0, group_index=0, prompt="\U0001f600 \ud83d", label="\\ud83d", metadata={"nan": math.nan})
    assert repr(Sample.from_json(sample.to_json())) == repr(sample)
    sample.response = "\ud83d\ude00"
    with pytest.raises(DataError, match="sample 0: a text has two lone surrogates in a row"):
        sample.to_json()


LINE = Sample(
    index=3, group_index=1, prompt=[{"role": "user", "content": "2+2"}], label="ü4", tokens=[5, 60, 700],
    response_length=2, loss_mask=[0, 1], rollout_log_probs=[-0.5, -0.125], weight_versions=[1, 1], reward={"a": 0.5},
    metadata={"k": [None, True]},
).to_json()  # fmt: skip


@given(st.integers(0, len(LINE) - 1), st.integers(0, 127))
def test_a_changed_character_is_a_typed_error_or_a_valid_sample(place, character):
    """JSON lines carry no checksum: they are for people. But no damage raises anything but what is documented."""
    try:
        sample = Sample.from_json(LINE[:place] + chr(character) + LINE[place + 1 :])
    except DataError:
        return
    sample.validate()


@given(st.integers(0, len(LINE) - 1))
def test_a_line_that_was_cut_off_is_told(end):
    with pytest.raises(DataError, match="a sample's line is not JSON"):
        Sample.from_json(LINE[:end])


def test_a_line_of_another_version_is_told():
    for version in (2, 0, "1", True, None):
        with pytest.raises(FormatVersionError, match=r"a sample's line: format_version .*; this slime reads 1"):
            Sample.from_json(json.dumps(json.loads(LINE) | {"format_version": version}))


WRITTEN_BY_VERSION_1 = """\
{"format_version": 1, "rollout_id": 4, "group_sizes": [1], "source_state": {"epoch": 0}, "metrics": {"a": 0.1}, \
"seconds": {"generate": 2.0}}
{"index": 3, "group_index": 1, "prompt": "p", "label": null, "trajectory_id": null, "tokens": [5, 60], "response": \
"\\u00fc", "response_length": 1, "loss_mask": null, "rollout_log_probs": [NaN], "teacher_log_probs": null, \
"weight_versions": [2], "reward": 1.0, "status": "truncated", "remove_sample": false, "session_id": null, "metadata": \
{}, "train_metadata": {}}
"""


def test_lines_of_the_first_version_stay_readable():
    batch = RolloutBatch.from_jsonl(WRITTEN_BY_VERSION_1)
    sample = Sample(
        index=3, group_index=1, prompt="p", tokens=[5, 60], response="ü", response_length=1,
        rollout_log_probs=[math.nan], weight_versions=[2], reward=1.0, status=Status.TRUNCATED,
    )  # fmt: skip
    assert repr(batch.samples) == repr([sample])
    assert (batch.rollout_id, batch.weight_version, batch.metrics) == (4, None, {"a": 0.1})
    assert batch.to_jsonl() == WRITTEN_BY_VERSION_1.replace('"source_state": {"epoch": 0}', '"weight_version": null')
    assert json.loads(sample.to_json()).keys() == {"format_version", *json.loads(batch.to_jsonl().splitlines()[1])}
