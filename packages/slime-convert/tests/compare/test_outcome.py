import pytest
import torch

from slime_convert import verify
from support.family_models import weights_of, write_model

QUERY = "model.layers.1.self_attn.q_proj.weight"


def write_hf(path, weights, origin):
    """A directory in one file with another one's config."""
    return write_model(path, weights, origin / "config.json")


@pytest.fixture(scope="module")
def td(one_converted):
    """The ``torch_dist`` checkpoint of ``one_origin``. Not to be changed."""
    return one_converted


def test_another_shape_is_told_and_the_worst_comes_first(one_origin, td, tmp_path):
    weights = weights_of(one_origin)
    weights["model.norm.weight"] = weights["model.norm.weight"][:7]
    weights[QUERY] = weights[QUERY] + 1
    weights["model.layers.0.self_attn.o_proj.weight"] += 9
    changed = write_hf(tmp_path / "changed", weights, one_origin)
    for other in (one_origin, td):
        found = verify(other, changed)
        assert [(d.kind, d.name.split(".")[-2]) for d in found.differences] == [
            ("shape", "norm"),
            ("values", "o_proj"),
            ("values", "q_proj"),
        ]
        assert (found.differences[0].left.shape, found.differences[0].right.shape) == ((24,), (7,))
    lines = found.to_text().splitlines()
    assert lines[-1].startswith("different: 33 equal, 1 shape, 2 values (") and "bfloat16 24" in lines[4]


def test_kinds_of_differences_are_in_order_of_what_they_mean(tmp_path, one_origin):
    """From what no tolerance allows down to what changes no value; within a kind the larger difference first."""
    step = 2.0**-12
    left = {name: torch.ones(2) for name in ("a", "b", "c", "d", "e", "gone")}
    right = {
        "a": torch.ones(2, dtype=torch.bfloat16),
        "b": torch.tensor([1.0, 1.0 + 2**-40], dtype=torch.float64),
        "c": torch.full((2,), 1 + step),
        "d": torch.full((2,), 1 + 2 * step),
        "e": torch.ones(3),
        "new": torch.ones(2),
    }
    found = verify(write_hf(tmp_path / "left", left, one_origin), write_hf(tmp_path / "right", right, one_origin))
    kinds = ["shape e", "missing gone", "extra new", "values d", "values c", "rounding b", "dtype a"]
    assert [f"{one.kind} {one.name}" for one in found.differences] == kinds


def test_long_lists_are_cut_in_text_only(one_origin, tmp_path):
    weights = {name: tensor + 1 for name, tensor in weights_of(one_origin).items()}
    found = verify(one_origin, write_hf(tmp_path / "all", weights, one_origin))
    assert "and 16 more, which --json lists" in found.to_text() and len(found.to_json()["differences"]) == 36
