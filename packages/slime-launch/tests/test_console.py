import io

from slime_launch.console import RunConsole


def test_plain_lines_go_to_the_stream_and_the_log(tmp_path):
    stream = io.StringIO()
    console = RunConsole(stream, tmp_path / "launch.log")
    console.line("step 1 [reward] 0.5")
    with console.wait("generate", done="generated") as wait:
        wait.update("note", done=1, total=2)
        wait.started -= 1.5
    console.close()
    assert stream.getvalue().splitlines()[0] == "step 1 [reward] 0.5"
    assert stream.getvalue().splitlines()[1].startswith("generated (1.5 s)")
    assert (tmp_path / "launch.log").read_text() == stream.getvalue()


def test_a_short_wait_says_nothing():
    stream = io.StringIO()
    with RunConsole(stream).wait("save", done="saved"):
        pass
    assert stream.getvalue() == ""


def test_a_long_wait_speaks_now_and_then():
    stream = io.StringIO()
    with RunConsole(stream).wait("train") as wait:
        wait.update("shard 1")
        wait.started -= 30
        wait._announced -= 30
        wait.update("shard 2", done=3, total=8)
        wait.update("shard 3")
    assert stream.getvalue().splitlines() == ["  train … 30 s 3/8 shard 2"]
