import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_launch.report.timeline import Interval, lanes_of, lost_time, timeline
from slime_launch.report.trace import chrome_trace


def row(rollout_id, **spans):
    named = {who.replace("_", " "): [list(span) for span in found] for who, found in spans.items()}
    return {"kind": "timeline", "rollout_id": rollout_id, "spans": named}


def stamp(moment):
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def engine_log(directory, name, lines):
    directory.mkdir(exist_ok=True)
    text = [
        f"[{stamp(moment)} TP0] {kind} batch, {'#new-seq' if kind == 'Prefill' else '#running-req'}: {count}, #token: 9"
        for moment, kind, count in lines
    ]
    (directory / f"{name}.log").write_text("\n".join(["starting", *text]) + "\n")


def test_lanes_are_in_order_of_who(tmp_path):
    engine_log(tmp_path / "logs", "engine_0", [(1001, "Prefill", 4)])
    rows = [
        row(0, rank_1=[("optimizer", 1008, 1)], rank_0=[("optimizer", 1008, 1)], loop=[("generate", 1000, 5)]),
        {"kind": "train", "rollout_id": 0},
        row(1, rank_0=[("send", 1006, 1)], rollout=[("generate", 1000, 4)]),
    ]
    lanes = lanes_of(rows, tmp_path / "logs", overlaps=False)
    assert list(lanes) == ["loop", "rollout", "engine 0", "rank 0", "rank 1"]
    assert lanes["rank 0"] == [Interval(1006, 1007, "send", 1), Interval(1008, 1009, "optimizer", 0)]


def test_an_engine_is_busy_while_the_loop_waits_and_its_log_has_lines(tmp_path):
    loop = [("generate", 1000.5, 9.5), ("train", 1010, 10), ("generate", 1020.5, 9.5)]
    lines = [(1001, "Prefill", 8), (1004, "Decode", 8), (1007, "Decode", 2), (1021, "Prefill", 8), (1023, "Decode", 0)]
    lines = [(980, "Prefill", 1), *lines]  # before anything is asked for
    engine_log(tmp_path / "logs", "engine_0", lines)
    [first, second] = lanes_of([row(0, loop=loop)], tmp_path / "logs", overlaps=False)["engine 0"]
    assert first == Interval(1001, 1010, "generate", 0)  # lines of one wait are 3 s apart at most
    assert second == Interval(1021, 1024, "generate", 0)


def test_an_engine_that_goes_on_while_the_trainer_trains_is_not_cut(tmp_path):
    lines = [(1000 + 2 * number, "Decode", 4) for number in range(15)]
    engine_log(tmp_path / "logs", "engine_0", lines)
    rows = [row(0, loop=[("generate", 1000, 4), ("train", 1004, 20)])]
    lanes = lanes_of(rows, tmp_path / "logs", overlaps=True)
    assert lanes["engine 0"] == [Interval(1000, 1030, "generate", -1)]


def test_lost_time_by_hand():
    loop = [Interval(0, 6, "generate", 0), Interval(6, 9, "train", 0), Interval(9, 10, "send", 0)]
    ranks = {
        "rank 0": [Interval(6, 9, "forward_backward", 0), Interval(9, 10, "send", 0)],
        "rank 1": [Interval(6, 8, "forward_backward", 0)],
    }
    found = {one["what"]: (one["seconds"], one["share"]) for one in lost_time({"loop": loop, **ranks})}
    assert found == {
        "trainers wait: generate": (6.0, 0.6),
        "trainers wait: send": (1.0, 0.1),
        "trainers wait: train": (0.5, 0.05),
    }


def test_without_a_loop_nothing_is_known():
    assert lost_time({"rank 0": [Interval(0, 1, "optimizer", 0)]}) == []


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 20)), max_size=12))
def test_busy_and_lost_time_add_up(spans):
    loop = [Interval(0, 50, "generate", 0), Interval(50, 130, "train", 0)]
    busy = [Interval(start, start + length, "forward_backward", 0) for start, length in spans]
    covered = {second for one in busy for second in range(int(one.start), int(one.end))}
    lost = sum(one["seconds"] for one in lost_time({"loop": loop, "rank 0": busy}))
    assert lost == pytest.approx(130 - len(covered))


def test_page_and_trace_have_every_span():
    lanes = {"loop": [Interval(100, 102, "generate", 0)], "rank 0": [Interval(102, 102.5, "optimizer", 0)]}
    found = timeline(lanes, 100.0)
    assert found["lanes"] == [
        {"who": "loop", "spans": [[0.0, 2.0, 0, 1]]},
        {"who": "rank 0", "spans": [[2.0, 0.5, 1, 1]]},
    ]
    trace = chrome_trace({"runs": [{"name": "a", "began": 100.0, "timeline": found}]})
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(names[event["tid"]], event["name"], event["ts"], event["dur"]) for event in spans] == [
        ("loop", "generate", 0, 2_000_000),
        ("rank 0", "optimizer", 2_000_000, 500_000),
    ]
