"""README and docs tell the truth: their commands and examples run, their words exist, the mistake is answered as shown."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
import pytest
from chat import talks
from data import drawn
from data.files import rows, write

import dtrain
from dtrain.cluster import Cluster
from dtrain.config.schema import ALLOWED, GROUPS, Schema
from dtrain.recipe import folder
from dtrain.resolve import resolve
from dtrain.sweep import jobs

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
START = (ROOT / "docs" / "getting-started.md").read_text()
TOUR = re.search(r"## A tour.*?```sh\n(.*?)```", START, re.DOTALL)[1].splitlines()  # type: ignore[index]
PLANS = re.search(r"## A plan.*?```sh\n(.*?)```", README, re.DOTALL)[1].splitlines()  # type: ignore[index]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SMALL = ["steps=4", "model.layers=2", "model.width=32", "data.sequence=16", "hook=[]", "evaluate.samples=8"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for the whole tour: later commands build on earlier ones."""
    return tmp_path_factory.mktemp("tour")


@pytest.mark.campaign("documents")
@pytest.mark.parametrize("line", TOUR, ids=lambda line: line.split("#")[0].strip().removeprefix("python -m dtrain "))
def test_the_tour_runs(line: str, place: Path, corpus: Path) -> None:
    words = shlex.split(line, comments=True)[3:]
    text = "model=mlp" not in words
    small = [*SMALL, f"data.path={corpus}"] if text else ["steps=4"]
    if words[0] in ("evaluate", "generate"):
        small = ["generate.tokens=5"]
    elif words[0] in ("checkpoint", "diff", "runs", "report", "recipes", "import", "completion") or "--help" in words:
        small = []
        (place / "ds_config.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 2}}')
    elif any(word.startswith("recipe=") for word in words):
        small = ["steps=4"]
    elif words[0] != "plan" and text:
        shared = place / "corpus"
        if not shared.exists():
            corpus.rename(shared)
        small = [*SMALL, f"data.path={shared}"]
    env = {**os.environ, "XDG_CACHE_HOME": str(place / "cache")}
    done = commands.run(*words, *small, cwd=place, env=env)
    assert done.returncode == (1 if words[0] == "diff" else 0), done.stdout + done.stderr


@pytest.mark.campaign("documents")
def test_the_commands_of_adapters_run(tmp_path: Path, corpus: Path) -> None:
    """All of the page, in order, with the first run made small."""
    freezing, adapters, narrow = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "adapters.md").read_text(), re.DOTALL)
    for line in (*adapters.splitlines(), *narrow.splitlines(), *freezing.splitlines()):
        verb, *_ = words = shlex.split(line)[3:]
        trains = [*SMALL, f"data.path={corpus}"] if "=" in verb else []
        small = ["generate.tokens=5"] if verb == "generate" else trains
        done = commands.run(*words, *small, cwd=tmp_path)
        assert done.returncode == 0, (line, done.stdout + done.stderr)


@pytest.mark.campaign("documents")
def test_the_commands_of_evaluating_run(tmp_path: Path) -> None:
    lines = ["a,b,label", *(f"{row % 7},{row % 5 - 2},{row % 3}" for row in range(300))]
    for name in ("rows.csv", "new.csv"):
        (tmp_path / name).write_text("\n".join(lines))
    printed = []
    for begin in (
        "python -m dtrain model=mlp",
        "python -m dtrain predict",
        "python -m dtrain evaluate out=runs/a/best",
    ):
        for line in block("docs/evaluating.md", begin).splitlines():
            done = commands.run(*shlex.split(line)[3:], cwd=tmp_path)
            assert done.returncode == 0, (line, done.stdout + done.stderr)
            printed.append(done.stdout)
    assert "eval_auroc" in printed[1] and "300 rows" in printed[3]
    shown = commands.python("-c", block("docs/evaluating.md", "import json"), cwd=tmp_path)
    assert shown.returncode == 0 and " -> " in shown.stdout, shown.stderr


