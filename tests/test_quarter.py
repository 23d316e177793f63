"""The quarter of an hour on a GPU: what ends it or a cell of it costs that cell alone, and a second call goes on. And the bar: its variants compute the same."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu import cells, figures, loops, profiled, quarter
from gpu.cells import Cell
from launching import mentioning
from until import until

from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.resolve import resolve

ROOT = Path(__file__).parents[1]
COMMAND = """
import json, sys
from tests.gpu import quarter
from tests.gpu.cells import Cell
rows = json.loads(sys.argv[1])
quarter.cells = lambda on, devices, kept: [Cell(**row) for row in rows]
sys.exit(quarter.command(["on=cpu", *sys.argv[2:]]))
"""
TINY = {**cells.SHAPES["tiny"], "vocab": 96, "kv_heads": 2, "width": 32, "hidden": 48, "sequence": 12, "on": "cpu"}


class Quarter:
    """The command with cells of its own, in a folder of its own. `cell`: what one does, in shell, after it has printed its name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.cells = folder, folder / "out", list[dict[str, Any]]()

    def cell(self, name: str, does: str = "", *, most: float = 60.0, **facts: Any) -> None:
        command = ("/bin/sh", "-c", f"cd {self.folder}; echo {name} >> ran; echo {name}; {does}")
        self.cells.append({"name": name, "decides": "", "seconds": 0.0, "most": most, "command": command, **facts})

    def begin(self, *words: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", COMMAND, json.dumps(self.cells), f"out={self.out}", *words]
        return subprocess.Popen(
            command, cwd=self.folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
        )

    def run(self, *words: str) -> tuple[int, str]:
        process = self.begin(*words)
        printed, _ = process.communicate(timeout=60)
        return process.returncode, printed

    def ran(self) -> Counter[str]:
        page = self.folder / "ran"
        return Counter(page.read_text().split() if page.exists() else ())

    def lines(self) -> Counter[str]:
        return Counter(entry["line"] for entry in quarter.entries(self.out / "cells.jsonl") if "line" in entry)

    def ends(self) -> dict[str, str]:
        return {name: cell["end"] for name, cell in json.loads((self.out / "figures.json").read_text()).items()}


@pytest.fixture
def small(tmp_path: Path) -> Quarter:
    return Quarter(tmp_path)


def test_cut_at_every_cell_it_goes_on_with_that_cell_and_loses_no_line(small: Quarter) -> None:
    names, signals = ["a", "b", "c", "d"], [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    for name in names:
        small.cell(name, f"until test -e free-{name}; do sleep 0.05; done")
    for name, number in zip(names, signals, strict=True):
        process = small.begin()
        until(lambda name=name: small.out.exists() and small.lines()[name] == 1)
        process.send_signal(number)
        process.communicate(timeout=60)
        until(lambda: not mentioning(f"cd {small.folder}"))
        assert number == signal.SIGKILL or small.ends()[name] == "cut"
        (small.folder / f"free-{name}").touch()
        for page in small.out.iterdir():  # the next call need not find them
            page.unlink()
    code, _ = small.run()
    assert code == 0
    assert small.ran() == small.lines() == dict.fromkeys(names, 2)
    assert small.ends() == dict.fromkeys(names, "done")
    assert small.run()[0] == 0 and small.ran() == dict.fromkeys(names, 2), "nothing is left to do"


def test_a_cell_that_fails_crashes_or_hangs_costs_itself_with_all_that_it_began(small: Quarter) -> None:
    small.cell("fails", "exit 3")
    small.cell("crashes", "kill -SEGV $$")
    small.cell("hangs", f"setsid sh -c '(sleep 98700; cd {small.folder}) & sleep 98701' & sleep 98702", most=1.5)
    small.cell("leaves", f"setsid sh -c 'sleep 98703; cd {small.folder}' >/dev/null 2>&1 &")
    small.cell("passes", """echo '{"name": "it", "ms": 2.5}'""")
    code, printed = small.run()
    assert code == 1 and '"ms": 2.5' in printed
    ends = {"fails": "failed", "crashes": "failed", "hangs": "over its limit", "leaves": "done", "passes": "done"}
    assert small.ends() == ends
    assert not mentioning(f"cd {small.folder}") and not any(mentioning(f"sleep 9870{number}") for number in range(4))
    assert re.search(r"\| passes \| done \| \d+ \| name it, ms 2.5 \|", (small.out / "figures.md").read_text())
    assert small.run()[0] == 1
    again = (small.folder / "ran").read_text().split()[5:]
    assert again == ["fails", "crashes", "hangs"], "once more, those that had an end alone"


def test_what_failed_comes_after_what_never_ended(small: Quarter) -> None:
    small.cell("fails", "exit 1")
    small.cell("long", seconds=50.0)
    code, printed = small.run("seconds=40")
    assert code == 1 and "for the next call: long" in printed
    small.run("seconds=60")
    assert (small.folder / "ran").read_text().split() == ["fails", "long", "fails"]


def test_its_own_seconds_cut_a_cell_which_is_run_again(small: Quarter) -> None:
    small.cell("slow", "test -e ready || sleep 600")
    began = time.monotonic()
    assert small.run("seconds=0.7")[0] == 0
    assert time.monotonic() - began < 60 and small.ends() == {"slow": "cut"}
    assert not mentioning(f"cd {small.folder}")
    (small.folder / "ready").touch()
    assert small.run()[0] == 0 and small.ends() == {"slow": "done"}


def test_a_line_that_was_cut_in_the_middle_ends_nothing(small: Quarter) -> None:
    small.cell("a")
    small.run()
    kept = small.folder / "outputs/quarter/cpu/cells.jsonl"
    kept.write_text(kept.read_text() + '{"cell": "b", "li')
    small.cell("b")
    assert small.run()[0] == 0
    assert small.ran() == small.lines() == {"a": 1, "b": 1}


def test_cells_find_dtrain_where_it_is_not_installed(small: Quarter) -> None:
    find = "import importlib.util as u; print(*(u.find_spec(name).origin for name in ('dtrain', 'launching')))"
    small.cell("finds", f'{sys.executable} -S -c "{find}"')  # -S: no site folder
    small.run()
    assert small.lines()[f"{ROOT}/dtrain/__init__.py {ROOT}/tests/launching.py"] == 1


def test_cells_whose_needs_are_not_here_are_left_out() -> None:
    cell = Cell("tests", "", 1, 1, (), ("dtrain", "pytest"), ranks=2)
    assert cells.obstacle(cell, {"pytest"}, 2) == "needs pytest"
    assert cells.obstacle(cell, set(), 1) == "needs 2 GPUs"
    assert cells.obstacle(cell, set(), 2) == ""


def test_packages_that_are_missing_are_named_at_once_with_how_to_bring_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quarter, "lacking", lambda modules: {*modules} & {"hydra", "omegaconf", "antlr4"})
    assert quarter.main(["on=cuda"]) == 2
    said = capsys.readouterr().err
    assert "missing: antlr4, hydra, omegaconf." in said
    assert "pip wheel -w wheels hydra-core\n" in said
    monkeypatch.setattr(quarter, "devices", lambda on: 0)
    assert quarter.main(["only=card,hand-124M"]) == 2
    assert "missing" not in (said := capsys.readouterr().err) and "no GPU" in said, "loops by hand need torch alone"
    assert not [*tmp_path.iterdir()]


def test_the_packages_that_are_looked_for_are_those_of_dtrain() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {re.split(r"[><=]", each)[0] for each in project["dependencies"]} <= {*quarter.PACKAGES.values()}


def test_words_that_are_none_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert quarter.main(["on=gpu0", "loud=yes", "seconds=soon", "only=card,tpyo"]) == 2
    said = capsys.readouterr().err
    assert all(each in said for each in ("on=gpu0", "loud=yes", "seconds=soon", "only=tpyo"))


def commands(module: str, on: str) -> Iterable[tuple[Cell, list[str]]]:
    """Cells of a module and their arguments."""
    for cell in cells.cells(on, 1, Path("kept")):
        if cell.command[1:3] == ("-m", module):
            yield cell, [each for each in cell.command[4:] if not each.startswith("profile=")]


@pytest.mark.parametrize("on", ["cuda", "cpu"])
def test_the_words_of_all_cells_are_plans_and_variants(on: str) -> None:
    host = Cluster(gpus=1, cpus=16) if on == "cuda" else Cluster(gpus=0, cpus=2)
    runs = [run.partition(": ")[2].split() for _, arguments in commands("tests.gpu.runs", on) for run in arguments]
    common = ["model=gpt", "data=synthetic", "objective=next_token", "strategy=single", "devices=1", "steps=100000"]
    assert len(runs) == 12 and {resolve(compose([*common, *words]), host).device for words in runs} == {on}
    variants = [each.partition(": ")[2] for _, arguments in commands("tests.gpu.loops", on) for each in arguments]
    assert len(variants) == 11 and all(loops.parse(each) for each in variants)


def test_every_file_with_a_test_for_a_gpu_is_in_a_cell() -> None:
    files = {*cells.FIRST, *cells.rest()}
    assert all((ROOT / each).exists() for each in files)
    assert {"tests/objective/test_fused.py", "tests/precision/test_fp8.py", "tests/predict/test_memory.py"} <= files, (
        "the mark of the first one is on a parameter"
    )


def test_the_page_has_every_decision_as_it_was_written_down() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for each in figures.DECISIONS:
        assert f"| {each.question} | {each.most:.3g} | {each.then} | {each.otherwise} | " in page


def entry(line: dict[str, Any]) -> dict[str, Any]:
    return {"cell": "hand-124M", "line": json.dumps(line)}


def test_a_decision_is_by_the_newest_figures_and_an_error_hides_none() -> None:
    entries = [
        entry({"name": "whole", "ms": 60.0}), entry({"name": "blocks", "ms": 50.0}), {"cell": "hand-124M", "begun": ""},
        entry({"name": "whole", "error": "out of memory"}), entry({"name": "blocks", "ms": 62.0}),
        {"cell": "card", "line": '{"card": "a GPU"}'},
    ]  # fmt: skip
    found = figures.outcomes(entries)
    assert found["hand-124M"].end == "cut"
    lines = figures.table(found).splitlines()
    assert "| the whole model compiled / blocks | 0.98 | 0.968 | compile=auto is compile=model below width 1,536 on one rank |" in lines  # fmt: skip
    assert "| two chunks / one | 1.02 | not run |  |" in lines
    assert not any("compile=model" in line for line in figures.table({"hand-124M": found["hand-124M"], "card": figures.Outcome(rows={"card": {"card": "cpu"}})}).splitlines())  # fmt: skip


def computed(words: str, microbatch: int = 3) -> tuple[float, torch.Tensor]:
    """Loss and gradient of a batch of six."""
    variant = loops.parse(words)
    model, loss = loops.build(TINY, variant, torch.device("cpu"))
    tokens = torch.randint(TINY["vocab"], (6, TINY["sequence"] + 1), generator=torch.Generator().manual_seed(1))
    value = float(loops.gradients(model, loss, tokens, microbatch, half="bf16" in words))
    return value, torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    )


