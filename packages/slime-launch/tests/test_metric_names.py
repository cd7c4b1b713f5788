"""The table of metrics is what the producing code writes: no name is in it that nothing writes, and the reverse."""

import contextlib
import importlib.util
import io
import json
import types
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slime_core.config import AlgorithmConfig
from slime_core.hooks import HookArgs
from slime_core.metrics import eval_metrics
from slime_core.types import EvalReport, SleepReport, Status, SyncReport
from slime_launch.canary import Canary
from slime_launch.console import RunConsole
from slime_launch.flags import parse_train
from slime_launch.handover import Handover
from slime_launch.loop import timed
from slime_launch.metric_names import absent, entry_of, table, unlisted
from slime_launch.step_metrics import eval_row, held_out_row, rollout_row, train_rows
from slime_launch.tracking import Tracker, read_rows
from slime_megatron.model.routing import changed
from slime_megatron.settings.trainer_hooks import TrainerHooks
from slime_megatron.step import passes as step
from slime_megatron.step.losses import LOSSES, LossInputs
from slime_megatron.worker import MegatronWorker, role_passes
from slime_megatron.worker import reports as rank_reports
from slime_megatron.worker.export import PolicyExport
from slime_megatron.worker.reports import RankReports
from slime_megatron.worker.role_passes import RolePasses
from slime_megatron.worker.trained_model import TrainedModel
from slime_rollout.config import RolloutConfig
from slime_rollout.data_service import DataService, DataSpec
from slime_rollout.prepare import train_pass_rates
from slime_rollout.ready import ReadyRollout
from slime_rollout.rollout import RolloutManager

SCRIPT = Path(__file__).parents[3] / "scripts" / "metrics_page.py"
OFF_POLICY = {"get_mismatch_metrics": True, "use_opsm": True, "opsm_delta": 0.1}
ALGORITHMS = (
    {"use_kl_loss": True, "entropy_coef": 0.1, "use_opd": True, "eps_clip_c": 3.0, "use_tis": True, **OFF_POLICY},
    {"use_tis": True, "tis_mode": "icepop", "tis_clip_low": 0.5, "tis_clip": 5.0, "kl_coef": 0.1},
    {"use_mis": True, "mis_rs_level": "token", "mis_veto_threshold": 1e-4},
)
AS_EVALUATED = ("loss", "accuracy", "chosen_reward", "rejected_reward", "reward_margin")
PASSES = ("actor", "reference", "teacher", "critic")
GENERATE = """
async def generate(args, sample, sampling_params):
    kept = None if args.rollout_top_p == 1 else "7 8;"
    sample.append_response([7], text="2", log_probs=[-1.0], weight_version=2, kept_tokens=kept)
    sample.status = "completed"
    return sample

def reward(args, sample):
    if sample.index == 0:
        raise ValueError("no reward")
    return {"score": float(sample.group_index > 2 and sample.index % 2), "short": 1.0, "answer": "2"}
"""


class Sums:
    """Checksums of no weights."""

    names = ()

    def __call__(self, model):
        return np.zeros((0, 3), np.uint32)


class AlonePasses(RolePasses):
    """A worker's passes on one rank, without a model: what the model gives is given."""

    def _planner(self, temperature, timer):
        packed = types.SimpleNamespace(targets_M=[1], computed_tokens=4, computed_pairs=8)
        batch = types.SimpleNamespace(pack=lambda device, **_: packed)
        step = types.SimpleNamespace(global_trajectories=4)
        for role in PASSES:
            self._evaluate(temperature, timer, role, [batch])
        plan = types.SimpleNamespace(batches=[types.SimpleNamespace(batch=batch)], step=step)
        return types.SimpleNamespace(plan=lambda shard: [plan])

    def _head(self, loss, temperature):
        return None

    def _sharing(self):
        return "off"


class AloneAtWork(MegatronWorker):
    """A worker's own naming of metrics, with these passes."""

    def __init__(self, algorithm, loss):
        self._output_dir = Path()
        self.config = types.SimpleNamespace(
            use_routing_replay=False,
            save_debug_train_data=None,
            num_critic_only_steps=0,
            reset_optimizer_states=False,
            bf16=True,
            update_weight_buffer_size=1,
            profile=False,
            profile_step_start=0,
        )
        setup = types.SimpleNamespace(
            config=self.config,
            algorithm=algorithm,
            loss=loss,
            estimator=None,
            hooks=TrainerHooks({}, HookArgs({})),
            shape=None,
            device=types.SimpleNamespace(is_cpu=False, torch_device=torch.device("cpu"), synchronize=lambda: None),
            output_dir=self._output_dir,
            quantized_as=None,
            rendezvous=types.SimpleNamespace(rank=0),
        )
        self._roles = types.SimpleNamespace(
            actor=self._role(),
            critic=self._role(),
            require=lambda call: None,
            model=lambda role: contextlib.nullcontext(),
            begin_rollout=lambda model: None,
            turn_of=lambda model: None,
            release=lambda: None,
            keep_version=lambda: None,
            update_reference=lambda rollout_id: None,
        )
        self._passes = AlonePasses(setup, self._roles)
        self._reports = RankReports(setup)
        self._export = PolicyExport(setup, self._roles)
        self._export._sums = Sums()

    def _role(self):
        given = types.SimpleNamespace(param_groups=[{"lr": 0.1}], step=lambda increment=None: (True, 1.0, None))
        step = partial(TrainedModel.step, types.SimpleNamespace(optimizer=given, scheduler=given))
        own = {
            "zero_gradients": lambda: None,
            "step": step,
            "frozen": {},
            "versions": None,
            "optimizer": None,
            "scheduler": None,
        }
        nothing = types.SimpleNamespace(lora=None)
        return types.SimpleNamespace(
            wrapped=[], model=[], config=nothing, undone_on_error=contextlib.nullcontext, **own
        )


