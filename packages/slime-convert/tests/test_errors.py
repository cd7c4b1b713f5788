"""Errors of slime-convert."""

import pytest

from slime_convert import hf_to_torch_dist, torch_dist_to_hf
from slime_convert.errors import (
    ConvertError,
)


def test_every_error_is_ours(tmp_path):
    with pytest.raises(ConvertError):
        hf_to_torch_dist(tmp_path / "none", tmp_path / "td")
    with pytest.raises(ConvertError):
        torch_dist_to_hf(tmp_path / "none", tmp_path / "hf", tmp_path / "none")
    assert not any(tmp_path.iterdir())
