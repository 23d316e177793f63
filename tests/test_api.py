"""dtrain as a library: `run`, `plan` and `load` in a script, from standard input and in a notebook; a loop of one's own."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, ClassVar

import commands
import nbformat
import pytest
from nbclient import NotebookClient

import dtrain
from dtrain.compose import compose
from dtrain.errors import RankError, WordsError
from dtrain.hook import StepInfo
from dtrain.launcher import rank
from dtrain.lifecycle.signals import StopRequested

ROOT = Path(__file__).parents[1]
CELL = textwrap.dedent("""
    import dtrain
    import torch
    from torch import nn


    class Net(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))

        def forward(self, x):
            return self.net(x)


    class Sums:
        def __len__(self):
            return 64

        def __getitem__(self, i):
            x = torch.randn(4, generator=torch.Generator().manual_seed(i))
            return x, x.sum(0, keepdim=True)


    WORDS = ("objective=regression", "model.width=8", "steps=6", "batch=8", "logger=[]", "hook=[]")
    TWO = ("strategy=ddp", "devices=2")
""")
LOADED = "float(dtrain.load('b', model=Net)(torch.ones(1, 4)))"
USED = textwrap.dedent(f"""
    one = dtrain.run(*WORDS, model=Net, data=Sums(), out="a")
    two = dtrain.run(*WORDS, *TWO, model=Net, data=Sums(), out="b")
    with torch.no_grad():
        loaded = {LOADED}
    again = dtrain.run(*WORDS, *TWO, "steps=9", model=Net, data=Sums(), out="b")
    planned = str(dtrain.plan(*WORDS, *TWO, model=Net, data=Sums()))
