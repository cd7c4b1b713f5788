"""Other ways to run a command: each is planned as it is given."""

import re

import pytest

from support.large_plan import RUN


def test_an_alternative_has_the_figures_of_its_own_plan(planned_large, tmp_path):
    first, second = planned_large()["alternatives"]
    assert first["change"] == "without --optimizer-cpu-offload"
    assert second["change"] == "without --recompute-granularity, --recompute-method, --recompute-num-layers"
    for alternative, gone in ((first, r"optimizer-cpu-offload.*\n"), (second, r"recompute-.*\n")):
        (tmp_path / "run.toml").write_text(re.sub(gone, "", RUN))
        plan = planned_large()
        assert alternative["cost"]["memory"] == plan["trainer"]["total"]
        assert alternative["cost"]["seconds"] == pytest.approx(plan["run"]["seconds"], abs=0.06)
        assert alternative["cost"]["gpu_hours"] == pytest.approx(plan["run"]["gpu_hours"], abs=0.06)
    (tmp_path / "run.toml").write_text(RUN)
    out = planned_large(text=True)
    assert re.search(
        r"without --optimizer-cpu-offload +48\.8 GiB of 79\.1 GiB in a step +a rollout 5\.5 s shorter", out
    )


def test_other_numbers_of_nodes_are_planned_where_nothing_else_is_faster(planned_large):
    found = planned_large("--no-optimizer-cpu-offload", "--recompute-num-layers", "2")["alternatives"]
    fewer = next(one for one in found if one["change"] == "--actor-num-nodes 1")
    plan = planned_large("--no-optimizer-cpu-offload", "--recompute-num-layers", "2", "--actor-num-nodes", "1")
    assert fewer["cost"]["gpus"] == 8
    assert fewer["cost"]["seconds"] == pytest.approx(plan["run"]["seconds"], abs=0.06)


def test_an_alternative_that_does_not_fit_is_none(planned_large):
    found = planned_large("--device-memory-gib", "60")
    assert found["trainer"]["total"] < 60 * 2**30
    assert not [one for one in found["alternatives"] if one["cost"]["memory"] > 60 * 2**30]
    assert "without --optimizer-cpu-offload" in [one["change"] for one in found["alternatives"]]
    small = planned_large("--device-memory-gib", "40", "--sglang-mem-fraction-static", "0.6")["alternatives"]
    assert "without --optimizer-cpu-offload" not in [one["change"] for one in small]


def test_generating_ahead_is_an_alternative_of_a_run_that_takes_turns(planned_large, tmp_path):
    (tmp_path / "run.toml").write_text(RUN.replace("colocate = true", "rollout-num-gpus = 16"))
    ahead = next(one for one in planned_large()["alternatives"] if one["change"] == "--async-buffer-size 1")
    plan = planned_large("--async-buffer-size", "1")
    assert ahead["cost"]["seconds"] == pytest.approx(plan["run"]["seconds"], abs=0.06)
