from slime_convert.cli import main
from slime_convert.published import PUBLISHED


def test_the_table_has_a_line_per_published_shape(capsys):
    assert main(["list-models"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["script", "family", "layers", "hidden"]
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
