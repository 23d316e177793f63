"""Hooks and loggers of one's own: what they get, when they are called, what becomes of what they return; they change no number."""

import json
import textwrap
from pathlib import Path

import commands
import pytest

MINE = textwrap.dedent("""
    import json, os
    import torch
    from torch import nn
    import dtrain


    class Net(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, width), nn.Linear(width, 1)])
            self.dropout = nn.Dropout(0.1)
            self.register_buffer("seen", torch.ones(3, dtype=torch.bool))

        def forward(self, x):
            return self.layers[1](self.dropout(torch.relu(self.layers[0](x))))


    class Sums:
        def __len__(self):
            return 40

        def __getitem__(self, i):
            x = torch.randn(4, generator=torch.Generator().manual_seed(i))
            return x, x.sum(0, keepdim=True)


    class Looks:
        def __init__(self, every=1):
            self.every = every

        def __call__(self, info):
            model, x = info.model(), torch.ones(2, 4)
            assert not model.training and not any(p.requires_grad for p in model.parameters())
            assert {name: list(one.shape) for name, one in info.weights().items()}["layers.0.weight"] == [8, 4]
            assert torch.allclose(model(x), info.forward(x).cpu(), atol=1e-6)
            with torch.no_grad():
                next(model.parameters()).zero_()
            torch.randn(3)
            return {"norm_of_model": sum(p.norm() for p in info.weights().values() if p.is_floating_point())}


    class Ends:
        every = "epoch"

        def __call__(self, info):
            return {"epochs": info.epoch, "at": info.step}


    def peek(info):
        return {"step_seen": info.seen}


    def write(step, row):
        with open("written", "a") as file:
            file.write(json.dumps([step, row.get("loss")]) + chr(10))


    WORDS = ("objective=regression", "model.width=8", "steps=9", "batch=10", "evaluate.samples=8")
""")


@pytest.mark.parametrize("words", [(), ("devices=2", "strategy=fsdp"), ("devices=2", "strategy=zero2")])
def test_hooks_get_whole_copies_of_the_model_and_epochs_and_bend_nothing(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    passed = "hook=[Looks, Ends(), peek], logger=write"
    source = (
        f"{MINE}\nif __name__ == '__main__':\n"
        f"    dtrain.run(*WORDS, *{words!r}, 'hook=[]', 'logger=[]', model=Net, data=Sums(), out='plain')\n"
        f"    dtrain.run(*WORDS, *{words!r}, 'hook.Looks.every=3', 'hook=[]', 'logger=[]', model=Net, data=Sums(), out='hooked', {passed})\n"
    )
    (tmp_path / "mine.py").write_text(source)
    ran = commands.python(str(tmp_path / "mine.py"), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr

    def rows(out: str, name: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in (tmp_path / out / name).read_text().splitlines()]

    losses = [[row["loss"] for row in rows(out, "metrics.jsonl")] for out in ("plain", "hooked")]
    assert losses[0] == losses[1]
    events = rows("hooked", "events.jsonl")
    called = {name: [event["step"] for event in events if event["event"] == name] for name in ("looks", "ends", "peek")}
    assert called == {"looks": [3, 6, 9], "ends": [4, 8, 9], "peek": [*range(1, 10)]}
    assert [event["epochs"] for event in events if event["event"] == "ends"] == [1, 2, 2]
    assert [step for step, _ in map(json.loads, (tmp_path / "written").read_text().splitlines())][-1] == 9


def test_the_hook_of_the_page_is_called(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/own-parts.md").read_text("utf-8").split("**What a hook gets.**")[1]
    block = page.split("```python\n")[1].split("```")[0]
    ran = commands.python("-c", f"{MINE}\nwords = (*WORDS, 'out=run')\n{block}", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    events = map(json.loads, (tmp_path / "run/events.jsonl").read_text().splitlines())
    (called,) = (event for event in events if event["event"] == "watch")
    assert (called["step"], called["epochs"]) == (9, 2) and called["first"] > 0
    assert "9 {" in ran.stdout