def assert_alike(words: str, reference: str, tolerance: float) -> None:
    (loss, gradient), (other, expected) = computed(words), computed(reference, microbatch=6)
    assert loss == pytest.approx(other, rel=tolerance)
    assert gradient.shape == expected.shape and gradient.count_nonzero() > 0
    assert (gradient - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize(
    "words", ["none+split", "none+chunk=36", "none+chunk=16", "none+split+chunk=5", "none+clipin+nosync"]
)
def test_variants_of_the_loop_by_hand_compute_the_same(words: str) -> None:
    assert_alike(words, "none", 2e-6)
    assert_alike(f"{words}+scale", "none+scale", 2e-6)


def test_the_scale_of_the_embedding_makes_another_model() -> None:
    assert computed("none+scale")[0] != computed("none")[0]


@pytest.mark.parametrize("words", ["none+bf16", "none+bf16+chunk=16"])
def test_a_residual_in_bf16_is_near(words: str) -> None:
    assert_alike(words, "none", 5e-2)


@pytest.mark.campaign("commands")
@pytest.mark.often("whole+chunk=36")
@pytest.mark.filterwarnings("ignore")  # torch's own compiler warns of what else of torch it uses
@pytest.mark.parametrize("words", ["blocks", "blocks+chunk=16", "whole", "whole+chunk=36", "whole+split"])
def test_compiled_variants_compute_the_same(words: str) -> None:
    assert_alike(words, "none", 5e-6)


@pytest.mark.parametrize("words", ["", "blocks+whole", "none+faster", "chunk=4"])
def test_variants_that_are_none_are_refused(words: str) -> None:
    with pytest.raises(ValueError, match=r"Words|one of"):
        loops.parse(words)


def test_communication_counts_as_hidden_while_another_kernel_runs() -> None:
    compute = [(False, 0.0, 10.0), (False, 5.0, 12.0), (False, 20.0, 30.0)]
    assert profiled.hidden([*compute, (True, 8.0, 16.0), (True, 28.0, 32.0)]) == pytest.approx((4 + 2) / 12)
    assert profiled.hidden(compute) == 1.0


@pytest.mark.campaign("commands")
def test_the_cells_of_the_first_question_run_in_small(tmp_path: Path) -> None:
    """All cells take ten minutes on two cores: `python -m tests.gpu.quarter on=cpu`."""
    command = [
        sys.executable,
        "-m",
        "tests.gpu.quarter",
        "on=cpu",
        f"out={tmp_path / 'out'}",
        "only=card,dtrain-124M,hand-124M",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = figures.outcomes(quarter.entries(tmp_path / "out" / "cells.jsonl"))
    assert {name: cell.end for name, cell in found.items()} == dict.fromkeys(
        ("card", "dtrain-124M", "hand-124M"), "done"
    )
    assert not [row for cell in found.values() for row in cell.rows.values() if "error" in row]
    assert [name for name, row in found["hand-124M"].rows.items() if "ms" in row] == [
        "blocks", "apart", "whole", "bf16", "one chunk", "half", "no sync", "no clip",
    ]  # fmt: skip
    assert found["dtrain-124M"].rows["auto"]["ms"] > 0 and (tmp_path / "out" / "kernels.txt").stat().st_size
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"cells.jsonl", "figures.json", "figures.md", "kernels.txt"}  # fmt: skip
