"""The README's example runs as it stands."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example(tiny_model, tmp_path):
    [code] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        code = code.replace("port=29500", f"port={probe.getsockname()[1]}")
    model = tiny_model("llama-tied")
    (tmp_path / "model_hf").symlink_to(model.hf_directory)
    (tmp_path / "model_torch_dist").symlink_to(model.checkpoint)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    loss, grad_norm, _ = done.stdout.split(maxsplit=2)
    assert float(loss) == -1.0 and float(grad_norm) > 0
    assert (tmp_path / "run" / "iter_0000001" / "metadata.json").is_file()
