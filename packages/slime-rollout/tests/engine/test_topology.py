import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import ConfigError
from slime_rollout.engine.topology import WORKER_TYPES, ServedModel, ServerGroup, Topology, read_topology

GOOD = """
sglang:
  - name: actor
    num_gpus_per_engine: 2
    update_weights: true
    server_groups:
      - {worker_type: prefill, num_gpus: 2, overrides: {chunked_prefill_size: 4096, enable-metrics: true}}
      - worker_type: decode
        num_gpus: 4
        num_gpus_per_engine: 4
        overrides:
          mem_fraction_static: 0.8
          cuda_graph_bs: [1, 2, 4]
          json-model-override-args: {rope_theta: 10000}
          disable_radix_cache: false
      - {worker_type: placeholder, num_gpus: 1}
  - name: judge
    model_path: path/to/judge
    engine_groups: [{num_gpus: 1}]
"""


@pytest.fixture
def read(tmp_path):
    def write(text):
        path = tmp_path / "engines.yaml"
        path.write_text(text)
        return read_topology(str(path))

    return write


def test_all_that_a_file_may_say(read):
    assert read(GOOD) == Topology(
        models=(
            ServedModel(
                name="actor",
                num_gpus_per_engine=2,
                update_weights=True,
                server_groups=(
                    ServerGroup(
                        worker_type="prefill",
                        num_gpus=2,
                        overrides={"chunked-prefill-size": "4096", "enable-metrics": True},
                    ),
                    ServerGroup(
                        worker_type="decode",
                        num_gpus=4,
                        num_gpus_per_engine=4,
                        overrides={
                            "mem-fraction-static": "0.8",
                            "cuda-graph-bs": ("1", "2", "4"),
                            "json-model-override-args": '{"rope_theta": 10000}',
                            "disable-radix-cache": False,
                        },
                    ),
                    ServerGroup(worker_type="placeholder", num_gpus=1),
                ),
            ),
            ServedModel(name="judge", model_path="path/to/judge", server_groups=(ServerGroup(num_gpus=1),)),
        )
    )
    assert read(GOOD).num_gpus == 8


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (GOOD, "", "the file is None; give `name: value` lines with sglang"),
        (GOOD, "- a", "the file is"),
        (GOOD, "sglang: []", "the file: sglang is []; give a list with at least one entry"),
        (GOOD, "sglang: [{", "line 1: invalid YAML: "),
        ("sglang:", "sgland:", "the file: sgland is not a key; did you mean sglang?"),
        (
            "    update_weights:",
            "    update_weight:",
            "model actor: update_weight is not a key; did you mean update_weights",
        ),
        (
            "{worker_type: prefill,",
            "{type: prefill,",
            "model actor, group 1: type is not a key; ",
        ),
        (
            "worker_type: decode",
            "worker_type: decoder",
            "model actor, group 2: worker_type decoder is unknown; ",
        ),
        ("num_gpus: 4\n", "num_gpus: 0\n", "model actor, group 2: num_gpus is 0; give a whole number, 1 or more"),
        ("num_gpus: 4\n", "num_gpus: four\n", "model actor, group 2: num_gpus is 'four'; give a whole number"),
        ("num_gpus: 4\n", "num_gpus: true\n", "model actor, group 2: num_gpus is True; give a whole number"),
        ("        num_gpus: 4\n", "", "model actor, group 2: num_gpus is missing"),
        (
            "num_gpus: 4\n",
            "num_gpus: 4\n        num_gpus: 2\n",
            "line 10: invalid YAML: the key num_gpus is there",
        ),
        ("num_gpus: 4\n", "num_gpus: 4\n        ? [a]\n        : 1\n", "invalid YAML: found unhashable key"),
        (
            "mem_fraction_static: 0.8\n",
            "mem_fraction_static: 0.8\n          mem-fraction-static: 0.7\n",
            "model actor, group 2: the override mem-fraction-static is given twice",
        ),
        ("update_weights: true", "update_weights: 1", "model actor: update_weights is 1; give true or false"),
        ("name: actor", "name: a/b", "model a/b: name 'a/b' is invalid"),
        ("  - name: actor\n    num", "  - num", "model 1: name is missing"),
        ("name: judge", "name: actor", "two models are called actor"),
        ("worker_type: decode", "worker_type: regular", "prefill and decode groups need each other"),
        ("placeholder, num_gpus: 1}", "regular, num_gpus: 1}", "its router sends requests either to regular groups"),
        ("placeholder, num_gpus: 1}", "placeholder, num_gpus: 1, overrides: {a: 1}}", "a placeholder starts nothing"),
        ("[{num_gpus: 1}]", "[{num_gpus: 1, worker_type: encoder}]", "model judge: no server group generates"),
        ("[{num_gpus: 1}]", "[]", "model judge: server_groups is []; give a list"),
        ("[{num_gpus: 1}]", "[1]", "model judge, group 1 is 1; give `name: value` lines"),
        ("engine_groups", "server_groups: []\n    engine_groups", "server_groups and engine_groups are the same"),
        ("cuda_graph_bs: [1, 2, 4]", "cuda_graph_bs:", "the override cuda_graph_bs is None; give a text, a number"),
        ("cuda_graph_bs: [1, 2, 4]", "cuda_graph_bs: [[1]]", "the override cuda_graph_bs is [[1]]"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(read, tmp_path, old, new, message):
    assert old in GOOD
    with pytest.raises(ConfigError) as caught:
        read(GOOD.replace(old, new, 1))
    assert str(caught.value).startswith(f"--sglang-config {tmp_path / 'engines.yaml'}")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml does not exist; give a YAML file"):
        read_topology(str(tmp_path / "none.yaml"))


@given(st.sets(st.sampled_from(WORKER_TYPES)))
def test_which_groups_make_a_model(types):
    groups = tuple(ServerGroup(worker_type=kind, num_gpus=1) for kind in sorted(types))
    halves, whole = types & {"prefill", "decode"}, "regular" in types
    if (whole and not halves) or (len(halves) == 2 and not whole):
        ServedModel(name="m", server_groups=groups)
    else:
        with pytest.raises(ConfigError):
            ServedModel(name="m", server_groups=groups)