""")
SHOWN = 'print("SHOWN", json.dumps([one.loss, two.loss, loaded, again.step, planned]))'


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def check(printed: str) -> None:
    one, two, loaded, steps, planned = json.loads(printed.split("SHOWN ")[1].splitlines()[0])
    assert one == pytest.approx(two, rel=1e-6), "one rank and two have the same loss"
    assert isinstance(loaded, float) and steps == 9
    assert "2 rank(s)" in planned and "model.Net" in planned and "49 parameters" in planned


@pytest.mark.often("script", others=pytest.mark.campaign("commands"))
@pytest.mark.parametrize("way", ["script", "standard input"])
def test_a_script_trains_classes_of_its_own(way: str, tmp_path: Path) -> None:
    source = f"import json\n{CELL}\nif __name__ == '__main__':\n{textwrap.indent(USED + SHOWN, '    ')}\n"
    script = tmp_path / "mine.py"
    script.write_text(source)
    program, given = (str(script), None) if way == "script" else ("-", source)
    ran = commands.python(program, input=given, cwd=tmp_path, env=environment())
    assert ran.returncode == 0, ran.stderr
    check(ran.stdout)


@pytest.mark.campaign("commands")
def test_a_notebook_trains_classes_of_a_cell_and_shows_an_exception_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    wrong = "class Wrong(Net):\n    def forward(self, x):\n        raise ValueError('on purpose')\n"
    failing = [wrong + f"dtrain.run(*WORDS, *{ways}, model=Wrong, data=Sums())" for ways in ("()", "TWO")]
    cells = ["import json\n" + CELL, USED, SHOWN, *failing, "dtrain.run('stps=4', model=Net, data=Sums())"]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(
        book, timeout=240, allow_errors=True, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    made, used, shown, *failed, misspelt = ([*cell.outputs] for cell in book.cells)
    assert not made and not [output for output in used if output.output_type == "error"], used
    check("".join(output.text for output in shown))
    for outputs in failed:
        (error,) = [output for output in outputs if output.output_type == "error"]
        assert error.ename == "RankError" and error.evalue.startswith("rank ")
        assert error.evalue.count("Traceback") == 1 and "ValueError: on purpose" in error.evalue
        said = "".join(output.get("text", "") for output in outputs)
        assert "Traceback" not in said, "shown once, as the error of the cell"
    (error,) = [output for output in misspelt if output.output_type == "error"]
    assert error.ename == "WordsError" and "Did you mean steps?" in error.evalue


def test_what_can_be_imported_is_named_and_its_recipe_runs_again(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CELL)
    use = 'from mine import *\ndtrain.run(*WORDS, *TWO, model=Net, data=Sums, out="a")\n'
    first = commands.python("-c", use, cwd=tmp_path, env=environment())
    assert first.returncode == 0, first.stderr
    words = ["recipe=a/config.yaml", "trust=[mine]", "out=b"]
    second = commands.run(*words, cwd=tmp_path, env=environment())
    assert second.returncode == 0, second.stderr
    results = [json.loads((tmp_path / name / "result.json").read_text())["loss"] for name in "ab"]
    assert results[0] == results[1]


def test_what_cannot_be_imported_is_asked_for_again(tmp_path: Path) -> None:
    use = f'{CELL}\ndtrain.run(*WORDS, model=Net, data=Sums(), out="a")\n'
    commands.python("-c", use, cwd=tmp_path, env=environment()).check_returncode()
    ran = commands.run("recipe=a/config.yaml", "out=b", cwd=tmp_path, env=environment())
    assert ran.returncode == 2
    assert "data.Sums was passed to dtrain.run(..., data=...). Call that again." in ran.stderr


@pytest.mark.parametrize("trained, loaded", [(CELL, "from mine import *"), ("from mine import *", CELL), (CELL, CELL)])
def test_a_model_is_loaded_with_the_arguments_of_its_run_whatever_it_is_called(
    trained: str, loaded: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(CELL)
    train = f'{trained}\ndtrain.run(*WORDS, model=Net, data=Sums(), out="b")\n'
    commands.python("-c", train, cwd=tmp_path, env=environment()).check_returncode()
    ran = commands.python("-c", f"{loaded}\nprint({LOADED})", cwd=tmp_path, env=environment())
    assert ran.returncode == 0, ran.stderr
    assert isinstance(json.loads(ran.stdout.splitlines()[-1]), float)


def test_the_import_is_light() -> None:
    code = "import sys, dtrain; print(len([name for name in sys.modules if name.split('.')[0] in ('torch', 'yaml', 'numpy')]))"
    ran = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "0"


def test_every_public_name_is_there() -> None:
    code = "import dtrain\nfor name in dtrain.__all__: assert getattr(dtrain, name) is not None, name\nfrom dtrain import *"
    commands.python("-c", code, env=environment()).check_returncode()


@pytest.mark.often("strategy=ddp mesh.tp=2")
@pytest.mark.campaign("documents")
@pytest.mark.parametrize("words", [["strategy=ddp"], ["strategy=fsdp"], ["strategy=ddp", "mesh.tp=2"]], ids=" ".join)
def test_the_loop_of_the_page_trains_as_ours_and_goes_on(words: list[str], tmp_path: Path) -> None:
    (page,) = re.findall(r"```python own.py\n(.*?)```", (ROOT / "docs" / "own-loop.md").read_text(), re.DOTALL)
    (tmp_path / "own.py").write_text(page)
    assert len(page[page.index("def train") :].splitlines()) <= 30
    common = ["data=synthetic", "model.layers=2", "model.width=16", "model.heads=2", "schedule=constant"]
    common += ["logger=[]", "hook=[]", "devices=2", "evaluate.every=0"]

    def loss(*more: str) -> float:
        ran = commands.run(*common, *words, *more, cwd=tmp_path, env=environment())
        assert ran.returncode == 0, ran.stderr
        (value,) = re.findall(r"last step's loss (\d+\.\d+)", ran.stdout)
        return float(value)

    own = ["loop=own.train", "trust=[own]"]
    whole = loss("steps=6", "out=ours")
    assert loss(*own, "steps=6", "out=whole") == whole
    again = commands.run(*common, *words, *own, "steps=6", "out=whole", cwd=tmp_path, env=environment())
    assert again.returncode == 0 and "already finished" in again.stdout
    more = ("recipe=whole/config.yaml", "trust=[own]", "out=more")
    assert commands.run(*more, cwd=tmp_path, env=environment()).returncode == 0
    looked = commands.run("evaluate", *own, "out=more", "evaluate.samples=8", cwd=tmp_path, env=environment())
    assert looked.returncode == 0 and "eval_loss" in looked.stdout, looked.stderr
    assert loss(*own, "steps=6", "stop_after=3", "out=parts") != whole
    assert loss(*own, "steps=6", "out=parts") == whole


def test_a_mistake_in_the_words_of_a_call_is_not_said_to_be_of_the_command_line() -> None:
    with pytest.raises(WordsError) as caught:
        dtrain.plan("steps=0", "bach", "optim=adam")
    assert len(re.findall(r"(steps=0|bach|optim=adam) \(the call\): ", str(caught.value))) == 3
    with pytest.raises(WordsError, match=r"steps=0 \(command line\): "):
        compose(["steps=0", "bach"])


def test_a_mistake_in_the_arguments_of_an_object_of_the_script_is_told_before_launch() -> None:
    from torch import nn

    class Net(nn.Module):
        def __init__(self, width: int, dropout: float = 0.0) -> None:
            raise AssertionError("built")

    class Base:
        def __init__(self, *, classes: int = 2) -> None: ...

    class Faces(Base): ...

    def wide(width: int, **more: int) -> nn.Module:
        return nn.Linear(width, 1, **more)

    def mistakes(*words: str, **objects: object) -> str:
        with pytest.raises(WordsError) as caught:
            dtrain.plan("data=synthetic", "objective=regression", *words, **objects)  # type: ignore[arg-type]
        return str(caught.value)

    said = mistakes(
        "model.widht=8", "model.dropout=much", "data=dataset", "data.dataset.clases=3", model=Net, data=Faces
    )
    assert "model.widht=8: Net takes no widht. Did you mean model.width?" in said
    assert "model: Net needs width. Type model.width=<value>." in said
    assert "model.dropout=much" in said, said
    assert "data.dataset.clases=3: Faces takes no clases. Did you mean data.dataset.classes?" in said
    assert "objective.x=1: Base takes no x. Allowed: classes." in mistakes("objective.x=1", objective=Base)
    made = nn.Linear(4, 1)
    assert "model.width=8 (the call): Linear was passed to dtrain.run as an object" in mistakes(
        "model.width=8", model=made
    )
    assert "model: wide needs width." in mistakes("model.bias=false", model=wide)
    assert dtrain.plan("data=synthetic", "objective=regression", "model.width=4", "model.bias=false", model=wide)


def test_a_plan_of_objects_that_cannot_be_built_prints_what_is_wrong() -> None:
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            raise ValueError("no layers")

    shown = str(dtrain.plan("data=synthetic", "objective=regression", model=Net))
    assert "Net, given by the caller" in shown and "of=" not in shown
    assert "mesh" in shown and re.search(r"^STOP  .*no layers", shown, re.MULTILINE)


@pytest.mark.parametrize("call", ["plan('steps=0')", "run('steps=0')", "load('nowhere')", "run(steps=5)"])
def test_a_mistake_in_a_call_shows_the_line_of_the_caller_and_none_of_the_inside(call: str, tmp_path: Path) -> None:
    ran = commands.python("-c", f"import dtrain\ndtrain.{call}", cwd=tmp_path, env=environment())
    assert ran.returncode == 1
    assert "line 2, in <module>" in ran.stderr and ran.stderr.count("dtrain/api.py") == 1, ran.stderr


def test_a_word_that_is_given_as_an_argument_is_told_as_it_is_typed() -> None:
    call: Any = dtrain.run
    with pytest.raises(WordsError, match=r'run takes no argument devices\. A word is a text of its own: "devices=2"'):
        call("steps=5", devices=2)


THREADS = """
import signal
import threading

