import pytest

from slime_core.errors import ConfigError
from slime_rollout.engine.config import EngineConfig

DISK = {"update_weight_transport": "disk", "update_weight_disk_dir": "a"}
LOCAL = {"update_weight_local_checkpoint_dir": "b"}
FAR = {"update_weight_receivers": ("h:1",)}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"update_weight_mode": "half"}, "--update-weight-mode half is unknown; allowed: full, delta"),
        ({"update_weight_transport": "mail"}, "transport mail is unknown; allowed: tensor, nccl, gloo, disk"),
        ({"update_weight_pause_mode": "abort"}, "pause-mode abort is unknown; allowed: retract, in_place"),
        *(
            ({"update_weight_timeout": seconds}, f"--update-weight-timeout {seconds} must be .*above 0")
            for seconds in (0.0, -1.0, float("nan"), float("inf"))
        ),
        ({"update_weight_transport": "disk"}, "disk needs --update-weight-disk-dir"),
        ({"update_weight_mode": "delta"}, r"give --update-weight-transport disk \(got tensor\)"),
        ({**DISK, "update_weight_mode": "delta"}, "delta needs --update-weight-local-checkpoint-dir"),
        ({**DISK, "update_weight_mode": "delta", "update_weight_local_checkpoint_dir": "./a"}, "another directory"),
        ({**DISK, "update_weight_mode": "delta", "update_weight_local_checkpoint_dir": "b/../a"}, "another directory"),
        ({**DISK, **LOCAL, **FAR, "update_weight_mode": "delta"}, "give one of them"),
        ({**DISK, **FAR}, "receivers means something only with --update-weight-mode delta"),
        ({"update_weight_disk_dir": "a"}, "disk-dir means something only with --update-weight-transport disk"),
        ({"update_weight_disk_keep_files": True}, "keep-files means something only with"),
        ({**DISK, **LOCAL}, "local-checkpoint-dir means something only with --update-weight-mode delta"),
    ],
)
def test_what_cannot_work_is_said_in_a_line(flags, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**flags)


def test_what_works():
    EngineConfig(**DISK, update_weight_disk_keep_files=True)
    EngineConfig(**DISK, **FAR, update_weight_mode="delta")
    assert EngineConfig(**DISK, **LOCAL, update_weight_mode="delta").update_weight_pause_mode == "retract"
