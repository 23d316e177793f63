"""What a run leaves, changed by somebody else: each file is read, or refused in one sentence; nothing that is not what it says is trained on or exported."""

import contextlib
import io
import json
import operator
import os
import random
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoint.test_sharded import alone, commit, sharded, state_on
from launching import WORDS
from pool import ranks

from dtrain.build import build
from dtrain.checkpoint import commit as commits
from dtrain.checkpoint.format import parse
from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.data.text import Text
from dtrain.data.tokens import Tokens
from dtrain.errors import DtrainError, StoreError, WordsError
from dtrain.launcher.run import finished
from dtrain.loop.assemble import assemble, prepare
from dtrain.loop.spike import SpikeDetector
from dtrain.mesh import Mesh
from dtrain.resolve import resolve
from dtrain.storage import lease
from dtrain.storage.attempts import SCORES, listed, place
from dtrain.storage.jsonl import Journal
from dtrain.verb import checkpoint as verb
from dtrain.verb import diff
from dtrain.verb import train as verb_train


def relabel(attempt: Path, step: int, **more: Any) -> Path:
    """The checkpoint once more, as one of another step: the commit says so, and its digest is right."""
    target = attempt.parent.parent / f"step-{step:08d}" / attempt.name
    shutil.copytree(attempt, target)
    document = json.loads((target / commits.NAME).read_text())
    del document["digest"], document["format"]
    (target / commits.NAME).unlink()
    commits.write(str(target), {**document, "step": step, "facts": {**document["facts"], "step": step}, **more})
    return target


def test_a_checkpoint_that_was_relabelled_is_not_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tensors' own files say of which step they are."""

    def work(mesh: Mesh) -> tuple[int, list[str]]:
        state, checkpoint = state_on(mesh), sharded(mesh, tmp_path)
        for state.step in (40, 80):
            url = commit(checkpoint, state)
        relabel(Path(url), 999)
        again, restoring = state_on(mesh, steps=0), sharded(mesh, tmp_path)
        restoring.restore(again)
        return again.step, restoring.damaged

    step, damaged = alone(work)
    assert step == 80
    assert len(damaged) == 1 and "its tensors are of step 80, but the commit is of 999" in damaged[0]
    assert verb.run(["verify", f"out={tmp_path}"]) == 1
    with pytest.raises(StoreError, match="its tensors are of step 80, but the commit is of 999"):
        verb.run(["export", f"out={tmp_path}", "step=999", f"to={tmp_path / 'x'}"])
    assert not (tmp_path / "x/model.safetensors").exists()
    assert verb.run(["export", f"out={tmp_path}", f"to={tmp_path / 'x'}"]) == 0
    assert "the commit is of 999. Step 80 is used instead" in " ".join(capsys.readouterr().err.split())


def test_an_attempt_that_was_renamed_to_be_newer_is_not_accepted(tmp_path: Path) -> None:
    def work(mesh: Mesh) -> int:
        state, checkpoint = state_on(mesh), sharded(mesh, tmp_path)
        for state.step in (40, 80):
            commit(checkpoint, state)
        (old,) = (Path(one.url) for one in listed(str(tmp_path)) if one.step == 40)
        old.rename(old.with_name(f"00000009{old.name[8:]}"))
        again = state_on(mesh, steps=0)
        sharded(mesh, tmp_path).restore(again)
        return again.step

    assert alone(work) == 80


ODD: tuple[Any, ...] = (
    None,
    [],
    {},
    "",
    "ten",
    "../../etc/passwd",
    -1,
    0,
    10**30,
    1e300,
    float("nan"),
    True,
    [[]],
    {"a": {}},
    "\x00",
    "9" * 5000,
)


def mutated(
    data: bytes, chance: random.Random, read: Callable[[str], Any] | None, write: Callable[[Any], str]
) -> bytes:
    """Some bytes or one place of a document, changed."""
    if read is None or chance.random() < 0.3:
        at = chance.randrange(len(data))
        return chance.choice(
            [
                data[:at],
                data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :],
                data[:at] + data[at // 2 :],
                b"",
                data * 2,
            ]
        )
    document = read(data.decode())
    if chance.random() < 0.1:
        return write(chance.choice(ODD)).encode()
    place = document
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        if not keys:
            return write(document).encode()
        key = chance.choice(list(keys))
        if isinstance(place[key], dict | list) and place[key] and chance.random() < 0.7:
            place = place[key]
            continue
        if chance.random() < 0.2:
            del place[key]
        else:
            place[key] = chance.choice(ODD)
        return write(document).encode()


