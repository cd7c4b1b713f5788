"""Small files of every kind that people get from others, written by the writers that users have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from mutants_of_files import PACKED

ROWS = [
    {"prompt": f"say a number: {number}", "label": str(number), "metadata": {"of": [number]}} for number in range(40)
]
CHATS = [
    {"messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "a number"}]}
    for number in range(20)
]
PAIRS = [{"prompt": f"{number}?", "chosen": "a number", "rejected": "none"} for number in range(20)]
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + ': ' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant: ' }}{% endif %}"
)
WORDS = """\
num-rollout = 1
rollout-batch-size = 4
n-samples-per-prompt = 2
global-batch-size = 8
colocate = true
lr = 1e-6
hf-checkpoint = "model"
load = "model"
prompt-data = ["rows.jsonl"]
rm-type = "math"
save = "save"
eval-config = "eval.yaml"
eval-interval = 1
megatron-config-path = "roles.yaml"
custom-config-path = "custom.yaml"
apply-chat-template = true
apply-chat-template-kwargs = {a = 1}
advantage-estimator = "ppo"
"""
EVAL = """\
eval:
  defaults: {temperature: 0.6, max_response_len: 64, apply_chat_template: false}
  datasets:
    - {name: aime, path: rows.jsonl, n_samples_per_eval_prompt: 2, rm_type: math, stop: [x, y], stop_token_ids: [1, 2]}
    - name: gsm8k
      path: rows.jsonl@[2:7]
      temperature: 0
      metadata_overrides: {a: {b: [1, 2.5, null]}}
"""
ROLES = """\
megatron:
  - {name: mine, role: actor, overrides: {lr: 1e-5}}
  - role: critic
    overrides: {clip_grad: 2, lr_warmup_iters: 3}
"""
CUSTOM = "max_calls: 3\nb: [1]\n"
SCRIPT = """#!/bin/bash
export NUM_GPUS=${NUM_GPUS:-8}
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/tiny.sh"
CKPT_ARGS=(
   --hf-checkpoint ${BASE}/hf   # the model
   --load "$BASE/my dist/"
)
if [ "$NVLINK_COUNT" -gt 0 ]; then
    HAS_NVLINK=1
fi
ROLLOUT_ARGS+=(--rollout-batch-size 32 --n-samples-per-prompt $((2 * 4)))
ray job submit --runtime-env-json="{\\"env_vars\\": {}}" -- python3 train.py \\
   --actor-num-gpus-per-node ${NUM_GPUS} ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} "${ROLLOUT_ARGS[@]}" --colocate
