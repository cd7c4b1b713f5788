"""What the model cannot take, found before anything starts, in every kind of run; and rollouts that train nothing."""

import json

import pytest
import torch
from safetensors.torch import save_file

from slime_convert.mapping import WeightMap
from slime_convert.shape import ModelShape
from slime_core.errors import ConfigError, DataError
from slime_core.types import RolloutBatch, Sample, Status
from slime_launch.batch_spec import batch_spec
from slime_launch.cli import main
from slime_launch.errors import PreflightError
from slime_launch.flags import parse_train
from slime_launch.preflight import check_weight_names, preflight
from slime_launch.step_metrics import step_cells, step_line
from slime_rollout.prepare import prepare_rollout
from slime_rollout.ready import EMPTY, MASKED, NO_ADVANTAGE, NO_STEP, REMOVED

ADDED = {
    "id": 13,
    "content": "<|tool|>",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": False,
}


@pytest.fixture
def added(workspace):
    """The tokenizer has a token beyond the model's 13."""
    config = json.loads((workspace / "hf" / "config.json").read_text())
    (workspace / "hf" / "config.json").write_text(json.dumps(config | {"vocab_size": 13}))
    file = workspace / "hf" / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"added_tokens": [ADDED]}))


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def command(flags, to_words, workspace):
    """Checks the good command with further words, over rows of its own."""

    def run(*words, rows=({"prompt": "1 + 1 =", "label": "2"},), **changed):
        write(workspace / "train.jsonl", *rows)
        return preflight(parse_train([*to_words(flags | changed), *words]))

    return run


BAD = {"prompt": "use <|tool|>", "label": "2"}


@pytest.mark.parametrize(
    "words", [[], ["--debug-rollout-only"], ["--async-buffer-size", "1", "--rollout-num-gpus", "1"]]
)
def test_a_prompt_with_a_token_of_another_model_is_refused(command, added, flags, words):
    if len(words) > 1:
        del flags["--colocate"]
    with pytest.raises(
        DataError, match=r"train\.jsonl:1: the prompt's token 13 \('<\|tool\|>', which the tokenizer adds\)"
    ):
        command(*words, rows=[BAD])
    said = command(*words).said
    assert any("1 of the tokenizer's tokens, such as 13" in line for line in said)


def test_rows_that_are_trained_on_are_of_the_models_tokens(command, added, flags):
    del flags["--colocate"]
    del flags["--n-samples-per-prompt"]
    flags["--global-batch-size"] = "4"
    row = {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "<|tool|>"}]}
    with pytest.raises(DataError, match=r"train\.jsonl:1: the conversation's token 13"):
        command("--loss-type", "sft_loss", rows=[row])


def test_an_evaluation_alone_is_checked_too(command, added, workspace):
    write(workspace / "held.jsonl", BAD)
    with pytest.raises(DataError, match=r"held-out set held: .*token 13"):
        command("--num-rollout", "0", "--eval-prompt-data", "held", str(workspace / "held.jsonl"))


def test_a_stop_token_that_the_model_lacks_is_refused(command):
    with pytest.raises(DataError, match="--rollout-stop-token-ids: token 499 is outside the model's vocabulary of 499"):
        command("--rollout-stop-token-ids", "498", "499")


def test_a_stop_text_that_no_token_writes_is_told(command):
    assert any("the stop text '🙂' ends no response" in line for line in command("--rollout-stop", "🙂").said)


def test_a_prompt_without_room_for_a_response_is_refused(command):
    long = {"prompt": "1 " * 506, "label": "1"}
    with pytest.raises(DataError, match=r"train\.jsonl:2: the prompt has 506 tokens, .* --rollout-max-prompt-len 505"):
        command(rows=[{"prompt": "1", "label": "1"}, long])
    command(rows=[{"prompt": "1", "label": "1"}, long], **{"--on-bad-data": "skip"})


def test_limits_beyond_the_models_are_told(command, workspace):
    said = command("--rollout-max-response-len", "65536", "--rollout-max-context-len", "600").said
    assert (
        "--rollout-max-response-len 65,536 is more than the model's context of 512 holds: responses end there"
        in said[0]
    )
    assert said[1] == "--rollout-max-context-len 600 is more than the model's context, 512: that counts"
    one = {"--rollout-batch-size": "1", "--global-batch-size": "2"}  # as there is one row
    assert command("--rollout-max-response-len", "509", **one).said == []


def test_a_plan_counts_what_the_run_uses(command, flags, to_words, workspace, capsys):
    rows = [{"prompt": "1 + 1 =", "label": "2"}, {"prompt": "1 + 1 + 1 =", "label": "3"}]
    write(workspace / "train.jsonl", *rows)
    words = [*to_words(flags), "--rollout-max-prompt-len", "5", "--rollout-max-response-len", "64"]
    assert main(["plan", *words]) == 0
    out = capsys.readouterr().out
    assert "train.jsonl: 1 usable rows, of 4 tokens at most" in out
    assert "train.jsonl: 1 of 2 rows are left out, too long" in out


