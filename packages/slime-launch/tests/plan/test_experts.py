"""The trainer of a plan whose experts are not used evenly."""

import pytest

from support.large_plan import CHOSEN, HIDDEN, LAYERS, WIDTH


def test_experts_that_are_used_unevenly_take_as_much_as_their_rank_can_have(planned_large):
    plan = planned_large()
    even, twice, most = plan["experts"]
    [train] = [one["seconds"] for one in plan["times"] if one["phase"] == "train"]
    assert (even["times"], twice["times"], most["times"]) == (1, 2, 8)  # 16 experts on a rank, and 8 chosen
    assert (even["seconds"], even["memory"]) == (train, plan["trainer"]["total"])
    # Forward, again for memory, and twice as much backward, of three matrices; at 35% of 16 GPUs' peak.
    share = 4 * 256 * 10_240 * LAYERS * CHOSEN * 2 * 3 * HIDDEN * WIDTH / (16 * 989e12 * 0.35)
    assert twice["seconds"] - even["seconds"] == pytest.approx(share, rel=1e-6)
    assert most["seconds"] - even["seconds"] == pytest.approx(7 * share, rel=1e-6)
    assert most["memory"] > twice["memory"] > even["memory"]
    dense = ["--hf-checkpoint", "Qwen/Qwen3-4B", "--load", "Qwen/Qwen3-4B", "--no-optimizer-cpu-offload"]
    assert (
        planned_large(*dense, "--expert-model-parallel-size", "1", "--expert-tensor-parallel-size", "4")["experts"]
        == []
    )
