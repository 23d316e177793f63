"""Over all tools: no key is dropped, every recipe is planned, and the tool is known by its keys."""

import ast
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from imported import FILES, TYPED, Imported, example, imported, keys

import dtrain.integrations.importers as dialects
from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.compose.check import sayable
from dtrain.errors import WordsError
from dtrain.integrations.importers import DIALECTS, complete, load, recognise, translate
from dtrain.integrations.importers.ledger import find
from dtrain.integrations.importers.read import parse
from dtrain.integrations.importers.write import command, recipe
from dtrain.resolve import resolve

EXAMPLES = sorted(path.name for path in FILES.iterdir())
PYTHON = {
    "lightning_script.py": 32,
    "lightning_fsdp.py": 15,
    "ray_script.py": 14,
    "transformers_sft.py": 25,
    "script_accelerate.py": 27,
    "script_torchrun.py": 16,
}
"""Arguments of the calls in them, and classes of objects among those, counted by hand."""
NAMES = {"ds": "deepspeed"}
GPUS = {"torchtitan_405b.toml": 8}
"""fp8 needs a device that has it."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_key_is_in_one_list(name: str) -> None:
    keys_listed = [entry.key for entry in example(name).ledger.entries]
    others = [key for key in keys_listed if ": " in key]
    if name in PYTHON:
        assert len(keys_listed) == len(set(keys_listed)) == PYTHON[name]
    else:
        assert sorted(set(keys_listed) - set(others)) == keys(FILES / name)
    assert len(keys_listed) == len(set(keys_listed))
    for file in {key.partition(": ")[0] for key in others}:
        assert sorted(key.partition(": ")[2] for key in others if key.startswith(f"{file}: ")) == keys(FILES / file)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_key_stands_in_the_recipe_with_a_reason(name: str) -> None:
    read: Imported = example(name)
    heads = [
        line
        for line in read.recipe.splitlines()
        if line.startswith("# ") and line.endswith(")") and line[2] in "cnr" and line[3] != " "
    ]
    counts = [len(read.told(kind)) for kind in ("carried", "unneeded", "refused")]
    assert [f"({count})" in line for count, line in zip(counts, heads[-3:], strict=True)] == [True] * 3
    for entry in read.ledger.entries:
        assert entry.why.strip()
        assert f"#   {entry.key} = " in read.recipe


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_recipe_is_planned(name: str, tmp_path: Path) -> None:
    plan = example(name).plan(tmp_path, gpus=GPUS.get(name, 0))
    assert plan.batch.size == plan.batch.microbatch * plan.batch.data * plan.batch.accumulate


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_recipe_says_nothing_that_a_file_does_not(name: str) -> None:
    """Each word comes from a key, or is marked as a default of theirs."""
    read = example(name)
    carried = " ".join(read.told("carried").values())
    for word in read.words:
        assert f"{word}=" in carried or word in read.ledger.implied, word
    document = yaml.safe_load(read.recipe)
    assert isinstance(document, dict)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_tool_is_known_by_its_keys(name: str) -> None:
    start = name.split("_")[0]
    assert example(name).name == NAMES.get(start, start)


def test_there_are_enough_examples() -> None:
    count = {dialect: sum(example(name).name == dialect for name in EXAMPLES) for dialect in DIALECTS}
    assert count["deepspeed"] >= 5
    assert count["accelerate"] >= 5
    assert count["torchtune"] + count["axolotl"] >= 5
    assert all(number >= 2 for number in count.values())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_unknown_key_is_refused_with_a_near_name(dialect: str, tmp_path: Path) -> None:
    key, meant = {
        "accelerate": ("mixed_precison", "mixed_precision"), "axolotl": ("gradient_checkpointin", "gradient_checkpointing"), "deepspeed": ("gradient_cliping", "gradient_clipping"),
        "lightning": ("trainer.accumulate_grad_batch", "trainer.accumulate_grad_batches"), "ray": ("num_worker", "num_workers"),
        "torchtitan": ("training.max_nrom", "training.max_norm"), "torchtune": ("log_every_n_step", "log_every_n_steps"),
        "transformers": ("lr_scheduler_typ", "lr_scheduler_type"), "wandb": ("run_cpa", "run_cap"),
        "script": ("loop.Accelerator.mixed_precison", "loop.Accelerator.mixed_precision"),
    }[dialect]  # fmt: skip
    *sections, leaf = key.split(".")
    tree: dict[str, object] = {leaf: 1}
    for section in reversed(sections):
        tree = {section: tree}
    (entry,) = translate(tree, dialect, "file").entries
    assert (entry.key, entry.kind) == (key, "refused")
    assert f"Did you mean {meant}?" in entry.why


@pytest.mark.parametrize(
    ("dialect", "tree", "near"),
    [
        (
            "deepspeed",
            {"zero_optimization": {"offload_optimiser": {"device": "cpu"}}},
            "Did you mean zero_optimization.offload_optimizer.device?",
        ),
        ("lightning", {"trainer": {"gpuz": 2}}, "Did you mean trainer.gpus?"),
        ("lightning", {"trainer": {"grus": 2}}, "Did you mean trainer.gpus?"),
        ("lightning", {"trainer": {"loggin": 2}}, "Remove it"),
        ("ray", {"run_config": {"num_workes": 2}}, "Remove it"),
        (
            "ray",
            {"run_config": {"checkpoint_config": {"num_to_kep": 2}}},
            "Did you mean run_config.checkpoint_config.num_to_keep?",
        ),
        ("torchtitan", {"training": {"warmup_steps": 9}}, "Did you mean lr_scheduler.warmup_steps?"),
    ],
)
def test_a_near_name_is_one_that_is_there(dialect: str, tree: dict[str, Any], near: str) -> None:
    (entry,) = [entry for entry in translate(tree, dialect, "file").entries if entry.kind == "refused"]
    assert near in entry.why


def test_an_unknown_key_is_no_near_name_of_another() -> None:
    told = [
        entry.why
        for entry in translate({"base_model": "x", "my_knob": 1, "my_knobs": 2}, "axolotl", "file").entries[1:]
    ]
    assert not any("Did you mean my_knob" in why for why in told)
    (why,) = [
        entry.why
        for entry in translate({"base_model": "x", "n_embd": 64}, "axolotl", "file").entries
        if entry.key == "n_embd"
    ]
    assert "Type model.width=64." in why


ADVICE = re.compile(r"(?<![\w.<{/%$\[-])([a-z_]+(?:\.[a-z_]+)*)=(?=[^\s=])")
OTHERS = {"to", "as", "default", "save_top_k", "out_options.key", "model.pretrained_model_name_or_path", "split"}
"""Not words of a run, or arguments of a model of transformers, or of datasets."""


@pytest.mark.parametrize(
    ("dialect", "tree", "asked"),
    [
        ("axolotl", {"base_model": "x", "bf16": "sometimes"}, {"precision"}),
        ("deepspeed", {"train_batch_size": 8, "amp": {"enabled": True, "opt_level": "O1"}}, {"precision"}),
        ("deepspeed", {"train_batch_size": 8, "gradient_clipping": True}, {"clip"}),
        (
            "deepspeed",
            {"train_batch_size": 8, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4}}},
            {"schedule", "schedule.warmup"},
        ),
        ("accelerate", {"distributed_type": "NO", "mixed_precision": "int8"}, {"precision"}),
        ("lightning", {"trainer": {"max_steps": 3, "precision": "64-true"}}, {"precision"}),
        (
            "lightning",
            {"trainer": {"max_steps": 3}, "optimizer": {"class_path": "lion.Lion", "init_args": {"lr": 1}}},
            {"optim", "optim.lr", "optim.weight_decay"},
        ),
        (
            "lightning",
            {"trainer": {"max_steps": 3}, "lr_scheduler": {"class_path": "torch.optim.lr_scheduler.StepLR"}},
            {"schedule", "schedule.warmup"},
        ),
        ("torchtitan", {"training": {"dtype": "float16", "local_batch_size": 1}}, {"precision"}),
        (
            "torchtitan",
            {"training": {"local_batch_size": 1}, "optimizer": {"name": "Adafactor"}},
            {"optim", "optim.lr", "optim.weight_decay"},
        ),
        ("torchtune", {"batch_size": 2, "dtype": "fp16"}, {"precision"}),
        ("torchtune", {"batch_size": 2, "clip_grad_norm": "some"}, {"clip"}),
        ("torchtune", {"batch_size": 2, "model": {"_component_": "mine.build"}}, {"model"}),
    ],
)
def test_what_every_run_needs_is_asked_for_where_it_is_refused(
    dialect: str, tree: dict[str, Any], asked: set[str]
) -> None:
    ledger = translate(tree, dialect, "file")
    complete(ledger)
    code = (
        {"model", "data", "data.holdout", "objective", "optim", "schedule", "batch"}
        if dialect == "lightning"
        else set()
    )
    found = {word for word in ledger.command if ledger.asks(word)}
    assert found - code == asked - code and asked <= found, "code of the classes of Lightning is always asked for"
    assert {word: ledger.words[word] for word in asked} == dict.fromkeys(asked, "???")


def test_what_is_to_be_typed_instead_is_there() -> None:
    """Every word that a sentence of a dialect suggests."""
    suggested = {
        word
        for path in (Path(dialects.__file__).parent).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for word in ADVICE.findall(node.value)
    }
    assert len(suggested) > 40
    assert {word for word in suggested if not word.endswith("._target_")} - {*sayable()} - OTHERS == set()


ODD = ["?", [], [1, "x"], {}, -3, 0, 1.5, True, False, None, 10**18, "auto", "no", {"a": {"b": 1}}]
"""Values that a key may never have."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_value_breaks_a_dialect(name: str) -> None:
    """Each value of an example in turn is another one: every key is told once all the same."""
    for number, path in enumerate(_paths(_tree(name))):
        _with(name, path, ODD[number % len(ODD)])


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_no_value_at_all_breaks_a_dialect(name: str) -> None:
    for path in _paths(_tree(name)):
        for value in ODD:
            _with(name, path, value)


