"""Where ranks and engines of a plan are, and how a rollout is shared out."""

import pytest

from slime_launch.flags import parse_train
from slime_launch.placement import plan_layout
from slime_launch.plan.engines import engine_groups
from slime_launch.plan.layout import place
from support.planning import run

MINIMAL = "--hf-checkpoint hf --load hf --prompt-data p --num-rollout 1 --rollout-batch-size 1"


def test_deltas_without_receivers_are_refused_where_engines_are_on_another_node(words, capsys, flags):
    del flags["--colocate"]
    deltas = "--update-weight-transport disk --update-weight-mode delta --update-weight-disk-dir published"
    more = ["--device", "h100", *deltas.split(), "--rollout-num-gpus", "1"]
    local = ["--update-weight-local-checkpoint-dir", "local"]
    assert run(words(*more, *local, "--gpus-per-node", "2"), capsys)[0] == 0
    code, _, err = run(words(*more, *local, "--gpus-per-node", "1"), capsys)
    assert code == 2 and "give --update-weight-receivers in place of --update-weight-local-checkpoint-dir" in err
    receivers = ["--update-weight-receivers", "node2:9000"]
    assert run(words(*more, *receivers, "--gpus-per-node", "1"), capsys)[0] == 0


def test_a_prompt_that_leaves_no_room_is_refused(words, capsys):
    code, _, err = run(words("--rollout-max-context-len", "4"), capsys)
    assert code == 2 and "a prompt of 4 tokens leaves no room for a response within 4" in err


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        ("--actor-num-gpus-per-node 8 --rollout-num-gpus 4", [(range(8), []), ((), [0, 1])]),
        (
            "--actor-num-nodes 2 --actor-num-gpus-per-node 8 --rollout-num-gpus 2",
            [(range(8), []), (range(8, 16), []), ((), [0])],
        ),
        ("--actor-num-gpus-per-node 4 --rollout-num-gpus 4", [(range(4), [0, 1])]),
        ("--actor-num-gpus-per-node 4 --colocate", [(range(4), [0, 1])]),
    ],
)
def test_nodes_are_filled_one_after_the_other(words, nodes):
    settings = parse_train([*MINIMAL.split(), *words.split(), "--rollout-num-gpus-per-engine", "2"])
    groups = engine_groups(settings, None)
    gpus, cores = (plan_layout(settings.placed, cuda=cuda) for cuda in (True, False))
    found = place(gpus, 8, groups)
    assert [(list(node.trainer_ranks), [engine.number for engine in node.engines]) for node in found] == [
        (list(ranks), engines) for ranks, engines in nodes
    ]
    assert len(place(cores, 8, groups)) == 1
