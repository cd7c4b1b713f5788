"""What goes over a network in plain text is said by `plan`, for each part that does."""

import json

import pytest

from slime_launch.cli import main
from slime_launch.plain_text import BETWEEN_NODES

WORDS = (
    "plan grpo --hf-checkpoint {0}/hf --load {0}/dist --prompt-data {0}/train.jsonl --label-key label "
    "--num-rollout 1 --rollout-batch-size 2 --n-samples-per-prompt 2 --rollout-max-response-len 8 "
    "--advantage-estimator grpo --json"
)
FAR = "192.0.2.1"  # of documentation, by RFC 5737: nobody's


@pytest.fixture
def notes(workspace, capsys, monkeypatch):
    """The lines of a plan about plain text."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def of(*words):
        main([*WORDS.format(workspace).split(), *words])
        notices = json.loads(capsys.readouterr().out)["notices"]
        return [line for line in notices if "in plain text" in line]

    return of


@pytest.mark.usefixtures("tokenizer")
def test_a_run_on_one_machine_sends_nothing_over_a_network(notes):
    assert notes("--rollout-num-gpus", "1", "--rm-type", "remote_rm", "--rm-url", "http://127.0.0.1:9/score") == []
    assert notes("--rollout-external-engine-addrs", "127.0.0.1:30000", "--rm-type", "math") == []


@pytest.mark.usefixtures("tokenizer")
def test_services_elsewhere(notes):
    given = ["--rollout-num-gpus", "1", "--rm-type", "remote_rm", "--rm-url"]
    [line] = notes(*given, f"http://me:word@{FAR}:9/score?key=abcdefgh12345678")
    assert FAR in line and "--rm-url" in line and "https://" in line and "word" not in line and "abcdefgh" not in line
    assert notes(*given, f"https://{FAR}:9/score") == []
    [line] = notes("--rollout-external-engine-addrs", f"{FAR}:30000", "127.0.0.1:3", "--rm-type", "math")
    assert f"http://{FAR}:30000:" in line and "127.0.0.1" not in line and "ssh -L" in line


@pytest.mark.usefixtures("tokenizer")
def test_nodes_tell_each_other_in_plain_text(notes, monkeypatch):
    given = ["--rollout-num-gpus", "1", "--rm-type", "math"]
    assert notes(*given, "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "8", "--device", "h100") == [
        BETWEEN_NODES
    ]
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    assert notes(*given) == [BETWEEN_NODES]