def _tree(name: str) -> Any:
    return deepcopy(_parsed(name))


@cache
def _parsed(name: str) -> Any:
    return parse((FILES / name).read_bytes(), name)


def _paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    below = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list) and any(isinstance(one, dict) for one in node)
        else ()
    )
    if not below:
        yield path
    for key, value in below:
        yield from _paths(value, (*path, key))


def _with(name: str, path: tuple[Any, ...], value: Any) -> None:
    tree = node = _tree(name)
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    ledger = translate(tree, example(name).name, str(FILES / name))
    complete(ledger)
    assert recipe(ledger, (), "mine.yaml")
    keys_listed = [entry.key for entry in ledger.entries if ": " not in entry.key]
    assert sorted(keys_listed) == sorted(ledger.leaves), (path, value)


def test_a_file_that_two_tools_may_read_asks_which() -> None:
    with pytest.raises(WordsError, match=r"could be a file of \w+ or \w+.* Type as="):
        recognise({"train_batch_size": 8, "num_workers": 2}, "file")


def test_a_file_of_no_tool_says_which_are_known() -> None:
    with pytest.raises(WordsError, match="deepspeed"):
        recognise({"name": "compose", "services": {"web": 1}}, "file")


def test_a_dialect_is_said_with_a_near_name() -> None:
    with pytest.raises(WordsError, match="Did you mean deepspeed"):
        load("deepsped")


