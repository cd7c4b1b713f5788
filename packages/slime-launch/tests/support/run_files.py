"""The files of a run that a report reads, made up."""

import gzip
import json
import math

from slime_launch.tracking import Tracker

SETTINGS = {
    "num_rollout": {"value": 2, "origin": "command line"},
    "bf16": {"value": True, "origin": "config file"},
    "eval_prompt_data": {"value": ["held", "a file.jsonl"], "origin": "command line"},
    "lr": {"value": 1e-6, "origin": "default"},
}


def write_run(directory, *, rollouts=2):
    directory.mkdir(parents=True)
    (directory / "settings.json").write_text(json.dumps({"settings": SETTINGS}))
    tracker = Tracker(directory, tensorboard=False)
    tracker.log("eval", step=0, rollout_id=0, metrics={"eval/held": 0.25, "eval/held/stderr": 0.1})
    for number in range(rollouts):
        tracker.log("train", step=number, rollout_id=number, metrics={"train/loss": 0.5 / (number + 1)})
        reward = {"rollout/raw_reward": 0.5 + number / 4, "rollout/dynamic_filter/drop_all_wrong": 3.0}
        tracker.log("rollout", step=number, rollout_id=number, metrics=reward | {"perf/odd": math.nan})
    tracker.log("eval", step=rollouts, rollout_id=rollouts, metrics={"eval/held": 0.75, "eval/held-pass@1": 0.7})
    tracker.close()
    return directory


def keep(directory, rollout, samples, computed=None):
    (directory / "samples").mkdir(exist_ok=True)
    name = directory / "samples" / f"rollout_{rollout:07d}"
    name.with_suffix(".json.gz").write_bytes(gzip.compress(json.dumps(samples).encode()))
    if computed is not None:
        other = name.with_name(f"{name.name}-rank_1.json.gz")
        other.write_bytes(gzip.compress(json.dumps(computed).encode()))


def kept_sample(index, **fields):
    fields = {"dropped": None, "cut": None, "versions": [1, 2], "weight_version": 2} | fields
    return {"rollout": 0, "index": index} | fields