def one_step(wrapped, plan, packed, loss, algorithm, head, see):
    """Two responses through a loss, and its statistics over the ranks."""
    list(packed(0))
    old, seen = torch.tensor([-1.0, -2.0, -1.0, -0.5]), torch.tensor([-1.5, -2.0, -0.9, -0.5])
    known = {name: seen - number for number, name in enumerate(("ref", "rollout", "teacher"))}
    inputs = LossInputs(
        algorithm=algorithm,
        output_N=torch.zeros(2) if loss.scores else old + 0.1,
        weights_N=torch.full((4,), 0.25),
        lengths=(2, 2),
        entropy_N=torch.ones(4),
        advantages_N=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        old_log_probs_N=old,
        old_values_N=old,
        returns_N=old,
        global_pairs=1,
        margins_P=torch.zeros(1),
        **{f"{name}_log_probs_N": values for name, values in known.items()},
    )
    return step.step_metrics([loss(inputs)[1]]) | (changed([with_experts()]) if packed.keywords["replays"] else {})


def with_experts():
    """As much of a model whose routers were given experts as is looked at."""
    replayed = types.SimpleNamespace(counts_2=torch.tensor([1, 4]))
    router = types.SimpleNamespace(router_replay=replayed)
    layer = types.SimpleNamespace(mlp=types.SimpleNamespace(router=router), layer_number=1)
    return types.SimpleNamespace(
        config=types.SimpleNamespace(num_moe_experts=8),
        decoder=types.SimpleNamespace(layers=[layer]),
        parameters=lambda: iter([torch.zeros(1)]),
    )


@pytest.fixture
def alone(monkeypatch):
    """One rank's collectives, and the device's own questions, without a group or a device."""
    monkeypatch.setattr(role_passes, "forward_backward", one_step)
    monkeypatch.setattr(rank_reports, "flops_model", lambda shape: types.SimpleNamespace(packed=lambda **counts: 10))
    monkeypatch.setattr(role_passes, "forward_values", lambda model, packed, batches, head: list(packed(0)))
    for name, answer in (("data_parallel_world_size", 1), ("data_parallel_group", None)):
        monkeypatch.setattr(parallel_state, f"get_{name}", lambda *args, answer=answer, **more: answer)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(step, "gather_values", lambda own, group: [own])
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **more: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 4096)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)