def lines_of(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def as_lines(rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows) if isinstance(rows, list) else json.dumps(rows) + "\n"


def fuzzed(out: Path, count: int) -> list[str]:
    """Faults: what was raised that is no DtrainError, or is not short."""
    words = ["model=mlp", *WORDS, f"out={out}", "checkpoint.every=6"]
    verb_train.one(compose(words))
    plan = resolve(compose(words), Cluster(gpus=0, cpus=1))
    lease.STALE_SECONDS = lease.LOOK_SECONDS = 0.01
    faults = []

    def hold() -> None:
        with lease.hold(str(out)):
            pass

    def rows(name: str) -> None:
        journal = Journal(str(out / name))
        journal.keep(lambda row: type(row.get("step")) is int and row["step"] <= 9)
        journal.close()

    def checkpoints() -> None:
        commits.first(commits.candidates(str(out)))
        verb.run(["ls", f"out={out}"])
        verb.run(["verify", f"out={out}"])

    attempt = Path(commits.find(str(out))[0])
    readers: list[tuple[Path, Callable[[], Any], Any, Any]] = [
        (out / "metrics.jsonl", lambda: (diff.run([str(out), str(out)]), rows("metrics.jsonl")), lines_of, as_lines),
        (out / "events.jsonl", lambda: (diff.run([str(out), str(out)]), rows("events.jsonl")), lines_of, as_lines),
        (
            out / "plan.yaml",
            lambda: (finished(plan), diff.run([str(out), str(out)]), verb.run(["ls", f"out={out}"])),
            yaml.safe_load,
            yaml.safe_dump,
        ),
        (
            out / "config.yaml",
            lambda: (
                resolve(compose([f"out={out}"], run=str(out)), Cluster(gpus=0, cpus=1)),
                diff.run([str(out), str(out)]),
            ),
            yaml.safe_load,
            yaml.safe_dump,
        ),
        (
            out / "result.json",
            lambda: (finished(plan), diff.run([str(out), str(out)])),
            json.loads,
            json.dumps,
        ),
        (next((out / "lease").iterdir()), hold, json.loads, json.dumps),
        (attempt / commits.NAME, checkpoints, json.loads, json.dumps),
        (next(attempt.glob("*.safetensors")), checkpoints, None, None),
    ]
    chance = random.Random(13)
    for path, read, load, dump in readers:
        data = path.read_bytes()
        for number in range(count):
            path.write_bytes(mutated(data, chance, load, dump))
            if path.name == commits.NAME and chance.random() < 0.7:  # by somebody who knows how its digest is made
                with contextlib.suppress(ValueError, TypeError, AttributeError):
                    document = json.loads(path.read_text())
                    document.pop("digest", None)
                    path.write_text(json.dumps({**document, "digest": commits.digest(document)}))
            try:
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    read()
            except DtrainError as error:
                sentences = error.problems if isinstance(error, WordsError) else [str(error)]
                if any(len(sentence.splitlines()) > 1 for sentence in sentences) or "This is a fault of dtrain" in str(
                    error
                ):
                    faults.append(f"{path.name} {number}: {error}")
            except Exception as error:
                import traceback

                faults.append(f"{path.name} {number}: {type(error).__name__}: {error} {traceback.format_exc()[-400:]}")
            for other in (out / "lease").iterdir():
                if path.parent.name == "lease" and other != path:
                    other.unlink()
            path.write_bytes(data)
    with contextlib.suppress(ValueError):
        parse(b"")
    return faults


@pytest.mark.campaign("fuzz")
@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_every_file_of_a_run_may_be_changed_and_is_refused_in_one_sentence(tmp_path: Path, count: int) -> None:
    (faults,) = ranks(1, fuzzed, tmp_path / "run", count, seconds=900)
    assert not faults, f"{len(faults)}:\n" + "\n".join(faults[:5])


def places_in(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value of a document, of lists to the first three."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:3]) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from places_in(value, (*at, key))


def changed(document: Any, at: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at one place; `...`: without it."""
    copy = json.loads(json.dumps(document))
    holder = reduce(operator.getitem, at[:-1], copy)
    if value is ...:
        del holder[at[-1]]
    else:
        holder[at[-1]] = value
    return copy


KINDS = (None, [], {}, "", "ten", -1, 0, 10**30, 0.5, True, ["x"], {"a": 1}, ...)
"""A value of each kind, one of which is of the right one; ...: none."""


def restored_from(out: Path, words: list[str], count: int) -> list[str]:
    """Faults of `count` commits, each with one value changed and a new digest of its own."""
    plan = resolve(compose(words), Cluster(gpus=0, cpus=1))
    (newest, older) = (one for one in listed(str(out)) if one.is_committed)
    path, chance, faults = Path(newest.url) / commits.NAME, random.Random(7), list[str]()
    document = json.loads(path.read_text())
    del document["digest"]
    document["facts"]["optim"] = {
        f"{next(name for name in document['tensors'] if name.startswith('optim.'))[:-5]}.extra": 1
    }
    ways = [at for at in places_in(document) if at[0] in ("facts", "step", "passed_over", "format", "attempt")]
    others = [at for at in places_in(document) if at not in ways]
    cases = [(at, value) for at in ways for value in KINDS] + [(at, value) for at in others for value in KINDS]
    with ExitStack() as stack:
        stack.enter_context(build(plan.backend).open())
        mesh = Mesh(plan.mesh, device=plan.device)
        for at, value in chance.sample(cases, count):
            forged = changed(document, at, value)
            path.write_text(json.dumps({**forged, "digest": commits.digest(forged)}))
            training = prepare(assemble(plan, mesh), began=0.0)
            training.state.spikes = SpikeDetector(plan.on_spike, **plan.spike, mesh=mesh, gates=None, scale=None)
            checkpoint = sharded(mesh, out)
            try:
                with contextlib.redirect_stderr(io.StringIO()) as said:
                    checkpoint.restore(training.state)
                    training.state.facts()
            except Exception as error:
                faults.append(f"{at}={value!r:.20}: {type(error).__name__}: {error}")
                continue
            step, sentence = training.state.step, checkpoint.damaged
            if (step, len(sentence)) not in ((newest.step, 0), (older.step, 1)) or bool(sentence) != bool(
                said.getvalue()
            ):
                faults.append(f"{at}={value!r:.20}: step {step}, {sentence}, {said.getvalue()}")
    return faults


def test_a_forged_commit_is_passed_over_or_read_right(tmp_path: Path) -> None:
    """200 commits, each with one value of another kind, or without it, that say that they are whole."""
    words = ["model=mlp", *WORDS, f"out={tmp_path}/run", "checkpoint.every=2", "steps=4", "hook=[]", "logger=[]"]
    verb_train.one(compose(words))
    (faults,) = ranks(1, restored_from, tmp_path / "run", words, 200, seconds=300)
    assert not faults, f"{len(faults)}:\n" + "\n".join(faults[:30])


def resigned(folder: Path, **more: Any) -> None:
    """The commit in a folder with other values, and a digest that is right."""
    document = json.loads((folder / commits.NAME).read_text()) | more
    del document["digest"]
    (folder / commits.NAME).write_text(json.dumps({**document, "digest": commits.digest(document)}))


@pytest.mark.parametrize("of_one_process", [True, False])
def test_a_checkpoint_of_another_seed_is_passed_over_for_one_of_its_own_process(
    tmp_path: Path, of_one_process: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model=mlp", *WORDS, f"out={tmp_path}/run", "checkpoint.every=2", "steps=4", "hook=[]"]
    verb_train.one(compose(words))
    (newest, older) = (Path(one.url) for one in listed(f"{tmp_path}/run") if one.is_committed)
    facts = json.loads((newest / commits.NAME).read_text())["facts"]
    resigned(newest, facts={**facts, "stream": {**facts["stream"], "seed": 9}})
    (tmp_path / "run" / "result.json").unlink()
    if of_one_process:
        verb_train.one(compose(words))
        assert "another seed, unlike others that its process wrote" in " ".join(capsys.readouterr().err.split())
        assert commits.find(f"{tmp_path}/run")[1]["passed_over"] == [place(str(newest))]
    else:
        name = f"{older.name[:25]}00000000{older.name[33:]}"
        resigned(older, attempt=name)
        older.rename(older.with_name(name))
        with pytest.raises(WordsError, match="the checkpoint is of a run with another seed"):
            verb_train.one(compose(words))


FORGED: dict[str, tuple[str, str]] = {
    "a plan that is a list": ("plan.yaml", "[1, 2]"),
    "a plan of another": ("plan.yaml", "batch: 7"),
    "a plan that is not YAML": ("plan.yaml", "a: ["),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_start_beside_a_forged_plan_is_refused_in_one_sentence(tmp_path: Path, kind: str) -> None:
    name, text = FORGED[kind]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text(text)
    with pytest.raises(StoreError, match=r"it is no plan: .* Remove it, or type out=") as refused:
        verb_train.one(compose(["model=mlp", *WORDS, f"out={tmp_path / 'run'}"]))
    assert refused.value.exit_code == 3 and ("it is not YAML" in str(refused.value)) == ("YAML" in kind)


def test_a_start_beside_the_checkpoints_of_a_plan_without_a_seed_is_refused(tmp_path: Path) -> None:
    config = compose(["model=mlp", *WORDS, f"out={tmp_path}"])
    document = resolve(config, Cluster(gpus=0, cpus=1)).to_dict()
    del document["seed"]
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(document))
    (tmp_path / "checkpoints/step-00000010").mkdir(parents=True)
    with pytest.raises(WordsError, match=r"holds a run with another seed \(none there, 0 here\)"):
        verb_train.one(config)


def test_a_row_that_is_null_is_dropped_and_its_step_is_told(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"step": 1}\nnull\n{"step": 3}\n')
    journal = Journal(str(tmp_path / "rows.jsonl"))
    assert journal.keep(lambda row: row["step"] <= 3) == [{"step": 1}]
    journal.close()


def make_socket(path: Path) -> None:
    """Bound by its name alone: the whole path may be longer than an address."""
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


NO_FILES: dict[str, Callable[[Path], None]] = {
    "a named pipe": os.mkfifo,
    "a socket": make_socket,
    "a folder": Path.mkdir,
}


def said_of(out: Path, make: Callable[[Path], None]) -> dict[str, str]:
    """What is said of each file of a run that something else stands for; nothing where the run does without it."""
    words = ["model=mlp", *WORDS, f"out={out}", "checkpoint.every=6"]
    verb_train.one(compose(words))
    plan = resolve(compose(words), Cluster(gpus=0, cpus=1))

    def hold() -> None:
        with lease.hold(str(out)):
            pass

    def row() -> None:
        journal = Journal(str(out / "metrics.jsonl"))
        journal.append({"step": 1})
        raise StoreError("; ".join(journal.warnings))

    def committed() -> None:
        assert verb.run(["verify", f"out={out}"]) == 1
        commits.read(str(attempt), listed(str(out))[0].files)

    attempt, data, cache = Path(commits.find(str(out))[0]), out.parent / "tokens.bin", str(out.parent / "cache")
    tokens = Tokens(path=str(data), holdout_path=None, holdout=0.1, vocab=256, sequence=8, dtype="uint8", cache=cache)
    text = Text(path=str(data.with_suffix(".txt")), sequence=8, tokenizer="bytes", holdout=0.1, cache=cache)
    readers: dict[Path, Callable[[], Any]] = {
        out / "plan.yaml": lambda: finished(plan),
        out / "result.json": lambda: finished(plan),
        out / "config.yaml": lambda: compose([f"recipe={out}/config.yaml"]),
        next((out / "lease").iterdir()): hold,
        out / "metrics.jsonl": row,
        attempt / commits.NAME: committed,
        attempt / SCORES: lambda: verb.run(["ls", f"out={out}"]),
        next(attempt.glob("*.safetensors")): committed,
    }
    found = {}
    for path, read in [*readers.items(), (data, lambda: len(tokens)), (data.with_suffix(".txt"), lambda: len(text))]:
        away = path.rename(path.with_name("away")) if path.exists() else None
        make(path)
        try:
            read()
            found[path.name] = ""
        except DtrainError as error:
            found[path.name] = str(error)
        (path.rmdir if path.is_dir() else path.unlink)()
        if away:
            away.rename(path)
    return found


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_is_told_in_one_sentence_and_waited_for_by_nobody(kind: str, tmp_path: Path) -> None:
    (said,) = ranks(1, said_of, tmp_path / "run", NO_FILES[kind])
    clause = f"it is {kind}, not a file" if kind != "a folder" else "is a directory"
    named = {name for name, sentence in said.items() if clause in sentence or clause in sentence.lower()}
    told = {"00000001.json", "metrics.jsonl", "COMMIT.json"}
    if kind == "a folder":
        assert "a folder without a recipe" in said["config.yaml"]
        assert "no file is there" in said["tokens.bin"] and "no file is there" in said["tokens.txt"]
    else:
        told |= {"config.yaml", "tokens.bin", "tokens.txt"}
    assert told - named == set(), said
    assert {name for name, sentence in said.items() if not sentence} == {"plan.yaml", "result.json", SCORES}, (
        "the run does without them"
    )
    assert all(len(sentence.splitlines()) <= 1 for sentence in said.values()), said
