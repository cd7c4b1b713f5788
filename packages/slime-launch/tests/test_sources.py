"""Rollouts that come from files."""

from slime_launch.flags import parse_train
from slime_launch.sources import RecordedRollouts, RecordedSpec, make_source


def test_recorded_rollouts_need_no_data(flags, to_words, tmp_path):
    del flags["--prompt-data"]
    settings = parse_train(to_words(flags | {"--load-debug-rollout-data": "{rollout_id}.npz"}))
    assert settings.kind.is_recorded and not settings.kind.generates
    assert isinstance(make_source(RecordedSpec("{rollout_id}.npz")), RecordedRollouts)
