"""One word, one file, one test; and each word says what its arguments mean."""

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml

import dtrain
from dtrain.build import locate
from dtrain.cluster import Cluster
from dtrain.cluster.allocation import External
from dtrain.cluster.environments import TABLE
from dtrain.compose import compose
from dtrain.config import constraints, files
from dtrain.config.document import document
from dtrain.config.facts import SHARED, wrong
from dtrain.config.schema import ALLOWED, GROUPS, LISTED, NAMED, SENTENCES, Schema, default
from dtrain.model import construct
from dtrain.recipe import folder
from dtrain.resolve import resolve
from dtrain.resolve.targets import PASSED

CONF = folder("conf")
TESTS = Path(__file__).parent.parent
WORDS = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]
FIGURES = {"cluster": "dtrain.cluster.Machine"}
"""Groups whose words are figures and no code: each is one object of one class, a file of code for each would say nothing. Their test is that of the class."""
REAL = [(group, word) for group, word in WORDS if word != "auto"]
WITH = {
    ("launcher", "external"): (),
    ("launcher", "kubernetes"): ("launcher.image=train:1", "out=s3://bucket/run"),
    ("strategy", "ddp"): ("devices=2",),
    ("strategy", "fsdp"): ("devices=2",),
    ("strategy", "hsdp"): ("nodes=2", "devices=2"),
    ("strategy", "zero1"): ("devices=2",),
    ("strategy", "zero2"): ("devices=2",),
    ("strategy", "zero3"): ("devices=2",),
    ("strategy", "pipeline"): ("devices=2",),
    ("launcher", "local"): ("nodes=2",),
    ("model", "hf"): ("model.name=models/llama",),
    ("model", "mlp"): ("data=synthetic",),
    ("model", "cnn"): ("data=synthetic",),
    ("data", "spark"): ("data.path=rows",),
    ("data", "mixture"): ("data.of={a: {data: text}}", "data.weights={a: 1}"),
    ("data", "chat"): ("data.path=chats.jsonl", "data.tokenizer=models/llama"),
    ("data", "hf"): ("data.path=saved", "data.targets=y", "objective=regression"),
    ("data", "images"): ("data.path=flowers", "model=cnn"),
    ("data", "webdataset"): ("data.path=a.tar", "model=cnn"),
    ("data", "jsonl"): ("data.path=rows.jsonl", "data.targets=y", "objective=regression"),
    ("data", "csv"): ("data.path=rows.csv", "data.targets=y", "objective=regression"),
    ("data", "parquet"): ("data.path=rows.parquet", "data.targets=y", "objective=regression"),
    ("data", "tokens"): ("data.path=tokens.npy",),
    ("data", "stream"): ("data.path=rows.jsonl", "objective=regression"),
    ("launcher", "ray"): ("nodes=2",),
    ("data", "ray"): ("data.path=rows.parquet", "data.inputs=x", "data.targets=y", "objective=regression"),
    ("data", "dataset"): ("data.dataset._target_=torch.nn.ModuleList",),
    ("objective", "classification"): ("model=cnn", "data=synthetic"),
    ("objective", "dpo"): ("data=dataset", "data.dataset._target_=torch.nn.ModuleList"),
    ("objective", "distill"): ("objective.teacher=runs/large",),
    ("objective", "masked"): (
        "model=hf",
        "model.name=models/bert",
        "model.task=masked_lm",
        "data=text",
        "data.tokenizer=tokenizer.json",
    ),
    ("objective", "regression"): ("model=mlp", "data=synthetic"),
}
"""What must be said beside a word because it cannot be guessed; all other words are complete alone."""
FACTS = {"vocab": 11, "inputs": [3, 8, 8], "outputs": 5}


def node(group: str, word: str) -> dict[str, Any]:
    return yaml.safe_load((CONF / group / f"{word}.yaml").read_text()) or {}


def parameters(target: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(locate(target)).parameters)


def test_the_groups_are_the_folders_of_conf() -> None:
    assert {path.name for path in CONF.iterdir() if path.is_dir() and not path.name.startswith("_")} == {
        *GROUPS,
        *NAMED.values(),
        *LISTED.values(),
    }


def test_a_word_is_a_file_and_a_test() -> None:
    """The target lives in the file of the word; of an integration, in the file of the group."""
    for group, word in REAL:
        target = node(group, word)["_target_"]
        if group in FIGURES:
            assert target == FIGURES[group], (group, word)
            continue
        assert files.own_word(target) == (group, word)
        is_beside = target.startswith("dtrain.integrations.")
        folder, file = (f"integrations/{word}", group) if is_beside else (group, word)
        assert target.startswith(f"dtrain.{folder.replace('/', '.')}.{file}."), (group, word)
        assert (TESTS / folder / f"test_{file}.py").exists(), (group, word)


def test_a_test_is_of_a_word_or_of_a_file_beside_the_words() -> None:
    for group in GROUPS:
        words = {word for kind, word in REAL if kind == group}
        tested = {path.stem.removeprefix("test_") for path in (TESTS / group).glob("test_*.py")}
        files = {path.stem for path in (Path(dtrain.__file__).parent / group).glob("*.py")} - {"__init__"}
        assert tested - words <= files, group


