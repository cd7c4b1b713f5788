"""The devices of a plan: a published one by name, or what this machine has. No torch here."""

from __future__ import annotations

import dataclasses
import difflib
import os
import subprocess

from slime_core.errors import ConfigError
from slime_rollout.engine import PCIE, engine_device

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """A device that a worker computes on.

    Attributes:
        memory: Bytes that a program can have; of a CPU, of all workers of the machine together.
        operations: Dense 16-bit floating-point operations per second at most; of a CPU, of one core.
        bandwidth: Bytes per second between the processor and its memory.
        link: Bytes per second to other devices of its node, in one direction.
        is_cpu: Whether workers share a machine's memory.
        host_memory: Bytes of the memory of a GPU's machine; ``None`` where it is not known.
    """

    name: str
    memory: int
    operations: float
    bandwidth: float
    link: float
    is_cpu: bool = False
    host_memory: int | None = None


def _gpu(name: str, gib: float, tflops: float, gb_per_s: float, link_gb_per_s: float) -> DeviceSpec:
    memory, operations, bandwidth, link = int(gib * GIB), tflops * 1e12, gb_per_s * 1e9, link_gb_per_s * 1e9
    return DeviceSpec(name=name, memory=memory, operations=operations, bandwidth=bandwidth, link=link)


# Memory is what CUDA reports as total, which is less than the number in the name; the other columns are from the
# vendors' data sheets: dense bf16 (V100 and T4: fp16) operations, memory, NVLink or PCIe.
DEVICES = {
    device.name: device
    for device in (
        _gpu("t4", 14.6, 65, 320, 16),
        _gpu("l4", 22.2, 121, 300, 32),
        _gpu("a10", 22.1, 125, 600, 32),
        _gpu("3090", 23.7, 71, 936, 32),
        _gpu("4090", 23.6, 165, 1008, 32),
        _gpu("5090", 31.4, 210, 1792, 64),
        _gpu("v100", 31.7, 125, 900, 150),
        _gpu("a100-40", 39.4, 312, 1555, 300),
        _gpu("l40s", 44.4, 362, 864, 32),
        _gpu("a40", 44.4, 150, 696, 32),
        _gpu("a6000", 47.5, 155, 768, 32),
        _gpu("a100", 79.2, 312, 2039, 300),
        _gpu("a800", 79.2, 312, 2039, 200),
        _gpu("h100", 79.1, 989, 3350, 450),
        _gpu("h800", 79.1, 989, 3350, 200),
        _gpu("h20", 95.1, 148, 4000, 450),
        _gpu("h200", 139.8, 989, 4800, 450),
        _gpu("b200", 178.3, 2250, 8000, 900),
        _gpu("mi300x", 191.5, 1307, 5300, 448),
    )
}
# A core of a CPU, in fp32, and its share of the memory's bandwidth: what the quick start reaches, rounded.
_CPU_OPERATIONS, _CPU_BANDWIDTH = 5e10, 1e10


def run_device() -> str:
    """``"cuda"`` or ``"cpu"``: what a run computes on that is started here.

    That is what this machine has, or another node of the cluster that ``RAY_ADDRESS`` names: the head of a Kubernetes
    cluster seldom has a GPU.
    """
    from slime_launch.cluster import cluster_has_gpus  # which --help does not need

    here, address = engine_device(), os.environ.get("RAY_ADDRESS")
    return "cuda" if here == "cuda" or (address and cluster_has_gpus(address)) else "cpu"


def find_device(name: str | None, memory_gib: float | None) -> DeviceSpec:
    """The device of ``--device``, with the memory of ``--device-memory-gib``; by default what this machine has.

    Raises:
        ConfigError: The name is unknown, or this machine's GPU is not in the table and its memory is unknown.
    """
    device = _here() if name is None else _named(name)
    return device if memory_gib is None else dataclasses.replace(device, memory=int(memory_gib * GIB))


def link_of(cuda: bool) -> float:
    """`DeviceSpec.link` of the devices of a run, as far as this machine, from which it is started, can tell."""
    try:
        device = _here()
    except ConfigError:
        return PCIE
    return device.link if device.is_cpu != cuda else PCIE


def _named(name: str) -> DeviceSpec:
    if name == "cpu":
        return _cpu()
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    near = difflib.get_close_matches(name.lower(), DEVICES, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"--device {name} is unknown; {hint}known: cpu, {', '.join(DEVICES)}; for another, give the nearest of them "
        "and --device-memory-gib"
    )


def _here() -> DeviceSpec:
    if run_device() == "cpu":
        return _cpu()
    if engine_device() == "cpu":
        raise ConfigError("the GPUs of the Ray cluster are on other machines than this one; give --device NAME")
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]  # not run on CUDA
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        title, mebibytes = answer.splitlines()[0].rsplit(",", 1)
        return dataclasses.replace(described(title, int(mebibytes) * 2**20), host_memory=machine_memory())
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise ConfigError(
            f"nvidia-smi does not say which GPU this machine has ({error}); give --device NAME"
        ) from error


def described(title: str, memory: int) -> DeviceSpec:
    """A device by the name that its driver gives, such as ``NVIDIA H100 80GB HBM3``, and its memory in bytes."""
    words = title.lower().replace("-", " ").split()
    known = [device for device in DEVICES.values() if device.name.split("-")[0] in words]
    nearest = min(known or DEVICES.values(), key=lambda device: abs(device.memory - memory))
    return dataclasses.replace(nearest, name=title.strip(), memory=memory)


def machine_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu() -> DeviceSpec:
    return DeviceSpec(
        name="cpu",
        memory=machine_memory(),
        operations=_CPU_OPERATIONS,
        bandwidth=_CPU_BANDWIDTH,
        link=_CPU_BANDWIDTH / 4,
        is_cpu=True,
    )