@pytest.mark.campaign("documents")
@pytest.mark.parametrize("line", PLANS)
def test_the_plans_are_made(line: str) -> None:
    done = subprocess.run([sys.executable, *line.split()[1:]], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "peak " in done.stdout, done.stderr


@pytest.mark.campaign("documents")
def test_the_example_of_a_model_trains(tmp_path: Path) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "mine.py").write_text(source)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "mine.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "finished after 200 steps" in done.stdout


def test_the_examples_of_the_library_run(tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text("\n".join(blocks(ROOT / "docs/api.md")))
    done = commands.python("page.py", cwd=tmp_path)
    assert done.returncode == 0 and "finished 6" in done.stdout, done.stdout + done.stderr


def test_the_page_of_the_library_has_every_public_name() -> None:
    page = (ROOT / "docs/api.md").read_text()
    assert not [name for name in dtrain.__all__ if f"`{name}`" not in page and f"`{name}(" not in page]


def test_messages_of_troubleshooting_are_in_the_code() -> None:
    """Each quoted piece between `...`, as far as it is written out there."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    first = [line.split("|")[1] for line in page.splitlines() if re.match(r"\| (`|\.)", line)]
    cells = (text for cell in first for text in re.findall(r"`([^`]+)`", cell))
    quoted = [piece.strip(" ,") for text in cells for piece in text.split("...")]
    code = "".join(text for path in sorted((ROOT / "dtrain").rglob("*.py")) for text in texts(path))
    assert len(quoted) > 50
    assert not [piece for piece in quoted if piece not in ("memory", "try") and piece not in code]


def test_pages_that_are_linked_are_there() -> None:
    for page in (*PAGES, *(ROOT / "tests/bench").glob("*.md")):
        for file, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", outside_of_code(page)):
            there = page.parent / file if file else page
            assert there.exists(), (page.name, file)
            assert not anchor or anchor in anchors(there), (page.name, file, anchor)


def test_the_readme_is_one_that_people_read() -> None:
    assert len(README.splitlines()) <= 160


def test_no_paragraph_is_longer_than_120_words() -> None:
    """An item of a list is one, a table none."""
    begins = re.compile(r"\s*([|#<]|[*-] |\d+\. |$)")
    for page in PAGES:
        words, fenced = 0, False
        for line in page.read_text().splitlines():
            fenced ^= line.lstrip().startswith("```")
            counts = not fenced and not line.lstrip().startswith(("|", "#", "```"))
            words = counts * ((0 if begins.match(line) else words) + len(line.split()))
            assert words <= 120, (page.name, line)


def test_pages_say_what_they_mean_without_pointing_back() -> None:
    """Plain English names the thing again."""
    pointing = re.compile(r"\b(those of|that of|of which)\b")
    assert not [(page.name, found[0]) for page in PAGES for found in pointing.finditer(page.read_text())]


def test_the_example_of_a_mistake_is_real() -> None:
    block = re.search(r"```text\n\$ python -m dtrain (.*?)\n(.*?)```", README, re.DOTALL)
    assert block
    done = commands.run(*block[1].split())
    assert done.stderr == block[2]


def test_every_word_is_in_the_table() -> None:
    for group in GROUPS:
        row = next(line for line in README.splitlines() if line.startswith(f"| `{group}`"))
        for path in (folder("conf") / group).glob("*.yaml"):
            assert f"`{path.stem}`" in row, (group, path.stem)
    for name in Schema.__dataclass_fields__:
        assert f"`{name}" in README, name


def test_the_test_command_of_ci_is_the_readmes() -> None:
    assert "python -m pytest" in README
    assert "python -m pytest" in (ROOT / ".ci/run").read_text()


HELD = {
    "README.md": {
        "pip install -e .": "tests/test_package.py, and CI itself",
        "pip install -e '.[test]'": "CI itself",
        "import torch": "test_the_example_of_a_model_trains",
        "python -m dtrain model._target_=mypkg.Net": "test_a_package_of_ones_own_trains",
        "python -m dtrain plan": "test_the_plans_are_made",
        "ranks ": "test_the_plan_that_is_shown_is_real",
        "$ python -m dtrain": "test_the_example_of_a_mistake_is_real",
    },
    "api.md": dict.fromkeys(
        ("import torch", "planned = ", "model = ", "rows = ", "try:"), "test_the_examples_of_the_library_run"
    ),
    "plan.md": {"python -m dtrain plan best": "tests/verb/test_best.py"},
    "chat.md": {
        "pip install 'dtrain[hf,text,parquet]'": "test_the_commands_of_conversations_run",
        "python -m dtrain generate": "the same",
    },
    "data.md": {
        "python -m dtrain model=mlp": "test_the_commands_of_data_run",
        "python -m dtrain data=mixture": "the same",
        "python -m dtrain model=cnn": "test_the_commands_of_images_run",
        "python -m dtrain tokenize": "test_the_commands_of_tokens_run",
        "python -m dtrain objective=next_token": "the same",
        "python -m dtrain data.bucket=50": "test_the_commands_of_data_run",
        "python -m dtrain data=stream": "test_the_commands_of_streams_run",
    },
    "adapters.md": {
        "python -m dtrain init=runs/base out=runs/top": "test_the_commands_of_adapters_run",
        "python -m dtrain steps=200 out=runs/base": "the same",
        "python -m dtrain steps=50 init=runs/base out=runs/qlora": "the same",
    },
    "trackers.md": {"from pathlib import Path": "test_the_example_of_a_logger_is_told_of_a_run"},
    "evaluating.md": {
        "pip install 'dtrain[lm_eval]'": "tests/integrations/lm_eval/test_benchmark.py, with other tasks",
        "python -m dtrain model=mlp": "test_the_commands_of_evaluating_run",
        "python -m dtrain predict": "the same",
        "python -m dtrain evaluate out=runs/a/best": "the same",
        "import json": "the same",
    },
    "design.md": {"words ": "a picture", "conf/": "a picture; tests/house/test_floors.py holds the rooms"},
    "engines.md": {
        '"""': "test_the_examples_of_parts_are_those_of_the_kit; tests/launcher/local/test_attached.py runs it",
        "_target_": "the same",
    },
    "external.md": {
        "apiVersion": "tests/cluster/test_environments.py, which plans its words",
        "SageMaker": "platforms that are not here; tests/cluster/environments.yaml has what they set",
    },
    "kubernetes.md": {
        "python -m dtrain strategy=fsdp nodes=2 devices=8 launcher=kubernetes": "tests/integrations/kubernetes/test_launcher.py, with other words",
        "command": "tests/launcher/test_external.py, whose pods have such variables",
        **dict.fromkeys(("# InfiniBand", "# RoCE", "# EFA", "# GKE"), "tests/integrations/kubernetes/test_patch.py"),
    },
    "mpi.md": {
        "python -m dtrain strategy=fsdp nodes=2 devices=8 launcher=mpi": "tests/integrations/mpi/test_launcher.py, with other words",
        "pip install 'dtrain[mpi]'\nmpirun": "tests/integrations/mpi/test_backend.py, with other words",
    },
    "ray.md": {
        "pip install 'dtrain[ray]'": "tests/integrations/ray/test_launcher.py, with other words",
        "python -m dtrain model=mlp objective=classification data=ray": "tests/integrations/ray/test_data.py",
    },
    "slurm.md": {
        "python -m dtrain strategy=fsdp nodes=2 devices=8 launcher=slurm": "tests/launcher/test_slurm.py, with other words",
        "#!/bin/sh": "a container, which is not here",
        "srun --ntasks-per-node": "the same; tests/launcher/test_external.py has srun",
    },
    "spark.md": {
        "pip install 'dtrain[spark]'": "tests/integrations/spark/test_launcher.py, with other words",
        "from dtrain.integrations.spark.frames import": "tests/integrations/spark/test_frames.py, with other columns",
    },
    "ssh.md": {
        "python -m dtrain strategy=fsdp nodes=2 devices=8 launcher=ssh": "tests/launcher/test_ssh.py, with other words",
    },
    "fine-tuning.md": {
        "python -m dtrain model=hf model.name=<model> model.head=new": "tests/chat/test_rowtext.py, with a model of its own",
        "pip install 'dtrain[hf,text]'": "test_a_model_is_tuned_in_four_commands",
    },
    "getting-started.md": {
        "python -m dtrain plan": "test_the_tour_runs",
        "$ python -m dtrain doctor": "what a host without room and bucket answers: tests/doctor",
    },
    "importing.md": {
        "python -m dtrain init=": "test_weights_of_others_are_taken_in",
        "python -m dtrain model=hf": "tests/model/test_hf.py, with a folder",
        "python -m dtrain checkpoint export": "tests/checkpoint/test_companions.py, test_destination.py, with other places",
    },
    "moving.md": dict.fromkeys(("import ", "python -m dtrain import"), "tests/house/test_moving.py"),
    "own-loop.md": {"import time": "tests/test_api.py"},
    "own-parts.md": {
        "python -m dtrain model._target_=mypkg.Net": "test_a_package_of_ones_own_trains",
        "def watch(info)": "tests/evaluation/test_whole.py: test_the_hook_of_the_page_is_called",
        "# down and up": "test_the_examples_of_parts_are_those_of_the_kit",
        '"""': "the same; tests/test_outside.py runs them",
    },
    "recipes.md": {
        "# One line": "test_the_recipe_is_one",
        "pip install git+": "tests/recipe/test_project.py: test_a_project_is_installed_and_trains_from_git_a_zip_and_a_folder",
    },
    "sweeps.md": {
        "python -m dtrain -m": "test_the_commands_of_sweeps_run",
        "# mine.yaml": "test_the_recipe_of_a_sweep_is_one",
        "python -m dtrain model=mlp": "test_from_one_value_to_two_hosts",
    },
    "reliability.md": {
        "python -m dtrain strategy=ddp": "test_faults_that_are_planted_are_survived",
        "<out>/": "test_a_run_leaves_what_the_page_says",
    },
}
"""Page -> the beginning of a fenced block -> what holds it."""


