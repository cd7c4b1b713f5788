"""Devices by their names, and by what a driver says."""

import pytest

from slime_core.errors import ConfigError
from slime_launch.devices import DEVICES, described, find_device


def test_devices_are_found_by_name_and_by_what_a_driver_says():
    assert find_device("H100", None) is DEVICES["h100"]
    assert find_device("h100", 64).memory == 64 * 2**30
    assert find_device("cpu", None).is_cpu
    with pytest.raises(ConfigError, match="did you mean h100"):
        find_device("h1000", None)
    assert described("NVIDIA A100-SXM4-40GB", 40 * 2**30).bandwidth == DEVICES["a100-40"].bandwidth
    assert described("NVIDIA H100 80GB HBM3", 80 * 2**30).operations == DEVICES["h100"].operations