def reports():
    """A worker's report under every loss and correction."""
    shard = types.SimpleNamespace(temperature=1.0, rollout_id=0)
    given = [(AlgorithmConfig(**settings), LOSSES["policy_loss"]) for settings in ALGORITHMS]
    given += [(AlgorithmConfig(loss_type=name), loss) for name, loss in LOSSES.items() if name != "policy_loss"]
    return [AloneAtWork(algorithm, loss).train(shard) for algorithm, loss in given]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tokenizer of bytes."""
    directory = tmp_path_factory.mktemp("model")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator([], trainers.BpeTrainer(special_tokens=["<|end|>"], initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer.save_pretrained(directory)
    return str(directory)


def rows_file(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@contextlib.contextmanager
def generating(model, tmp_path, **changes):
    """A rollout manager whose function is the engine."""
    (tmp_path / "own.py").write_text(GENERATE)
    path = rows_file(tmp_path / "prompts.jsonl", [{"prompt": f"{number}", "label": "2"} for number in range(9)])
    config = {
        "hf_checkpoint": model,
        "prompt_data": path,
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "custom_generate_function_path": f"{tmp_path}/own.py:generate",
        "custom_rm_path": f"{tmp_path}/own.py:reward",
        "rm_on_failure": "zero",
        "reward_key": "score",
        "max_weight_staleness": 1,
        **changes,
    }
    manager = RolloutManager(RolloutConfig.of(**config), router_url="http://127.0.0.1:9", run_seed=1)
    try:
        yield manager
    finally:
        manager.close()


def rollouts(model, tmp_path):
    """Rollouts of prompts, in every way of choosing; then one of rows."""
    with generating(model, tmp_path, rollout_top_p=0.9) as manager:
        yield manager.generate(2)
    nonzero = "slime_rollout.filters.check_reward_nonzero_std"
    with generating(model, tmp_path, over_sampling_batch_size=4, dynamic_sampling_filter_path=nonzero) as manager:
        # Three of the first four groups are dropped, so four more are begun, of which one is needed.
        begun, old = manager.source.get_samples(2)
        for sample in (*begun, *old):
            sample.append_response([9], text="1", log_probs=[-0.5], weight_version=2 if sample in begun else 0)
            sample.status = Status.ABORTED if sample in begun else Status.COMPLETED
        manager.source.add_samples([begun, old])
        yield manager.generate(2)
    with generating(model, tmp_path, dynamic_sampling_filter_path=f"{nonzero}_with_fallback") as manager:
        yield manager.generate(2)
    talks = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}] * 2
    config = RolloutConfig.of(
        hf_checkpoint=model, prompt_data=rows_file(tmp_path / "talks.jsonl", talks), rollout_batch_size=2
    )
    service = DataService(DataSpec(rollout=config, rows="conversations", max_length=None))
    service.start()
    yield service.generate(0)


def whole_rows(batches, trained, memory):
    """What the loop writes of them: train rows, rollout rows, evaluations."""
    seconds = {}
    for phase in ("rollout", "train", "update_weights"):
        with timed(seconds, phase):
            pass
    seconds = {phase: value + 0.1 for phase, value in seconds.items()}
    sync = SyncReport(version=1, tensors=1, bytes=8, seconds=0.1)
    for batch, report in zip([*batches, *[batches[0]] * len(trained)], trained, strict=False):
        rates = train_pass_rates(batch, "score") if batch.samples[0].reward is not None else {}
        ready = ReadyRollout(
            rollout_id=batch.rollout_id, weight_version=1, metrics=batch.metrics | rates, seconds=batch.seconds,
            num_samples=len(batch.samples), failures=[], examples=[], shards=[],
        )  # fmt: skip
        yield from (("train", row) for row in train_rows(report))
        yield "rollout", rollout_row(ready, report, sync, seconds) | memory
    found = eval_metrics("held", [sample for batch in batches[:1] for sample in batch.samples], "score")
    yield "eval", eval_row(EvalReport(rollout_id=0, scores={}, metrics=found, samples={}, seconds=1.0))
    pairs = {name: value for name, value in trained[-1].steps[0].items() if name in AS_EVALUATED}
    yield "eval", held_out_row({"held": pairs}, {"eval": 1.0})


class Half:
    """Trainers or engines that give memory back."""

    def sleep(self, **how):
        return SleepReport(device=1, waiting=2, resident=3)

    def wake(self, **how):
        """Take it again."""

    def progress(self):
        """Asked meanwhile."""

    def log_probs(self, shard, **how):
        return [np.zeros(sample.response_length) for sample in shard.samples]

    def canary_log_probs(self, urls, tokens):
        values = [0.0] * sum(len(row) - 1 for row in tokens.rows)
        return types.SimpleNamespace(done=lambda: True, results=lambda: [dict.fromkeys(urls, values)])


@pytest.fixture
def written(alone, model, tmp_path, flags, to_words):
    """The metrics of those runs, as they come back from the two files that hold them."""
    memory = Handover(parse_train(to_words(flags)).kind, Half(), Half(), RunConsole(io.StringIO()))
    memory.to_train()
    memory.to_send()
    memory.to_generate()
    shape = types.SimpleNamespace(vocab_size=10, num_experts=None, moe_router_topk=None)
    canary = Canary(1e-3, shape, Half(), Half(), memory)
    canary.sent(types.SimpleNamespace(engine_urls=("http://engine",)), 1, lambda: None)
    canary.check(lambda: None)
    tracker = Tracker(tmp_path)
    for number, (kind, row) in enumerate(
        whole_rows([*rollouts(model, tmp_path)], reports(), memory.row() | canary.row())
    ):
        tracker.log(kind, step=number, rollout_id=number, metrics=row)
    tracker.close()
    names = {name for row in read_rows(tmp_path) for name in row if "/" in name}
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == names
    return names


def test_the_table_is_what_is_written(written):
    assert unlisted(written) == []
    assert sorted({name for rows in table().values() for name in rows} - {entry_of(name) for name in written}) == []


def test_names_of_upstream_are_there_or_answered_once():
    answered = [name for names in absent() for name in names.split(", ")]
    assert len(answered) == len(set(answered)) and not [
        name for name in answered if entry_of(name) not in (None, "eval/<set>")
    ]


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("eval/a-b-pass@16", "eval/<set>-pass@<k>"),
        ("eval/a-b", "eval/<set>"),
        ("eval/a-truncated_ratio", "eval/<set>-truncated_ratio"),
        ("rollout/zero_std/count_-0.5", "rollout/zero_std/count_<reward>"),
        ("rollout/zero_std/counts", None),
        ("train/own", None),
    ],
)
def test_which_entry_a_name_has(name, entry):
    assert entry_of(name) == entry


@pytest.mark.skipif(not SCRIPT.is_file(), reason="outside the repository")
def test_the_page_of_metrics_is_up_to_date():
    spec = importlib.util.spec_from_file_location("metrics_page", SCRIPT)
    metrics_page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(metrics_page)
    assert metrics_page.PAGE.read_text(encoding="utf-8") == metrics_page.page(), "run: python scripts/metrics_page.py"