def blocks(page: Path) -> list[str]:
    return re.findall(r"```[^\n]*\n(.*?)```", page.read_text(), re.DOTALL)


def outside_of_code(page: Path) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def texts(path: Path) -> Iterator[str]:
    """The texts of a module. What a message inserts is left out, but for names of variables."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else VARIABLES.get(ast.unparse(part.value), "")  # type: ignore[attr-defined]
                for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


VARIABLES = {
    "environment.PATIENCE": "DTRAIN_PATIENCE", "SECRET": "DTRAIN_SECRET", "environment.SECRET": "DTRAIN_SECRET"
}  # fmt: skip


def block(page: str, begin: str) -> str:
    (found,) = (text for text in blocks(ROOT / page) if text.startswith(begin))
    return str(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_block_of_code_is_held_by_a_test(page: Path) -> None:
    known = HELD.get(page.name, {})
    assert not [text[:60] for text in blocks(page) if not text.startswith(tuple(known))]
    assert all(any(text.startswith(begin) for text in blocks(page)) for begin in known)


def test_the_examples_of_parts_are_those_of_the_kit() -> None:
    """Each block begins its file; what follows in it is there for tests alone."""
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("own-parts.md", "engines.md"))
    shown = dict(re.findall(r"```\w+ ([\w/.]+)\n(.*?)```", pages, re.DOTALL))
    assert {Path(name).stem for name in shown} == {
        *("saw", "processes"),
        *(path.stem for path in (ROOT / "tests/outside/kit").glob("[a-z]*.py")),
    }
    for name, text in shown.items():
        assert (ROOT / "tests/outside" / name).read_text().startswith(text.rstrip("\n")), name


def test_the_example_of_a_logger_is_told_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, Any] = {}
    exec(block("docs/trackers.md", "from pathlib import Path"), space)
    result = dtrain.run("data=synthetic", "model=mlp", "steps=4", "log.every=2", out=tmp_path, logger=space["Lines"])
    first, second, third, evaluated = (tmp_path / "lines.txt").read_text().splitlines()
    assert first == f"{tmp_path.name}: lr 0.001" and second.startswith("2 {") and third.startswith("4 {'seen'")
    assert evaluated.startswith("4 {'eval_loss'")
    assert f"finished after {result.step} steps" in capsys.readouterr().out


@pytest.mark.campaign("documents")
def test_the_commands_of_sweeps_run(tmp_path: Path) -> None:
    small = ["model=mlp", "data=synthetic", "objective=regression", "steps=4", "hook=[]"]
    printed = []
    for line in block("docs/sweeps.md", "python -m dtrain -m optim.lr=1e-3,3e-3").splitlines():
        words = shlex.split(line, comments=True)[3:]
        done = commands.run(*words, *(small if words[0] == "-m" else []), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert "6 jobs in runs/s, of which 6 are finished" in printed[1]
    assert "no job has failed" in printed[4]


@pytest.mark.campaign("documents")
def test_the_commands_of_data_run(tmp_path: Path) -> None:
    table = [{"label": row["label"], **row} for row in rows()]
    write(tmp_path / "table.csv", [{name: row[name] for name in ("a", "b", "label")} for row in table])
    for name in ("a.jsonl", "b.jsonl", "a.parquet"):
        write(tmp_path / "rows" / name, table)
    (tmp_path / "web").mkdir()
    (tmp_path / "web/a.txt").write_text("text of the web. " * 40)
    write(tmp_path / "rows/tokens.jsonl", [{"input_ids": [*range(number % 40 + 2)]} for number in range(300)])
    lines = [
        line
        for begin in ("model=mlp", "data=mixture", "objective=next_token", "data.bucket=50")
        for line in block("docs/data.md", f"python -m dtrain {begin}").splitlines()
    ]
    for number, line in enumerate(lines):
        small = [] if "model=mlp" in line or " data.pad=" in line else ["data.sequence=64"]
        words = [*shlex.split(line)[3:], "steps=2", "hook=[]", *small, f"out={number}"]
        assert "finished after 2 steps" in trained(tmp_path, *words)


@pytest.mark.campaign("documents")
def test_the_commands_of_images_run(tmp_path: Path) -> None:
    drawn.folder(tmp_path / "flowers", 8)
    drawn.folder(tmp_path / "flowers_val", 2)
    table = [f"flowers/{kind}/{number}.jpg,{kind}\n" for kind in ("rose", "tulip") for number in range(8)]
    (tmp_path / "labels.csv").write_text("file,kind\n" + "".join(table))
    drawn.columns(tmp_path / "pictures/a.parquet", 24)
    for number in (0, 1):
        drawn.shard(tmp_path / f"shards/{number:03d}.tar", drawn.samples(12 * number, 12))
    for number, line in enumerate(block("docs/data.md", "python -m dtrain model=cnn").splitlines()):
        words = [*shlex.split(line)[3:], "steps=2", "batch=8", "model.width=8", "hook=[]", f"out={number}"]
        assert "finished after 2 steps" in trained(tmp_path, *words)


@pytest.mark.campaign("documents")
def test_the_commands_of_tokens_run(tmp_path: Path) -> None:
    from tokenizer.vocabulary import texts, written

    texts(tmp_path / "texts", 20)
    written(tmp_path / "tokenizer.json")
    write(tmp_path / "rows/a.parquet", rows())
    small = ["steps=2", "hook=[]", "data.sequence=16", "model.layers=1", "out=run"]
    for line in block("docs/data.md", "python -m dtrain tokenize").splitlines():
        words = shlex.split(line)[3:]
        done = commands.run(*words, *(small if words[0] != "tokenize" else []), cwd=tmp_path)
        assert done.returncode == 0 and ("digest " in done.stdout or words[0] != "tokenize"), done.stderr


@pytest.mark.campaign("documents")
def test_the_commands_of_conversations_run(tmp_path: Path) -> None:
    talks.tokenizer(tmp_path / "model")
    talks.write(tmp_path / "chats.jsonl", talks.talks(20))
    llama = MODEL.partition("tokenizer =")[0].replace("300", "512")
    assert commands.python("-c", llama, cwd=tmp_path).returncode == 0  # its threads end with it
    words = shlex.split(block("docs/chat.md", "pip install").splitlines()[2].replace("<model>", "model"))[3:]
    assert "finished after 3 steps" in trained(tmp_path, *words, "data.sequence=128", "steps=3", "batch=4")
    talks.write(tmp_path / "questions.jsonl", [{"prompt": "How are you?"}, {"messages": talks.said("hi")}])
    for line in block("docs/chat.md", "python -m dtrain generate").splitlines():
        done = commands.run(*shlex.split(line)[3:], "generate.tokens=5", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2


ROWS = """import torch


