"""A weight transport is a class and a row: shown with one that is planted, and by looking for names elsewhere."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import slime_launch
import slime_rollout
from slime_rollout.engine.transports import FULL, MODES, names

ROW = """
    Transport(
        name="pigeon",
        channel="slime_rollout.weights.pigeon:PigeonWeightChannel",
        seconds=lambda route: 1e-6 * route.engines,
        limit=lambda config, route: "flies to nine engines at most" if route.engines > 9 else None,
        within_machine=True,
        with_colocate="nests on no GPU twice",
    ),"""
CLASS = """
from slime_rollout.weights.channel import EngineChannel


class PigeonWeightChannel(EngineChannel):
    def _send(self, bucket):
        return 0

    def close(self):
        pass
"""
ASKED = """
import contextlib, dataclasses, io, json, sys
from slime_core.errors import SlimeError
from slime_launch.cli import main
from slime_launch.placement import check_transport
from slime_rollout.engine.channels import ChannelSpec
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.transports import Route, in_words, ways_of

def problem_of(call, *given):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            call(*given)
        except SlimeError as error:
            return str(error)
    return said.getvalue()

def plan(words):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        main(["plan", "--json", *words])
    return json.loads(said.getvalue())

together, apart = json.loads(sys.argv[1])
route = Route(engines=2, within_node=True, cuda=False, shared=False)
flag = ["--update-weight-transport", "pigeon"]
given = EngineConfig(update_weight_transport="pigeon")
urls = ("http://10.0.0.1:1", "http://10.0.0.2:1")
spec = ChannelSpec(urls, sync=given)
nodes = {"a": "10.0.0.1", "b": "10.0.0.2"}
print(json.dumps({
    "refused": problem_of(main, ["plan", *apart, "--update-weight-transport", "carrier"]),
    "colocated": problem_of(main, ["plan", *together, *flag]),
    "auto": check_transport(EngineConfig(), route).name,
    "many": problem_of(check_transport, given, dataclasses.replace(route, engines=10)),
    "far": problem_of(check_transport, given, dataclasses.replace(route, within_node=False)),
    "said": in_words(ways_of(EngineConfig(update_weight_transport="gloo"), route)),
    "plan": [row for row in plan([*apart, *flag])["transports"] if row["chosen"]],
    "shared": [row for row in plan(together)["transports"] if row["name"] == "pigeon"],
    "channel": type(spec.open()).__name__,
    "senders": {rank: one.engine_urls for rank, one in spec.by_rank(["a", "b"], lambda: nodes).items()},
}))
"""


@pytest.fixture
def answers(tmp_path, flags, to_words):
    """What a launcher answers that finds a slime-rollout with one class and one row more."""
    home = tmp_path / "planted" / "slime_rollout"
    shutil.copytree(Path(slime_rollout.__file__).parent, home, ignore=shutil.ignore_patterns("__pycache__"))
    (home / "weights" / "pigeon.py").write_text(CLASS)
    table = home / "engine" / "transports.py"
    before, start, after = table.read_text().partition("\nTRANSPORTS = (")
    table.write_text(before + start + ROW + after)
    (tmp_path / "ask.py").write_text(ASKED)
    apart = {name: value for name, value in flags.items() if name != "--colocate"} | {"--rollout-num-gpus": "1"}
    words = json.dumps([to_words(flags), to_words(apart)])
    path = os.pathsep.join([str(home.parent), *sys.path[1:], os.environ["PYTHONPATH"]])
    command = [sys.executable, str(tmp_path / "ask.py"), words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_planted_transport_is_known_wherever_it_matters(answers):
    assert "choose from 'auto', 'pigeon', 'tensor', 'nccl', 'gloo', 'disk'" in answers["refused"]
    assert "pigeon does not work with --colocate: PIGEON nests on no GPU twice; leave it out" in answers["colocated"]
    assert answers["auto"] == "pigeon"
    assert "transport pigeon flies to nine engines at most; leave it out, or give tensor" in answers["many"]
    assert "pigeon works within one machine, and engines are on other nodes" in answers["far"]
    assert "(pigeon 2e-06 s, tensor" in answers["said"]
    [row] = answers["plan"]
    assert (row["name"], row["seconds"], row["problem"]) == ("pigeon", 1e-6, None)
    [row] = answers["shared"]
    assert row["problem"] == "nests on no GPU twice, as --colocate has it"
    assert answers["channel"] == "PigeonWeightChannel"
    assert answers["senders"] == {"0": ["http://10.0.0.1:1"], "1": ["http://10.0.0.2:1"]}


KNOW_NAMES = {
    "slime_rollout/engine/transports.py": "the table",
    "slime_rollout/weights/buckets.py": "classes of transports",
    "slime_rollout/engine/sglang_flags.py": "a flag of SGLang's own, about its ranks",
    "slime_launch/calls.py": "what torch says where trainer ranks lose each other",
}


def names_in(file, words):
    """Lines of a file where a text in its code is a transport's name, or has one of torch's backends in it."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [
        node.lineno
        for node in texts
        if id(node) not in docstrings and (node.value in words or re.search(r"\b(nccl|gloo)\b", node.value, re.I))
    ]


def test_only_the_table_and_the_classes_name_a_transport():
    words = {*names(), *MODES} - {FULL}
    assert {"tensor", "nccl", "gloo", "disk", "delta"} <= words
    found = {}
    for package in (slime_rollout, slime_launch):
        root = Path(package.__file__).parent
        for file in root.rglob("*.py"):
            if lines := names_in(file, words):
                found[str(file.relative_to(root.parent))] = lines
    assert {file: lines for file, lines in found.items() if file not in KNOW_NAMES} == {}
    assert found.keys() == KNOW_NAMES.keys()  # no exception that nothing needs
