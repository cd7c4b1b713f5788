"""A fleet of two engines that are up in a moment and fail in every way, with the real router before them."""

import contextlib
import itertools
import os
import sys
import time
from pathlib import Path

import torch

from slime_core.types import WeightUpdate
from slime_rollout.engine import WeightSyncError
from slime_rollout.engine.channels import ChannelSpec
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.fleet import EngineFleet
from slime_rollout.engine.slots import read_events
from slime_rollout.http import HttpError, call
from slime_rollout.supervise import reaper

# A loaded machine holds a healthy engine up for 2 s now and then: the limit is well above.
INTERVAL, TIMEOUT = 0.2, 4.0
# What a loaded machine may add to any of the limits.
MARGIN = 15.0
VERSIONS = itertools.count(1)
ENGINE = Path(__file__).with_name("fake_engine.py")
PYTHON = """#!/bin/sh
[ "$1" = -c ] && echo /nowhere/sglang/__init__.py && exit
exec {python} -I -S {engine} "$@"
"""


class Fleet:
    """A fleet of two, with what a test asks of it."""

    def __init__(self, directory, **settings):
        self.logs, self.model = directory / "logs", directory / "model"
        self.model.mkdir()
        python = directory / "python"
        python.write_text(PYTHON.format(python=sys.executable, engine=ENGINE))
        python.chmod(0o755)
        defaults = {
            "use_fault_tolerance": True,
            "rollout_health_check_interval": INTERVAL,
            "rollout_health_check_timeout": TIMEOUT,
            "rollout_max_restarts": 50,
            "router_policy": "round_robin",
        }
        self.config = EngineConfig().adapted(sglang_python=str(python), **defaults | settings)
        self.before = set(self.children())

    def start(self, on_progress=None):
        self.fleet = EngineFleet.start(
            self.config,
            model_path=str(self.model),
            num_engines=2,
            dtype="float32",
            context_length=None,
            seed=0,
            log_dir=self.logs,
            device="cpu",
            on_progress=on_progress,
        )
        return self

    def children(self):
        """Without torch's helper for shared memory, which ends with this process."""
        pids = [process.pid for process in reaper.descendants(os.getpid())]
        return [pid for pid in pids if "torch_shm_manager" not in command(pid)]

    def left(self):
        return set(self.children()) - self.before

    def events(self, name=None, since=0):
        events = read_events(self.logs)[since:]
        return [event["event"] for event in events if name in (None, event["engine"])]

    def now(self):
        return len(read_events(self.logs))

    def wait_for(self, name, event, *, since):
        return wait_until(lambda: event in self.events(name, since), what=f"{event} of {name}")

    def workers(self):
        try:
            return set(self.fleet._router.process.workers())
        except HttpError:
            return set()

    def signal(self, name, signum):
        """Send a signal to all processes of an engine or the router; returns their ids."""
        pids = wait_until(lambda: self.fleet.process_ids()[name], what=f"the processes of {name}")
        for pid in pids:
            os.kill(pid, signum)
        return pids

    def url(self, number):
        return self.fleet._engines[number].url

    def behave(self, number, **what):
        call("POST", f"{self.url(number)}/behave", what)

    def generate(self, milliseconds=1):
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": milliseconds}}
        return call("POST", f"{self.fleet.router_url}/generate", body, attempts=8)

    def update(self, version, *, only_behind=False):
        urls = self.fleet.begin_update(only_behind=only_behind)
        for url in urls:
            call("POST", f"{url}/update_weight_version", {"new_version": str(version)})
        self.fleet.confirm_update(version)
        return urls

    def push(self, version):
        """Send weights as the launcher does; returns to whom it sent them in the end."""
        while True:
            urls = self.fleet.begin_update()
            channel = ChannelSpec(tuple(urls), sync=self.config).open()
            try:
                channel.begin(WeightUpdate(version=version))
                channel.send([("weight", torch.ones(2))])
                channel.end()
            except WeightSyncError as error:
                assert self.fleet.fail_update(error.silent), error
                continue
            finally:
                channel.close()
            self.fleet.confirm_update(version)
            return urls

    def whole(self):
        wait_until(lambda: not self.fleet.not_serving(), what="a whole fleet")
        wait_until(lambda: self.workers() == {self.url(0), self.url(1)}, what="a router that knows no others")


def command(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def wait_until(condition, seconds=MARGIN + INTERVAL + TIMEOUT, what="what was waited for"):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come within {seconds} s"
        time.sleep(0.02)
    return value


@contextlib.contextmanager
def running(directory, **settings):
    fleet = Fleet(directory, **settings)
    try:
        yield fleet.start()
    finally:
        with contextlib.suppress(AttributeError):  # it did not come up
            fleet.fleet.stop()
        wait_until(lambda: not fleet.left(), what="the end of all processes")
