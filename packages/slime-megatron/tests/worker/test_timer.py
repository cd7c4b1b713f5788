"""Wall time, tokens and operations by phase."""

import types

import pytest

from slime_megatron.worker.timer import PhaseTimer, peak_tflops


def test_a_phase_adds_up_and_is_a_span():
    waited, spans = [], []
    flops = types.SimpleNamespace(packed=lambda tokens, pairs, logits: tokens + pairs + logits)
    timer = PhaseTimer(lambda: waited.append(1), flops, spans, "rank 3")
    packed = types.SimpleNamespace(computed_tokens=4, computed_pairs=10)
    for passes in (1, 3):
        with timer.phase("log_probs"):
            timer.count("log_probs", packed, logits=2, passes=passes)
    assert len(waited) == 2  # for the device's queued work
    assert (timer.tokens["log_probs"], timer.operations["log_probs"]) == (8, 16 + 3 * 16)
    assert [(span.who, span.what) for span in spans] == [("rank 3", "log_probs")] * 2
    assert timer.seconds["log_probs"] == sum(span.seconds for span in spans)


@pytest.mark.parametrize(
    ("device", "peak"),
    [("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA H20", 148.0), ("NVIDIA H200", 989.4),
     ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA GeForce RTX 2080", None)],
)  # fmt: skip
def test_the_peak_of_a_device(device, peak):
    assert peak_tflops(device) == peak