def make(shard, shards):
    for number in range(shard, 1000, shards):
        yield torch.full((4,), float(number)), torch.zeros(1)
"""


@pytest.mark.campaign("documents")
def test_the_commands_of_streams_run(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(ROWS)
    write(tmp_path / "rows/a.jsonl", rows())
    lines = block("docs/data.md", "python -m dtrain data=stream").splitlines()
    for number, line in enumerate(lines):
        words = [*shlex.split(line)[3:], "steps=2", "batch=4", "hook=[]", f"out={number}"]
        assert "finished after 2 steps" in trained(tmp_path, *words)


MODEL = """import tokenizers
import transformers

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}
transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes)).save_pretrained("model")
tokenizer = tokenizers.ByteLevelBPETokenizer()
tokenizer.train(["texts/a.txt"], vocab_size=300)
tokenizer.save("model/tokenizer.json")
"""


@pytest.mark.campaign("documents")
def test_a_model_is_tuned_in_four_commands(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("Once upon a time there was a cat, and once there was a dog.\n" * 200)
    assert commands.python("-c", MODEL, cwd=tmp_path).returncode == 0  # its threads end with it
    small = ["steps=20", "optim.lr=0.01", "data.sequence=16", "hook=[]", "data.cache=cache", "generate.tokens=8"]
    _, *lines = block("docs/fine-tuning.md", "pip install").split("\npython -m dtrain ")
    for line in lines:
        words = shlex.split(line.replace("<model>", "model"))
        more = small if words[0] not in ("checkpoint", "generate") else []
        done = subprocess.run(
            [*commands.COMMAND, *words, *more], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, (words, done.stderr)
    assert done.stdout.startswith("Once")
    tuned, before = (load_file(tmp_path / name / "model.safetensors") for name in ("tuned", "model"))
    changed = [name for name, value in before.items() if not tuned[name].equal(value)]
    assert len(changed) == 4 and all(name.endswith(("q_proj.weight", "v_proj.weight")) for name in changed)


@pytest.mark.campaign("documents")
def test_weights_of_others_are_taken_in(tmp_path: Path) -> None:
    """What they trained is a run of ours, under other names."""
    from safetensors.torch import load_file, save_file

    small = [
        "model.layers=1",
        "model.width=32",
        "model.heads=2",
        "data.sequence=16",
        "evaluate.samples=8",
        "steps=2",
        "hook=[]",
    ]
    for words in ([*small, "out=first"], ["checkpoint", "export", "out=first", "to=whole"]):
        assert commands.run(*words, cwd=tmp_path).returncode == 0
    weights = load_file(tmp_path / "whole/model.safetensors")
    (tmp_path / "runs/others").mkdir(parents=True)
    theirs = {f"transformer.{name}": tensor for name, tensor in weights.items()}
    save_file(theirs | {"extra.x": weights["norm.weight"].clone()}, tmp_path / "runs/others/model.safetensors")
    for line in block("docs/importing.md", "python -m dtrain init=").splitlines():
        words = shlex.split(line)[3:]
        done = commands.run(*words, *(small if words[0] != "checkpoint" else []), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    losses = [
        json.loads((tmp_path / f"runs/{name}/result.json").read_text())["loss"] for name in ("tuned", "tuned-too")
    ]
    assert losses[0] == losses[1]


@pytest.mark.campaign("documents")
def test_from_one_value_to_two_hosts(tmp_path: Path) -> None:
    printed = []
    for line in block("docs/sweeps.md", "python -m dtrain model=mlp").splitlines():
        words = shlex.split(line.replace("s3://bucket", str(tmp_path)), comments=True)[3:]
        small = [] if words[0] == "sweep" else ["steps=4", "hook=[]"]
        done = commands.run(*words, *small, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert "3 jobs in runs/a, of which 2 are finished" in printed[2]
    assert "4 trials" in printed[3] and "of which 4 are finished" in printed[4]


def test_each_word_of_the_table_of_other_tools_is_one() -> None:
    page = (ROOT / "docs" / "sweeps.md").read_text().partition("## Coming from")[2]
    ours = "".join(line.split(" | ")[1] for line in page.splitlines() if line.startswith("| ") and "---" not in line)
    named = set(re.findall(r"sweep\.\w+", ours)) - {"sweep.yaml"}
    assert len(named) > 8 and named <= {*ALLOWED}


def test_the_recipe_of_a_sweep_is_one(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(block("docs/sweeps.md", "# mine.yaml"))
    request = jobs.read([f"recipe={tmp_path}/mine.yaml", "sweep.out=s"])
    judged = jobs.judged(request, Cluster(gpus=0, cpus=8), resolve)
    assert (len(judged.jobs), judged.slots) == (12, 2)


def trained(folder: Path, *words: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = commands.run(*words, cwd=folder, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


PACKAGE = """import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x):
        return self.layers(x)