GEMMA = {
    **{"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 499},
    **{"max_position_embeddings": 512, "sliding_window": 32, "query_pre_attn_scalar": 16, "rms_norm_eps": 1e-6},
    **{"rope_theta": 1e6, "rope_local_base_freq": 1e4, "hidden_activation": "gelu_pytorch_tanh"},
}


@pytest.mark.parametrize(
    "words", [["--debug-rollout-only"], ["--num-rollout", "0", "--eval-prompt-data", "held", "train.jsonl"]]
)
def test_a_window_is_refused_where_a_cpus_engine_ignores_it(command, flags, workspace, monkeypatch, words):
    """In runs without trainers, which could be of such a model; as far as the window is shorter than the context."""
    monkeypatch.setattr("slime_launch.validate.run_device", lambda: "cpu")
    monkeypatch.chdir(workspace)
    (workspace / "hf" / "config.json").write_text(json.dumps(GEMMA))
    del flags["--load"]
    with pytest.raises(
        ConfigError, match=r"--hf-checkpoint .*: SGLang on a CPU ignores the window of 32 tokens .* up to 512 tokens"
    ) as caught:
        command(*words)
    assert "trained" not in str(caught.value)
    command(*words, "--rollout-max-context-len", "32")
    monkeypatch.setattr("slime_launch.validate.run_device", lambda: "cuda")
    command(*words)


def test_another_model_of_the_engines_file_is_looked_at_too(command, flags, workspace, monkeypatch):
    monkeypatch.setattr("slime_launch.validate.run_device", lambda: "cpu")
    (workspace / "judge").mkdir()
    (workspace / "judge" / "config.json").write_text(json.dumps(GEMMA))
    group = "server_groups: [{num_gpus: 1, num_gpus_per_engine: 1}]"
    (workspace / "engines.yaml").write_text(
        f"sglang:\n  - {{name: actor, {group}}}\n  - {{name: judge, model_path: {workspace}/judge, {group}}}\n"
    )
    del flags["--colocate"]
    with pytest.raises(
        ConfigError, match=r"--sglang-config: the model .*judge: SGLang .* the window of 32 tokens .* up to 512 tokens"
    ):
        command("--sglang-config", str(workspace / "engines.yaml"), "--rollout-num-gpus", "2")


def test_a_model_without_the_weights_that_its_config_asks_for(command, workspace):
    hf = workspace / "hf"
    shape = ModelShape.from_hf_config(hf)
    weights = {name: torch.zeros(WeightMap(shape).hf_shape(name)) for name in WeightMap(shape).hf_names()}
    save_file(weights, hf / "model.safetensors")
    command()
    head = weights.pop("lm_head.weight")
    save_file(weights, hf / "model.safetensors")
    with pytest.raises(
        PreflightError, match=r'--hf-checkpoint .* lacks 1 of the weights .* lm_head\.weight; .* "tie_word'
    ):
        command()
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights | {"lm_head.weight": head}, hf / "model.safetensors")
    with pytest.raises(
        PreflightError, match=r"lacks 1 .* model\.layers\.1\.mlp\.up_proj\.weight; give the whole model"
    ):
        check_weight_names(hf, shape, "--hf-checkpoint")


SHAPE = ModelShape(
    family="qwen3", num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, num_query_groups=2,
    kv_channels=32, vocab_size=50, max_position_embeddings=16,
)  # fmt: skip


def sample(index, *, length=3, reward=None, **fields):
    return Sample(
        index=index, group_index=index // 2, prompt="p", tokens=[1] * (length + 2), response_length=length,
        weight_versions=[0] * length, status=Status.COMPLETED, reward=float(index % 2) if reward is None else reward,
        **fields,
    )  # fmt: skip


@pytest.fixture
def prepare(flags, to_words):
    def run(samples, **changed):
        settings = parse_train(to_words(flags | changed))
        spec = batch_spec(settings, SHAPE, 1)
        groups = [samples[at : at + 2] for at in range(0, len(samples), 2)]
        batch = RolloutBatch(rollout_id=0, weight_version=0, groups=groups)
        return prepare_rollout(batch, spec, state_dict=dict, put=lambda shard: shard)

    return run


def line(ready, last_step):
    return step_line(ready, 2, {}, last_step, compares_samples=False)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"loss_mask": [0, 0, 0]}, MASKED),
        ({"length": 0}, EMPTY),
        ({"reward": 1.0}, NO_ADVANTAGE),
        ({"remove_sample": True}, REMOVED),
    ],
)
def test_a_rollout_that_trains_nothing_is_told_with_its_count(prepare, fields, why):
    ready = prepare([sample(index, **fields) for index in range(8)])
    assert ready.untrained == {why: 8}
    words = line(ready, {"train/grad_norm": 0.0})
    assert f"(nothing to train on: of 8 samples 8 {why})  loss -  grad norm 0" in words


def test_what_a_part_of_a_rollout_does_not_train_is_counted(prepare):
    samples = [sample(0), sample(1, length=0), sample(2, loss_mask=[0] * 3), sample(3), *map(sample, range(4, 9))]
    ready = prepare(samples[:8])
    assert ready.untrained == {EMPTY: 1, MASKED: 1}
    assert "(not trained on: of 8 samples 1 no response, 1 loss mask 0)" in line(ready, {"train/loss": 1.0})
    assert "not trained on" not in line(prepare([sample(index) for index in range(8)]), {"train/loss": 1.0})


def test_a_rollout_of_another_size_ends_no_run(prepare):
    """Five trajectories with steps of two: the fifth is left out, and counted."""
    ready = prepare([sample(index) for index in range(5)], **{"--global-batch-size": "2", "--rollout-batch-size": "1"})
    assert ready.untrained == {NO_STEP: 1}
    assert len(ready.shards[0].steps) == 2


def test_the_table_shows_an_absent_loss():
    rows = [
        {"kind": "train", "rollout_id": 0, "train/grad_norm": 0.0},
        {"kind": "rollout", "rollout_id": 0, "perf/step_time": 1.0},
    ]
    assert step_cells(1, 2, rows)["loss"] == "-"
