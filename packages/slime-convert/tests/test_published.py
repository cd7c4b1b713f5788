import pytest

from slime_convert.cli import main
from slime_convert.published import PUBLISHED, nearest_published, published_config

# Several releases share a shape, and so a file in scripts/models; each must be found by its name.
RELEASES = [
    *(f"Qwen2.5-{size}" for size in ("0.5B", "1.5B", "3B", "7B", "32B")),
    *(f"Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B")),
    *("GLM-4-9B-0414", "GLM-Z1-9B-0414", "GLM-4-32B-0414", "GLM-Z1-32B-0414"),
    *("GLM-4.5-Air", "GLM-4.5", "GLM-4.6", "GLM-4.7", "GLM-4.7-Flash"),
    *("DeepSeek-V3", "DeepSeek-V3.1", "DeepSeek-R1", "Moonlight-16B-A3B", "Kimi-K2-Base", "Kimi-K2-Instruct"),
    *("Meta-Llama-3-8B", "Meta-Llama-3-70B", "Llama-3.1-8B", "Llama-3.2-3B"),
]


def test_the_table_has_a_line_per_published_shape(capsys):
    assert main(["list-models"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["name", "family", "layers", "hidden"]
    assert [line.split()[0] for line in lines] == list(PUBLISHED)
    line = lines[list(PUBLISHED).index("glm4-9B")]
    cells = [
        "glm4-9B",
        "glm4",
        "40",
        "4096",
        "13696",
        "32",
        "2",
        "-",
        "151552",
        "10000",
        "GLM-4-9B-0414,",
        "GLM-Z1-9B-0414",
    ]
    assert line.split() == cells
    assert "8/128" in lines[list(PUBLISHED).index("qwen3-30B-A3B")].split()
    # Columns stand under their headers' ends.
    assert line.index("4096") + 4 == header.index("hidden") + len("hidden")


def test_each_release_is_named_once(capsys):
    assert main(["list-models"]) == 0
    named = capsys.readouterr().out.replace(",", "").split()
    assert {name: named.count(name) for name in RELEASES} == dict.fromkeys(RELEASES, 1)


@pytest.mark.parametrize("name", ["qwen3-4B", "Qwen3-4B", "Qwen/Qwen3-4B", "qwen/qwen3-4b", "Qwen3-4B-Base"])
def test_a_published_model_is_found_by_each_of_its_names(name):
    assert published_config(name) == PUBLISHED["qwen3-4B"].config


def test_every_published_model_is_found_by_its_makers_name():
    for entry in PUBLISHED.values():
        for model in entry.models.split(", "):
            assert published_config(f"owner/{model}") == entry.config, model
    assert published_config("Qwen/Qwen3-5B") is None and published_config("") is None


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("Qwen3-30B-A3", "qwen3-30B-A3B"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30B-A3B"),
        ("Qwen/Qwen2.5-32B-Instruct-GPTQ", "qwen2.5-32B-Instruct"),
        ("qwen/qwen3-4c", "qwen3-4B"),
        ("llama-3-8b", "llama3-8B"),
        ("qwen3-4B-runs-of-today", None),
        ("gpt2", None),
        ("", None),
    ],
)
def test_the_published_model_that_a_name_may_mean(name, nearest):
    assert nearest_published(name) == nearest