class Faces:
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.randn(4, generator=torch.Generator().manual_seed(i)), i % 2
"""


def test_a_package_of_ones_own_trains(tmp_path: Path) -> None:
    (tmp_path / "mypkg.py").write_text(PACKAGE)
    command = block("README.md", "python -m dtrain model._target_=mypkg.Net")
    assert command == block("docs/own-parts.md", "python -m dtrain model._target_=mypkg.Net")
    assert "finished after 3 steps" in trained(tmp_path, *command.split()[3:], "steps=3", "out=run")


def test_the_plan_that_is_shown_is_real(tmp_path: Path) -> None:
    """Its rows and what each begins with; times and memory are those of the machine."""
    shown = [line for line in block("README.md", "ranks ").splitlines() if line != "..."]
    real = trained(tmp_path, "plan", "strategy=fsdp", "nodes=2", "devices=2").splitlines()
    for line in shown:
        begin = line.split("about")[0].split("peak")[0].split(", 1 thread")[0]
        assert any(other.startswith(begin) for other in real), line


@pytest.mark.campaign("documents")
def test_the_recipe_is_one(tmp_path: Path) -> None:
    text = block("docs/recipes.md", "# One line")
    (tmp_path / "base.yaml").write_text("# The base.\nbatch: 64\ndata: synthetic\n")
    (tmp_path / "mine.yaml").write_text(text)
    plan = trained(tmp_path, "plan", "recipe=mine.yaml", "cluster=h100x8", "devices=8")
    assert "batch       64 samples" in plan and "lr=0.001" in plan


@pytest.mark.campaign("kills")
def test_faults_that_are_planted_are_survived(tmp_path: Path, s3: str) -> None:
    """The page's two commands, in small; the second on an S3 server of this machine."""
    killed, flaky = (
        shlex.split(line, comments=True)[3:]
        for line in block("docs/reliability.md", "python -m dtrain strategy=ddp").splitlines()
    )
    small = [
        "data=synthetic",
        "model.layers=1",
        "model.width=32",
        "hook.fault.step=3",
        "steps=6",
        "checkpoint.every=2",
        "evaluate.every=0",
    ]
    assert "start again from the last state" in trained(tmp_path, *killed, *small, "out=killed")
    small = [word for word in small if not word.startswith("hook")]
    words = [word.replace("s3/bucket/run", f"s3/{s3.partition('://')[2]}/flaky") for word in flaky]
    assert "finished after 6 steps" in trained(tmp_path, *words, *small)


def test_a_run_leaves_what_the_page_says(tmp_path: Path) -> None:
    names = re.findall(r"^(?:<out>/|      )([\w./]+)", block("docs/reliability.md", "<out>/"), re.MULTILINE)
    assert {"config.yaml", "plan.yaml", "metrics.jsonl", "result.json"} <= set(names)
    trained(tmp_path, "data=synthetic", "model.layers=1", "model.width=32", "steps=2", "out=run")
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left <= {name.split("/")[0].rstrip("/") for name in names}, left