outcomes, training = {}, threading.Event()


class Waiting(Sums):
    '''The run goes on only when the others have been refused.'''

    def __getitem__(self, i):
        training.set()
        assert refused.wait(60)
        return super().__getitem__(i)


def call(out, data, *words):
    try:
        outcomes[out] = dtrain.run(*WORDS, *words, model=Net, data=data, out=out).status
    except Exception as error:
        outcomes[out] = f"{type(error).__name__}: {error}"


refused = threading.Event()
first = threading.Thread(target=call, args=("a", Waiting()))
first.start()
assert training.wait(60)
call("b", Sums())
call("c", Sums(), *TWO)
refused.set()
first.join()
handler = signal.getsignal(signal.SIGINT)
last = threading.Thread(target=call, args=("d", Sums(), *TWO))
last.start()
last.join()
assert signal.getsignal(signal.SIGINT) is handler
print("OUTCOMES", json.dumps(outcomes), flush=True)
"""


def test_a_process_has_one_run_at_a_time_in_any_of_its_threads(tmp_path: Path) -> None:
    ran = commands.python("-c", f"import json\n{CELL}\n{THREADS}", cwd=tmp_path, env=environment())
    assert ran.returncode == 0, ran.stderr
    outcomes = json.loads(ran.stdout.split("OUTCOMES ")[1])
    assert (outcomes["a"], outcomes["d"]) == ("finished", "finished")
    for out in "bc":
        assert outcomes[out].startswith("PreflightError: dtrain.run: this process has a run already (out=a). ")
        assert not (tmp_path / out).exists()


class _Scores:
    every = 2
    about: ClassVar = {"figures": {"eval_score": "highest"}}

    def __call__(self, info: StepInfo) -> dict[str, float]:
        return {"score": {2: 1.0, 4: 3.0}.get(info.step, 2.0)}


@pytest.mark.parametrize("hook", [_Scores, _Scores()])
def test_the_best_checkpoint_may_be_that_of_a_hook_that_is_passed(hook: Any, tmp_path: Path) -> None:
    words = ("model=mlp", "data=synthetic", "objective=regression", "steps=8", "logger=[]")
    result = dtrain.run(*words, "checkpoint.best=eval_score", hook=hook, out=tmp_path / "a")
    assert result.best == {"eval_score": {"value": 3.0, "step": 4}}


def test_ctrl_c_before_the_first_step_is_a_request_to_stop_of_this_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the process was doing, and the next run of the process is not stopped by it."""
    words = ("model=mlp", "data=synthetic", "objective=regression", "steps=2", "logger=[]", "hook=[]")
    with monkeypatch.context() as patch:
        patch.setattr(rank, "locate", lambda name: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(StopRequested) as stopped:
            dtrain.run(*words, out=tmp_path / "a")
    assert len(stopped.traceback) == 2, "the line of the caller, and the end of the call"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert dtrain.run(*words, out=tmp_path / "a").status == "finished"
    with monkeypatch.context() as patch:
        patch.setattr(rank, "locate", lambda name: 1 / 0)
        with pytest.raises(RankError, match="ZeroDivisionError"):
            dtrain.run(*words, out=tmp_path / "b")


@pytest.mark.campaign("signals")
def test_a_run_of_several_ranks_that_was_interrupted_goes_on_in_the_same_process(tmp_path: Path) -> None:
    script = """
        import os, signal, threading, time
        from pathlib import Path

        def interrupt():
            while not (Path("run/metrics.jsonl").exists() and '"step": 3' in Path("run/metrics.jsonl").read_text()):
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)

        if __name__ == "__main__":
            words = ("objective=regression", "model.width=8", "steps=100000", "devices=2", "strategy=ddp", "log.every=1")
            threading.Thread(target=interrupt).start()
            print(dtrain.run(*words, model=Net, data=Sums(), out="run").status)
            print(dtrain.run(*words, "stop_after=1", model=Net, data=Sums(), out="other").status)
    """
    (tmp_path / "script.py").write_text(CELL + textwrap.dedent(script))
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert [line for line in done.stdout.splitlines() if line in ("interrupted", "stopped")] == [
        "interrupted",
        "stopped",
    ], done.stderr


@pytest.mark.campaign("commands")
@pytest.mark.parametrize("ranks", [(), ("devices=2", "strategy=ddp")])
def test_a_script_whose_loading_processes_would_train_again_is_told_what_to_write(
    ranks: tuple[str, ...], tmp_path: Path
) -> None:
    words = ("objective=regression", "model.width=8", "steps=3", "data.workers=1", *ranks)
    (tmp_path / "script.py").write_text(CELL + f"\ndtrain.run(*{words}, model=Net, data=Sums(), out='run')\n")
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert '`if __name__ == "__main__":` above the call' in done.stderr.split("LoaderError: ")[-1], done.stderr
    assert "lease" not in done.stderr and "trusted" not in done.stderr
