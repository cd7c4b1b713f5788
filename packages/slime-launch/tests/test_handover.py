"""Which moves of memory each part of a step takes, with halves that check every move as the real ones do."""

import io
import itertools

import pytest

from slime_core.memory import Held, MemoryState, MemoryStateError
from slime_core.types import SleepReport
from slime_launch.console import RunConsole
from slime_launch.flags import parse_train
from slime_launch.handover import Handover

NOTHING, WEIGHTS, EVERYTHING = Held


class Half:
    def __init__(self, name, moves):
        self.name, self.moves, self.memory = name, moves, MemoryState(name)

    def sleep(self, *, keep_weights=False, on_poll=lambda: None):
        with self.memory.sleeping(keep_weights):
            self.moves.append(f"{self.name} keep weights" if keep_weights else f"{self.name} sleep")
        on_poll()
        return SleepReport(device=0, waiting=16, resident=100)

    def wake(self, *, weights_only=False, on_poll=lambda: None):
        with self.memory.waking(weights_only):
            self.moves.append(f"{self.name} take weights" if weights_only else f"{self.name} wake")
        on_poll()

    def progress(self):
        """Asked while trainers move."""


@pytest.fixture
def make(flags, to_words):
    """A handover of a command with more flags, and its halves."""

    def build(*more: str):
        settings, moves = parse_train([*to_words(flags), *more]), []
        keeps = settings.rollout.selection.update_weights_interval > 1
        trainers, engines = Half("trainers", moves), Half("engines", moves)
        if settings.kind.engines_sleep:
            engines.sleep()
        del moves[:]
        console = RunConsole(io.StringIO())
        memory = Handover(settings.kind, trainers, engines, console, keeps_weights=keeps)
        return memory, trainers, engines, moves

    return build


def step(memory):
    memory.to_train()
    memory.to_send()
    memory.to_generate()


WHOLE = [
    "engines sleep", "trainers wake", "trainers keep weights", "engines take weights", "trainers sleep", "engines wake",
]  # fmt: skip


@pytest.mark.parametrize(
    ("flags_given", "moves_of_a_step"),
    [
        ((), WHOLE),
        (("--no-offload-train",), [move for move in WHOLE if move.startswith("engines")]),
        (("--no-offload-rollout",), [move for move in WHOLE if move.startswith("trainers")]),
        (("--no-offload-train", "--no-offload-rollout"), []),
        (
            ("--update-weights-interval", "2"),  # what engines have is needed again
            ["engines keep weights", "trainers wake", "trainers keep weights", "trainers sleep", "engines wake"],
        ),
    ],
)
def test_a_step(make, flags_given, moves_of_a_step):
    memory, _, _, moves = make(*flags_given)
    memory.to_send()
    memory.to_generate()
    for _ in range(2):
        del moves[:]
        step(memory)
        assert moves == moves_of_a_step
    memory.to_generate()  # nothing is left to do
    assert moves == moves_of_a_step
    row = memory.row()
    sleeps = memory.trainer_sleeps
    assert row.get("perf/trainer_asleep_waiting_bytes") == (16.0 if sleeps else None)
    assert bool(row) == bool(moves_of_a_step) and all(value >= 0 for value in row.values())


@pytest.mark.parametrize(
    ("flag", "halves"),
    [("--offload-train", ("trainers",)), ("--offload-rollout", ("engines",)), ("--offload", ("trainers", "engines"))],
)
def test_halves_side_by_side_give_memory_back_on_request(make, flags, flag, halves):
    del flags["--colocate"]
    flags["--rollout-num-gpus"] = "1"
    assert step_of(make())[1] == []
    assert step_of(make(flag))[1] == [move for move in WHOLE if move.startswith(halves)]


def step_of(made):
    memory, _, _, moves = made
    memory.to_send()
    memory.to_generate()
    del moves[:]
    step(memory)
    return memory, moves


def test_both_never_hold_everything_and_engines_generate_with_weights_alone(make):
    """In every order of what a loop may ask for: else it is refused."""
    for asked in itertools.product(("to_train", "to_send", "to_generate", "to_restart"), repeat=4):
        memory, trainers, engines, _ = make()
        for name in asked:
            if name == "to_restart":
                trainers.memory = MemoryState("trainers")
            if name == "to_generate" and engines.memory.held is NOTHING:
                with pytest.raises(MemoryStateError, match="generate needs the engines' weights"):
                    memory.to_generate()
                break
            getattr(memory, name)()
            held = trainers.memory.held, engines.memory.held
            assert held in {(EVERYTHING, NOTHING), (WEIGHTS, WEIGHTS), (NOTHING, EVERYTHING), (WEIGHTS, EVERYTHING)}
            if name == "to_generate":
                assert held == (NOTHING, EVERYTHING)


def test_a_replaced_engine_gets_weights_amid_a_rollout(make):
    memory, _, _, moves = make()
    memory.to_send()
    memory.to_generate()
    del moves[:]
    with RunConsole(io.StringIO()).wait("generate") as shown:
        memory.to_send(shown)
        memory.to_generate(shown)
    assert moves == ["trainers take weights", "trainers sleep"]


def test_a_run_without_engines_moves_nothing(make):
    _, trainers, engines, moves = make()
    words = "--hf-checkpoint hf --load l --prompt-data p --num-rollout 1 --rollout-batch-size 2 --loss-type sft_loss"
    settings = parse_train([*words.split(), "--colocate"])
    memory = Handover(settings.kind, trainers, engines, RunConsole(io.StringIO()))
    step(memory)
    assert moves == [] and memory.row() == {}
