"""A run begun in one folder stays there, though code of the user's own changes to another."""

from pathlib import Path

import commands
import pytest


@pytest.mark.parametrize("words", [[], ["launcher=local", "devices=2", "strategy=ddp"]], ids=["inline", "local"])
def test_a_relative_out_stays_where_it_was_though_code_changes_the_folder(words: list[str], tmp_path: Path) -> None:
    code = "import os\nimport torch\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n        os.chdir('/')\n        return super().forward(x)\n"
    (tmp_path / "wanders.py").write_text(code)
    base = [
        "model._target_=wanders.Net",
        "model.in_features=64",
        "model.out_features=10",
        "trust=[wanders]",
        "data=synthetic",
        "objective=regression",
    ]
    more = ["steps=4", "checkpoint.every=2", "logger=[console,tensorboard]", "out=runs/a"]
    done = commands.run(*base, *more, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "runs/a"
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 4
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]
    assert (out / "result.json").exists() and not list((out / "lease").glob("*.json.new"))
    assert "removed or cut" not in done.stdout + done.stderr
    assert not Path("/runs").exists()