def test_patterns_of_a_table() -> None:
    rules = {"a": "plain", "a.*": "one", "b.**": "all", "c.*.d": "middle"}
    matches = {key: find(rules, key) for key in ("a", "a.x", "a.x.y", "b.x.y", "b", "c.0.d", "c.0.e")}  # type: ignore[arg-type]
    assert matches == {
        "a": "plain",
        "a.x": "one",
        "a.x.y": None,
        "b.x.y": "all",
        "b": None,
        "c.0.d": "middle",
        "c.0.e": None,
    }


def test_a_secret_is_shown_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8, "comet": {"enabled": true, "api_key": "q8Xk2LmZt0Vbh1"}}')
    assert "q8Xk2LmZt0Vbh1" not in imported(path).recipe


HOSTILE = "a\nsteps: 7\rsteps: 7\x85steps: 7\u2028steps: 7 $(touch ran) `touch ran` '; touch ran #"


@pytest.mark.parametrize(
    "tree",
    [
        {"output_dir": HOSTILE},
        {HOSTILE: 1},
        {"output_dir": "x", "seed": HOSTILE},
        {"epochs": HOSTILE},
        {"optimizer": {HOSTILE: HOSTILE}},
    ],
)
def test_no_text_of_theirs_becomes_a_word_or_a_command(tree: dict[str, Any], tmp_path: Path) -> None:
    ledger = translate({"batch_size": 2, **tree}, "torchtune", "tune.yaml")
    written = recipe(ledger, (), "mine.yaml")
    assert set(yaml.safe_load(written)) == {"microbatch", "clip"}
    subprocess.run(
        ["bash", "-c", f"dtrain() {{ :; }}; {command(ledger, 'mine.yaml')}"],
        cwd=tmp_path,
        timeout=300,
        check=False,
        capture_output=True,
    )
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["my file.yaml", "<this file>"])
def test_the_recipe_is_one_word_of_both_commands(name: str) -> None:
    ledger = translate({"batch_size": 2, "epochs": 3}, "torchtune", "tune.yaml")
    complete(ledger)
    for line in recipe(ledger, (), name).splitlines()[2:4]:
        assert f"recipe={name}" in shlex.split(line)


def test_a_file_does_not_say_whose_code_is_trusted(tmp_path: Path) -> None:
    path = tmp_path / "tune.yaml"
    path.write_text("model:\n  _component_: os.system\n  command: touch ran\nmax_steps_per_epoch: 3\n")
    read = imported(path)
    assert "trust" not in read.command
    assert "model._target_" not in read.words
    assert "If you trust its package" in read.told("refused")["model.command"]