"""


def make_files(root: Path) -> None:
    """Write them, a folder for each kind."""
    from slime_convert import hf_to_fp8, hf_to_int4, hf_to_torch_dist

    _make_model(root / "hf")
    hf_to_torch_dist(root / "hf", root / "torch_dist")
    hf_to_fp8(root / "hf", root / "fp8")
    hf_to_int4(root / "hf", root / "int4")
    _make_legacy(root / "hf", root / "legacy")
    _make_gguf(root / "hf", root / "gguf")
    _make_adapter(root / "hf", root / "adapter")
    _make_rows(root)
    _make_command(root)
    _make_run(root / "run", root / "hf")
    shutil.copytree(root / "run" / "save", root / "rollouts")
    (root / "script").mkdir()
    (root / "script" / "run.sh").write_text(SCRIPT)
    (root / "script" / "tiny.sh").write_text('N=2\nMODEL_ARGS=(\n  --num-layers "$N"\n  --swiglu\n)\n')


def _make_model(path: Path) -> None:
    from tiny import make_tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    sizes = {"vocab_size": 499, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 128}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512}
    config = Qwen3Config(**sizes, eos_token_id=0, pad_token_id=2, dtype="float32", tie_word_embeddings=False)
    Qwen3ForCausalLM(config).save_pretrained(path, max_shard_size="60KB")


def _make_legacy(origin: Path, path: Path) -> None:
    """What two tensor-parallel ranks save."""
    import torch
    from safetensors.torch import load_file

    from slime_convert import ModelShape, WeightMap

    shape = ModelShape.from_hf_config(origin)
    weight_map = WeightMap(shape, shape.padded_vocab_size(2, 16))
    weights = {name: tensor for file in origin.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for rank in range(2):
        state = {
            name: weight_map.split_tp(name, weight_map.from_hf(name, weights.__getitem__), 2)[rank].clone()
            for name in weight_map.megatron_names()
        }
        place = path / "iter_0000003" / f"mp_rank_0{rank}" / "model_optim_rng.pt"
        place.parent.mkdir(parents=True)
        args = shape.to_megatron_args() | {"tensor_model_parallel_size": 2}
        torch.save({"model": state, "args": args, "checkpoint_version": 3.0, "iteration": 3}, place)
    (path / "latest_checkpointed_iteration.txt").write_text("3")


def _make_gguf(origin: Path, path: Path) -> None:
    """With a vocabulary, which transformers reads."""
    import gguf
    from safetensors.torch import load_file

    from slime_convert.formats.gguf import name_in_gguf

    path.mkdir()
    config, tokenizer = (json.loads((origin / f"{name}.json").read_text()) for name in ("config", "tokenizer"))
    writer = gguf.GGUFWriter(path / "model.gguf", "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    vocab = tokenizer["model"]["vocab"]
    words = sorted(vocab, key=vocab.__getitem__)
    words += [f"<{number}>" for number in range(len(words), config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    writer.add_token_types([1] * len(words))
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    for file in sorted(origin.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            kind = gguf.GGMLQuantizationType.Q8_0 if "mlp" in name else None
            data = tensor.numpy() if kind is None else gguf.quantize(tensor.numpy(), kind)
            writer.add_tensor(name_in_gguf(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _make_adapter(origin: Path, path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from slime_megatron.checkpoints.peft import write_adapter
    from slime_megatron.settings.trained import Lora

    weights = {name: tensor for file in origin.glob("*.safetensors") for name, tensor in load_file(file).items()}
    factors = {}
    for name, tensor in weights.items():
        if name.split(".")[-2] in ("q_proj", "down_proj"):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            factors[f"{stem}.lora_A.weight"] = torch.randn(2, tensor.shape[1])
            factors[f"{stem}.lora_B.weight"] = torch.randn(tensor.shape[0], 2)
    write_adapter(path, factors, Lora(rank=2, alpha=4.0))


def _make_rows(root: Path) -> None:
    import datasets
    import pyarrow.parquet

    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    contents = {"jsonl": lines, "json": json.dumps(ROWS).encode()}
    contents |= {f"jsonl{end}": pack(lines) for end, (_, pack) in PACKED.items()}
    for end, content in contents.items():
        (root / end).mkdir()
        (root / end / f"rows.{end}").write_bytes(content)
    for name, rows in (("sft", CHATS), ("pairs", PAIRS)):
        (root / name).mkdir()
        (root / name / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(root / "arrow" / "rows")
    (root / "parquet").mkdir()
    pyarrow.parquet.write_table(table.data.table, root / "parquet" / "rows.parquet", row_group_size=16)


def _make_command(root: Path) -> None:
    for name, file in (("toml", "run.toml"), ("yaml", "run.yaml")):
        shutil.copytree(root / "hf", root / name / "model")
        shutil.copy(root / "jsonl" / "rows.jsonl", root / name)
        text = WORDS if name == "toml" else WORDS.replace("{a = 1}", "{a: 1}").replace(" = ", ": ")
        named = {file: text, "eval.yaml": EVAL, "roles.yaml": ROLES, "custom.yaml": CUSTOM}
        for own, content in named.items():
            (root / name / own).write_text(content)


def _make_run(path: Path, model: Path) -> None:
    """What a run leaves: settings, metrics, sums, samples, rollouts, a manifest, and what happened to engines."""
    import numpy as np

    from slime_core.config import AlgorithmConfig
    from slime_core.schedule import ShardSpec, build_shards
    from slime_core.sums import sample_sums, shard_sum
    from slime_core.types import RolloutBatch, Sample, Span, TrainReport
    from slime_launch.flags import parse_train
    from slime_launch.manifest import Manifest, write_manifest
    from slime_launch.tracking import Tracker
    from slime_rollout.ready import ReadyRollout
    from slime_rollout.shown import write_shown
    from slime_rollout.store import RolloutStore

    words = f"--hf-checkpoint {model} --load {model} --prompt-data p --num-rollout 2 --rollout-batch-size 2 --colocate"
    settings = parse_train([*words.split(), "--output-dir", str(path), "--report-samples", "2"])
    (path / "logs").mkdir(parents=True)
    flags = json.loads(json.dumps(settings.flags(), default=str)) | {"save": "save"}
    entries = {name: {"value": value, "origin": "command line"} for name, value in flags.items()}
    found = {"settings": entries, "environment": {"OMP_NUM_THREADS": "1"}, "packages": {"torch": "2"}}
    (path / "settings.json").write_text(json.dumps(found | {"engine_packages": {"sglang": "0"}}))
    tracker, store = Tracker(path, tensorboard=False), RolloutStore(path / "save" / "rollouts")
    for number in range(2):
        samples = [
            Sample(
                index=2 * number + member, group_index=number, prompt=f"prompt {number}", status="completed",
                tokens=[3, 4, 10 + member, 20], response_length=2, rollout_log_probs=[-0.5, -1.0],
                weight_versions=[0, 0], response="ab", reward=float(member), metadata={"a": 1},
            )
            for member in range(2)
        ]  # fmt: skip
        batch = RolloutBatch(rollout_id=number, groups=[samples], weight_version=number)
        columns = batch.columns()
        store.write(columns, {"ledger": {"generated": 4, "trained": 4}})
        write_shown(batch, settings.rollout, 2, path)
        spec = ShardSpec(
            algorithm=AlgorithmConfig(), temperature=1.0, data_parallel_size=2, micro_batch_size=1, global_batch_size=2
        )
        shards = build_shards(columns, spec)
        sums = sample_sums(columns.samples) | {"index": np.asarray(columns.samples["index"])}
        ready = ReadyRollout(
            rollout_id=number, weight_version=None, metrics={}, seconds={}, num_samples=2, failures=[], examples=[],
            shards=[], shard_sums=[shard_sum(one) for one in shards], sample_sums=sums,
        )  # fmt: skip
        of = {"step": number, "rollout_id": number}
        spans = [Span(who="engine 0", what="generate", start=1000.0 + number, seconds=0.5)]
        tracker.log("timeline", **of, metrics={}, spans=spans)
        metrics = {"rollout/raw_reward": 0.5, "rollout/response_len/mean": 2.0, "perf/step_time": 1.0}
        tracker.log("rollout", **of, metrics=metrics, samples=[{"prompt": "a", "response": "b", "reward": 1.0}])
        tracker.log("train", **of, metrics={"train/loss": 0.5, "train/grad_norm": 1.0})
        tracker.log("eval", **of, metrics={"eval/aime": 0.5, "eval/aime/stderr": 0.1})
        names = ["embedding.weight", "output.weight"]
        weights = np.arange(6, dtype=np.uint32).reshape(2, 3)
        tracker.log_sums(ready, TrainReport(rollout_id=number, steps=[], weight_names=names, weight_sums=weights))
    tracker.close()
    event = {"time": "2026-01-01T00:00:00+00:00", "engine": "engine 0", "event": "died", "detail": "exit code 137"}
    (path / "logs" / "engine_events.jsonl").write_text(json.dumps(event) + "\n")
    (path / "report.json").write_text(json.dumps({"rollouts": 2, "ledger": {"generated": 4, "trained": 4}}))
    manifest = Manifest(
        iteration=2, weight_version=2, checkpoint=None, source_state={"ledger": {"generated": 4, "trained": 4}},
        flags=flags, output_dir=str(path), load=str(model), ref_load=str(model),
    )  # fmt: skip
    write_manifest(path / "save", manifest)
