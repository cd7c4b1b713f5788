"""What a rank writes for those who look for a defect."""

import gzip
import json

import numpy as np

from slime_core.config import AlgorithmConfig
from slime_core.types import TrainShard
from slime_core.types.train import SHOWN
from slime_megatron.step.debugging import ShownSamples

KL = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1)


def test_a_trace_of_chosen_rollouts_and_what_they_trained_on(
    ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path
):
    model = tiny_model("qwen3/4")
    config = tiny_config(
        load=model.checkpoint,
        profile=True,
        profile_step_start=1,
        profile_step_end=2,
        save_debug_train_data=f"{tmp_path}/data/{{rollout_id}}-{{rank}}.npz",
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        share_prompts="off",
    )
    ranks.start(2, config, model.shape, KL, output_dir=str(tmp_path))
    rollouts = [
        make_shards(make_samples(groups=2, masks=True), rollout_id=number, micro_batch_size=4) for number in range(3)
    ]
    for number, shards in enumerate(rollouts):
        if number == 1:
            log_probs = ranks.first("forward", shards, "reference")
        reports = ranks.call("train", shards)

    tokens = sum(len(sample.tokens) - 1 for sample in rollouts[2][0].samples)
    counted = {name: count for name, count in reports[1].tokens.items() if count}
    assert counted == {"ref_log_probs": tokens, "forward_backward": tokens}  # once, not for each virtual stage

    [trace] = (tmp_path / "profile").iterdir()
    assert trace.name == "rollout_0000001-rank_0.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"ref_log_probs", "forward_backward", "optimizer", "aten::mm"} <= names

    written = sorted(path.name for path in (tmp_path / "data").iterdir())
    assert written == [f"{number}-{rank}.npz" for number in range(3) for rank in (0, 1)]
    given = rollouts[1][0]
    for rank in (0, 1):
        shard = TrainShard.read(tmp_path / "data" / f"1-{rank}.npz")
        assert (shard.rollout_id, shard.steps) == (1, given.steps)
        for one, other, expected in zip(shard.samples, given.samples, log_probs, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_array_equal(one.extras["advantages"], other.reward * other.loss_mask.astype(np.float32))
            np.testing.assert_allclose(one.extras["ref_log_probs"], expected, atol=1e-6)


def test_what_a_report_shows_of_samples_and_of_time(
    ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path
):
    """Log-probs before the step, by response token; once, by the last stage, though several ranks compute them."""
    model = tiny_model("qwen3/4")
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "share_prompts": "off"}
    ranks.start(4, tiny_config(load=model.checkpoint, **layout), model.shape, KL, output_dir=str(tmp_path))
    shards = make_shards(make_samples(groups=2, masks=True), micro_batch_size=4)
    samples = shards[0].samples
    chosen = [sample.index for sample in samples[:3]]
    shards[0].columns[SHOWN] = np.isin([sample.index for sample in samples], chosen)
    vars(shards[0]).pop("samples")
    expected = dict(zip([sample.index for sample in samples], ranks.first("forward", shards, "actor"), strict=True))
    reports = ranks.call("train", shards)

    [path] = (tmp_path / "samples").iterdir()
    assert path.name == "rollout_0000000-rank_2.json.gz"
    found = json.loads(gzip.decompress(path.read_bytes()))
    given = {sample.index: sample for sample in samples}
    assert sorted(map(int, found)) == sorted(chosen)
    for index, columns in found.items():
        sample = given[int(index)]
        np.testing.assert_allclose(columns["train_log_probs"], expected[int(index)], atol=1e-4)
        np.testing.assert_allclose(columns["advantages"], sample.reward * sample.loss_mask, atol=1e-4)

    for rank, report in enumerate(reports):
        assert {span.who for span in report.spans} == {f"rank {rank}"}
        spent = {span.what: span.seconds for span in report.spans}
        assert {"ref_log_probs", "forward_backward", "optimizer"} <= spent.keys()
        assert spent["optimizer"] == report.seconds["optimizer"]
        starts = [span.start for span in report.spans]
        assert starts == sorted(starts)


def test_what_cannot_be_written_for_a_report_ends_no_run(tmp_path, monkeypatch, caplog):
    shown = ShownSamples()
    shown._rows = {3: {"advantages": [1.0]}}
    for name in ("get_tensor_model_parallel_rank", "get_context_parallel_rank"):
        monkeypatch.setattr(f"megatron.core.parallel_state.{name}", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    (tmp_path / "samples").write_text("not a directory")
    shown.write(tmp_path / "samples", 7)
    assert "the report will lack what was computed for rollout 7" in caplog.text
    shown.write(tmp_path / "other", 7)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["rollout_0000007-rank_0.json.gz"]