OPTIONS = ("optim.lr=1e-3", "optim.betas=[0.9,0.99]", "optim.weight_decay=0")


@pytest.mark.parametrize(
    ("name", "epochs"), [("torchtune_lora.yaml", 1), ("axolotl_fft.yaml", 2), ("lightning_fsdp.py", 3)]
)
def test_epochs_are_counted_where_the_data_is(name: str, epochs: int, tmp_path: Path) -> None:
    """Steps follow from the rows of the data that is typed, and steps on the command line take their place."""
    read = example(name)
    assert read.words["epochs"] == epochs and not {"steps", "epochs"} & read.command.keys()
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a", "y": 1.0}\n' * 1680)
    path = tmp_path / "recipe.yaml"
    path.write_text(read.recipe)
    answers = {word: TYPED[word] for word in TYPED if read.ledger.words.get(word) == "???"}
    answers |= {"model": "mlp", "adapter": "none", "data": "jsonl", "data.holdout": 0, "objective": "regression"}
    more = [f"data.path={rows}", "data.inputs=[y]", "data.targets=y", "strategy=ddp", "remat=none", "batch=840"]
    words = [f"recipe={path}", *(f"{word}={value}" for word, value in answers.items() if word != "batch"), *more]
    words += ["devices=1", "microbatch=1", "accumulate=840"]
    plan = resolve(compose(words), Cluster(gpus=0, cpus=2))
    assert plan.steps == 2 * epochs and f"epochs={epochs}" in plan.why["steps"]
    assert resolve(compose([*words, "steps=7"]), Cluster(gpus=0, cpus=2)).steps == 7


@pytest.mark.parametrize("name", sorted(path.name for path in FILES.iterdir()))
def test_no_default_model_or_data_takes_the_place_of_theirs(name: str, tmp_path: Path) -> None:
    """What code makes is ??? in the recipe, and in angle brackets in both commands."""
    read = example(name)
    lines = read.recipe.splitlines()[2:4]
    for part in ("model", "data"):
        if part in read.words or f"{part}._target_" in read.words:
            continue
        assert read.ledger.words[part] == "???" and all(f"'{part}=<" in line for line in lines), part


def test_steps_that_are_computed_are_asked_for(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from lightning import Trainer\nhours = 3\nTrainer(max_steps=hours * 1000, devices=2)\n")
    assert imported(script).ledger.words["steps"] == "???"
    script.write_text("from lightning import Trainer\nTrainer(max_steps=300, max_epochs=3)\n")
    assert imported(script).words["steps"] == 300 and "steps" not in imported(script).command


@pytest.mark.parametrize(
    ("dialect", "tree", "word"),
    [
        ("axolotl", {"base_model": "https://host.example/{}", "micro_batch_size": 1}, "model.name"),
        ("axolotl", {"base_model": "me/small", "micro_batch_size": 1, "model_config": {"name": "{}"}}, "model.config"),
        ("transformers", {"model_name_or_path": "https://host.example/{}", "num_train_epochs": 1}, "model.name"),
    ],
)
def test_no_text_of_theirs_looks_up_what_is_here(dialect: str, tree: dict[str, Any], word: str) -> None:
    ledger = translate(json.loads(json.dumps(tree).replace("{}", "${oc.env:HOME}")), dialect, "theirs.yaml")
    complete(ledger)
    said = [line for line in recipe(ledger, (), "mine.yaml").splitlines() if not line.startswith("#  ")]
    assert "oc.env" not in "".join(said)
    assert ledger.asks(word)


@pytest.mark.parametrize("path", ["me/$(touch ran)", "me/'$(touch ran)'", "me/`touch ran`", 'me/";touch ran;"'])
def test_a_line_that_fetches_rows_runs_no_text_of_theirs(path: str, tmp_path: Path) -> None:
    tree = {"base_model": "me/small", "datasets": [{"path": path, "split": path, "type": "chat_template"}]}
    why = next(entry.why for entry in translate(tree, "axolotl", "a.yaml").entries if entry.key == "datasets.0.path")
    line = why[why.index("python -c") :].removesuffix(".")
    _, _, code = shlex.split(line)
    rows = code.split("; ", 1)[1]
    call = ast.parse(rows).body[0].value.func.value  # type: ignore[attr-defined]
    assert [ast.literal_eval(each) for each in (*call.args, call.keywords[0].value)] == [path, path]
    commands = f"python() {{ :; }}; {line}"
    subprocess.run(["bash", "-c", commands], cwd=tmp_path, timeout=300, check=True, capture_output=True)
    assert not (tmp_path / "ran").exists()