def test_the_keys_of_a_word_are_what_its_target_takes() -> None:
    for group, word in REAL:
        part = node(group, word)
        takes = parameters(part["_target_"])
        keys = set(part) - {"_target_", "_about_", *SHARED.get(group, ())}
        assert keys <= set(takes), f"{group}/{word}: a key nobody takes"
        needed = {name for name, parameter in takes.items() if parameter.default is parameter.empty}
        assert needed <= keys | PASSED.get(group, set()), f"{group}/{word}: a parameter nobody gives"
        assert not keys & PASSED.get(group, set()), f"{group}/{word}: a key that the loop gives as well"


def test_every_key_is_explained() -> None:
    """In a comment beside it or in the first line, which says what the word means."""
    for group, word in WORDS:
        text = (CONF / group / f"{word}.yaml").read_text()
        lines = [line for line in text.splitlines() if not line.startswith("# @package")]
        assert lines[0].startswith("# ") and len(lines[0]) > 12, (group, word)
        # a word that only passes on to torch may leave the meaning of an argument to the class its first line names
        upstream = {
            name for text in lines[0].split() if text.startswith("torch.") for name in parameters(text.strip(";,:"))
        }
        bare = {
            line.split(":")[0] for line in lines if ":" in line and "#" not in line and not line.startswith((" ", "_"))
        }
        assert not {key for key in bare - upstream if key not in lines[0]}, (group, word)


def test_a_word_of_the_users_own_may_state_what_dtrains_do() -> None:
    for group, word in REAL:
        assert [*wrong(group, node(group, word).get("_about_"))] == [], (group, word)


def test_every_argument_says_what_it_may_be_and_its_default_is_that() -> None:
    for group, word in REAL:
        part = node(group, word)
        allowed = (part.get("_about_") or {}).get("allowed", {})
        assert set(allowed) == set(part) - {"_target_", "_about_"}, (group, word)
        unfit = [key for key, kind in allowed.items() if part[key] != "???" and not constraints.fits(part[key], kind)]
        assert not unfit, (group, word)


def test_every_plain_key_says_what_it_may_be_and_its_default_is_that() -> None:
    for key, kind in ALLOWED.items():
        assert constraints.fits(default(key), kind), key
    tops = {key.split(".")[0] for key in ALLOWED}
    assert tops == set(Schema.__dataclass_fields__) - set(GROUPS)


def test_the_file_of_defaults_is_written_by_the_schema() -> None:
    assert (CONF / "config.yaml").read_text() == document(), "python -m dtrain.config.document > conf/config.yaml"


def test_every_key_says_what_it_means() -> None:
    assert all(SENTENCES.values())


@pytest.mark.parametrize(("group", "word"), WORDS)
def test_every_word_composes_with_every_default(group: str, word: str) -> None:
    choice = f"[{word}]" if group in ("logger", "hook") and word != "auto" else word
    gpus = 1 if (node(group, word).get("_about_") or {}).get("device") == "cuda" else 0
    row = next(row for row in TABLE if row.name == ("Open MPI" if (group, word) == ("backend", "mpi") else "torchrun"))
    outside = word == "external" or row.name == "Open MPI"
    external = External(rank=0, world=2, local_world=2, row=row) if outside else None
    config = compose([f"{group}={choice}", *WITH.get((group, word), ())])
    plan = resolve(config, Cluster(gpus=gpus, cpus=2, external=external))
    if word != "auto":
        parts = (
            {"logger": plan.loggers, "hook": plan.hooks}[group]
            if group in ("logger", "hook")
            else {word: getattr(plan, group)}
        )
        assert parts[word]["_target_"] == node(group, word)["_target_"]


def test_every_model_is_built_without_memory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_embd": 12}')
    for word in (word for group, word in REAL if group == "model"):
        part = {name: value for name, value in node("model", word).items() if name != "_about_"}
        part |= {name: str(tmp_path) for name, value in part.items() if value == "???"}
        part |= {"task": "causal_lm"} if "task" in part else {}
        model = construct(part, facts=FACTS, seed=0)
        assert all(parameter.is_meta for parameter in model.parameters()), word
        assert sum(parameter.numel() for parameter in model.parameters()) > 0, word


def test_predictions_know_parts_by_facts_and_never_by_name() -> None:
    names = {word for group in ("strategy", "optim", "pipeline") for word in files.groups()[group]}
    names -= {"pipeline", "auto"}
    for path in (Path(dtrain.__file__).parent / "predict").glob("*.py"):
        constants = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert not constants & names, path


RENAMED = {
    "Drain", "Landed", "Held", "Share", "pass_over", "post", "posted", "keeper", "Keeper", "Book", "wish", "Asked", "Guard", "turned", "rests", "Absent",
    "Together", "OnPieces", "falls", "wire", "looking", "Seen", "looks", "unlucky", "blame", "traffic", "Tape", "divide", "relate", "word_of",
}  # fmt: skip
"""Names of an earlier, private language: the field has its own."""


def test_no_name_is_of_the_old_language() -> None:
    for path in Path(dtrain.__file__).parent.rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        names = {getattr(node, kind, None) for node in nodes for kind in ("id", "name", "arg", "attr")}
        assert not {name.strip("_") for name in names if isinstance(name, str)} & RENAMED, path
