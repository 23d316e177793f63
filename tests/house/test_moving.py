"""docs/moving.md: each training, in its own tool and here, has the same losses."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import commands
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "moving.md").read_text()
FILES = dict(re.findall(r"```python (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = dict(re.findall(r"```sh (\w+)\n(.*?)```", PAGE, re.DOTALL))
SEEDS = {"distributed": 7}


@pytest.mark.campaign("documents")
@pytest.mark.parametrize("name", ["accelerated", "distributed", "lit", "trained"])
def test_the_losses_are_the_same_in_both_forms(name: str, tmp_path: Path) -> None:
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **(alone if name == "distributed" else {})}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "moved.py"), f"{name}.py", str(SEEDS.get(name, 42))],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    known = json.loads(done.stdout.splitlines()[-1])
    for line in COMMANDS[name].splitlines():
        ran = commands.run(*shlex.split(line)[3:], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
    assert len(known) == 20
    assert [json.loads(row)["loss"] for row in rows] == pytest.approx(known, abs=1e-5)
