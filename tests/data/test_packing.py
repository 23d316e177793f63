"""Packed rows: every token once, each document by itself, the same windows everywhere; and losses and gradients of rows that are not packed."""

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
import torch
from data.files import write
from data.packs import VOCAB, WINDOW, documents, jsonl, padded, written
from data.test_rows import BUILD
from pool import ranks, resident
from small import PARTS, STRATEGIES, few_steps

from dtrain.build import build
from dtrain.data import packing
from dtrain.errors import DtrainError

NOWHERE = np.zeros(1, int)


def source(path: str, **given: Any) -> Any:
    return build(jsonl(path, **given))


def windows(made: Any) -> list[list[list[int]]]:
    """The documents of each window."""
    batch = made.take(np.arange(len(made)), np.zeros(len(made), int))
    found = []
    for tokens, positions, targets in zip(
        batch["inputs"]["input_ids"].tolist(), batch["inputs"]["position_ids"].tolist(), batch["targets"].tolist(), strict=True
    ):  # fmt: skip
        starts = [place for place, position in enumerate(positions) if position == 0] + [len(tokens)]
        rows = [(tokens[a:b], targets[a:b]) for a, b in pairwise(starts)]
        if all(target == -100 for target in rows[-1][1]) and set(rows[-1][0]) == {0}:
            rows.pop()  # the padding, a document of its own
        for row, labels in rows:
            assert labels[:-1] == row[1:]
        found.append([row for row, _ in rows])
    return found


@pytest.mark.parametrize("window", [1, 7, 24, 300])
def test_each_token_is_in_one_window_and_no_window_is_too_full(window: int) -> None:
    lengths = np.random.default_rng(window).integers(0, 60, 500)
    packs = packing.packed(lengths, window)
    assert packs.length.max() <= window and packs.ends[-1] == len(packs.row)
    seen = [{*range(0)} for _ in lengths]
    for number in range(len(packs)):
        piece = packs.pieces(number)
        assert 0 < packs.length[piece].sum() <= window
        for row, begin, length in zip(packs.row[piece], packs.begin[piece], packs.length[piece], strict=True):
            tokens = {*range(begin, begin + length)}
            assert not tokens & seen[row]
            seen[row] |= tokens
    assert [len(each) for each in seen] == lengths.tolist()


@pytest.mark.campaign("documents")
def test_no_more_windows_are_needed_than_trl_needs(tmp_path: Path) -> None:
    code = """
import json, sys
from datasets import Dataset
from trl.data_utils import pack_dataset
for seed, longest in ((0, 60), (1, 24), (2, 90)):
    import numpy as np
    lengths = np.random.default_rng(seed).integers(1, longest, 3000)
    rows = Dataset.from_dict({"input_ids": [[1] * n for n in lengths.tolist()]})
    print(json.dumps([lengths.tolist(), 100, len(pack_dataset(rows, 100, strategy="bfd"))]))
"""
    done = commands.python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        lengths, window, theirs = json.loads(line)
        assert len(packing.packed(np.array(lengths), window)) <= theirs


def test_documents_stay_whole_and_are_all_there(tmp_path: Path) -> None:
    rows = [[1, 2, 3], [4], [5, 6, 7, 8], [9, 10, 11, 12, 1, 2, 3, 4, 5, 6, 7], [], [8, 9]]
    made = source(written(tmp_path / "a.jsonl", rows), sequence=5)
    flat = sorted(document for window in windows(made) for document in window)
    # the row of 11 tokens in parts of 5, 5 and 1
    whole = [row for row in rows if 0 < len(row) <= 5]
    assert len(flat) == len(whole) + 3
    assert sum(map(len, flat)) == sum(map(len, rows))
    assert "1 of 6 rows are longer than data.sequence=5: they are split" in made.notes[1]
    assert "1 of 6 rows have no token" in made.notes[2]


def test_a_part_of_a_split_row_knows_the_token_after_it(tmp_path: Path) -> None:
    made = source(written(tmp_path / "a.jsonl", [[1, 2, 3, 4, 5, 6], [7]]), sequence=4)
    batch = made.take(np.arange(len(made)), np.zeros(len(made), int))
    after = {
        int(token): int(target)
        for token, target in zip(batch["inputs"]["input_ids"].flatten(), batch["targets"].flatten(), strict=True)
        if token
    }
    assert after == {1: 2, 2: 3, 3: 4, 4: 5, 5: 6, 6: -100, 7: -100}


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_windows_are_the_same_from_every_format_and_after_a_restart(format: str, tmp_path: Path) -> None:
    rows = documents(200)
    path = write(tmp_path / f"rows.{format}", [{"input_ids": row} for row in rows])
    given = {
        "path": path, "inputs": "input_ids", "targets": "input_ids", "shift": True, "holdout": 0.1, "outputs": VOCAB, "packing": "pack",
        "sequence": WINDOW, "cache": str(tmp_path / "cache"),
    }  # fmt: skip
    made, again = BUILD[format](**given), BUILD[format](**given)
    positions = np.arange(3 * len(made))
    index, epoch = made.order(positions, seed=3)
    assert sorted(index[: len(made)]) == [*range(len(made))], "each window once in a pass"
    assert (index == again.order(positions, seed=3)[0]).all() and (epoch == positions // len(made)).all()
    assert made.fingerprint == again.fingerprint
    assert torch.equal(made.take(index[:9], epoch[:9])["targets"], again.take(index[:9], epoch[:9])["targets"])
    held = made.holdout()
    assert sorted(row for part in (made, held) for window in windows(part) for row in window) == sorted(rows)


def test_rows_of_a_window_of_parquet_lie_in_one_row_group(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [[group] * (1 + place % 9) for group in range(4) for place in range(50)]
    pq.write_table(pa.table({"input_ids": rows}), tmp_path / "a.parquet", row_group_size=50)
    made = BUILD["parquet"](
        path=str(tmp_path / "a.parquet"), inputs="input_ids", targets="input_ids", shift=True, holdout=0.1, outputs=VOCAB, packing="pack",
        sequence=WINDOW, cache=str(tmp_path / "cache"),
    )  # fmt: skip
    assert all(len({*row}) == 1 for window in windows(made) for row in window)
    assert all(len({row[0] for row in window}) == 1 for window in windows(made))
    assert len(made.holdout()) >= 1


def test_rows_that_were_added_leave_the_windows_of_a_run_as_they_were(tmp_path: Path) -> None:
    rows = documents(60)
    path = written(tmp_path / "a.jsonl", rows[:40])
    before = source(path, holdout=0.1)
    kept, held = windows(before), windows(before.holdout())
    written(tmp_path / "a.jsonl", rows)
    after = source(path, holdout=0.1)
    held_after = after.holdout()
    assert after.fingerprint != before.fingerprint and len(after) > len(before)
    assert "20 rows were added" in after.as_of(before.fingerprint)[0]
    assert windows(after) == kept and windows(held_after) == held and after.fingerprint == before.fingerprint
    assert after.as_of(before.fingerprint.replace("-24", "-25")) is None


@pytest.mark.parametrize(
    ("rows", "given", "sentence"),
    [
        ([[1, 2, 3], [1, 2, 3, 4]], {"sequence": 2}, "data.sequence=2: all 2 rows are longer, the shortest has 3 tokens"),
        ([[], []], {}, "none of the 2 rows has a token"),
        ([[1], [2], []], {}, "data.shift=true: all 3 rows are single tokens"),
        ([[0.5], [1.5]], {}, "column input_ids holds lists of numbers. Name one of tokens"),
        ([1, 2], {"shift": False}, "column input_ids holds whole numbers. Name one of tokens"),
        ([[[1], [1]], [[2], [2]]], {}, "row 0 has tokens of the shape [2, 1]"),
        ([[*range(12)]] * 2, {"targets": "next"}, "data.shift=true: the targets of these samples are the next tokens already"),
        ([[1, 2]] * 2, {"targets": "one"}, "has 2 tokens of input_ids, but 1 of one"),
        ([[1, 2]] * 2, {"inputs": ["input_ids", "one"], "targets": "next"}, "one input and one target, not input_ids, one, next"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_packed_are_refused(
    rows: Any, given: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    lines = [{"input_ids": row, "next": [*row[1:], 0] if isinstance(row, list) else 0, "one": [1]} for row in rows]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DtrainError) as error:
        source(str(tmp_path / "a.jsonl"), **given).take(NOWHERE, NOWHERE)
    assert sentence in str(error.value)


GPT = {"_target_": "data.packed_models.gpt"}
MOE = {"_target_": "data.packed_models.moe"}
LLAMA = {"_target_": "data.packed_models.llama"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int, int]:
    """(path, rows, windows) of documents that fill an even number of windows."""
    rows = documents(42, seed=4)
    path = written(tmp_path_factory.mktemp("packs") / "a.jsonl", rows)
    count = len(source(path))
    if count % 2:
        path = written(tmp_path_factory.mktemp("packs") / "a.jsonl", [*rows, [1] * WINDOW])
    return path, len(rows) + count % 2, count + count % 2


def unlike(run: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    """How far the loss is, and each gradient relative to its largest value."""
    assert run["gradients"].keys() == reference["gradients"].keys()
    far = {"loss": abs(run["losses"][0] - reference["losses"][0])}
    for name, values in reference["gradients"].items():
        here, there = torch.tensor(run["gradients"][name]), torch.tensor(values)
        far[name] = ((here - there).abs().max() / there.abs().max()).item()
    return far


def one_step(model: Any, data: Any, size: int, degrees: dict[str, int], **given: Any) -> dict[str, Any]:
    split = any(size > 1 for size in degrees.values())
    strategy = (
        {}
        if not split or [*degrees] == ["pp"]
        else {"strategy": STRATEGIES["fsdp" if "dp_shard" in degrees else "ddp"]}
    )
    work = partial(few_steps, {**PARTS, **strategy, "model": model, "data": data}, degrees, size=size, steps=1, **given)
    world = int(np.prod([*degrees.values()])) if degrees else 1
    if world == 1:
        runs: list[dict[str, Any]] = resident(1, work)
        return runs[0]
    runs = (resident if "gpt" in model["_target_"] else ranks)(world, work)
    stages = {name: {key: value for run in runs for key, value in run[name].items()} for name in ("gradients",)}
    return runs[0] | stages


def check_one_step(files: tuple[str, int, int], model: Any, degrees: dict[str, int], **given: Any) -> None:
    path, rows, count = files
    reference = one_step(model, padded(path), rows, {}, microbatch=rows)
    run = one_step(model, jsonl(path), count, degrees, microbatch=count // 2, **given)
    assert max(unlike(run, reference).values()) < 2e-6, unlike(run, reference)
    assert abs(run["losses"][0] - reference["losses"][0]) < 1e-6


LAYOUTS = [({}, {}), ({"cp": 2}, {}), ({"cp": 2}, {"context": "ulysses"})]
MORE = [({"dp_shard": 2}, {}), ({"tp": 2}, {}), ({"pp": 2}, {})]


@pytest.mark.parametrize(("degrees", "given"), LAYOUTS)
def test_losses_and_gradients_are_those_of_padded_rows(degrees: Any, given: Any, files: Any) -> None:
    check_one_step(files, GPT, degrees, **given)


@pytest.mark.campaign("8 ranks")
@pytest.mark.parametrize("model", [GPT, MOE, LLAMA], ids=["gpt", "moe", "llama"])
@pytest.mark.parametrize(
    ("degrees", "given"), [*LAYOUTS, *MORE, ({"cp": 2, "pp": 2}, {}), ({"cp": 4}, {}), ({"tp": 2, "cp": 2}, {})]
)
def test_each_model_is_that_of_padded_rows_on_each_layout(model: Any, degrees: Any, given: Any, files: Any) -> None:
    check_one_step(files, model, degrees, **given)


@pytest.mark.parametrize("name", ["Forgets", "Carries"])
def test_a_model_that_mixes_documents_is_refused_at_its_first_step(name: str, files: Any) -> None:
    path, _, count = files
    with pytest.raises(AssertionError, match="its outputs for a document depend on the others of the row"):
        one_step({"_target_": f"data.packed_models.{name}"}, jsonl(path), count, {}, microbatch=count)


def test_a_model_without_positions_is_refused_when_it_is_built(files: Any) -> None:
    with pytest.raises(AssertionError, match="the forward of Plain takes no position_ids"):
        one_step({"_target_": "data.packed_models.Plain"}, jsonl(files[0]), 2, {})


FLATTENED = """
import sys, json
sys.path.insert(0, sys.argv[1])
import numpy as np, torch, transformers
from data.packed_models import llama
from data.packs import documents, jsonl, written
from pathlib import Path
from dtrain.build import build
from dtrain.objective.next_token import NextToken
from dtrain.parallel import huggingface

rows = documents(12, seed=1)
source = build(jsonl(written(Path("a.jsonl"), rows), sequence=sum(map(len, rows)) // 2 + 30))
ours, theirs = llama(), llama()
huggingface.packs(ours)
assert ours.config.use_cache, "where keys are kept transformers looks for no documents"
batch = source.take(np.arange(len(source)), np.zeros(len(source), int))
objective = NextToken()
loss = objective.loss(ours(**batch["inputs"]), batch).sum / objective.count(batch)
loss.backward()
collate = transformers.DataCollatorWithFlattening(return_position_ids=True)
flat = collate([{"input_ids": row} for row in rows])
theirs.set_attn_implementation(sys.argv[2])
other = theirs(**flat, use_cache=False).loss
other.backward()
far = [((a.grad - b.grad).abs().max() / b.grad.abs().max()).item() for a, b in zip(ours.parameters(), theirs.parameters())]
print(json.dumps([abs(loss.item() - other.item()), max(far)]))
"""


@pytest.mark.often("sdpa")
@pytest.mark.campaign("documents")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_llama_learns_what_the_flattening_collator_of_transformers_has_it_learn(
    attention: str, tmp_path: Path
) -> None:
    done = commands.python("-c", FLATTENED, str(Path(__file__).parents[1]), attention, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    loss, gradients = json.loads(done.stdout.splitlines()[-1])
    assert loss < 1e-6 and gradients < 2e-6, (loss, gradients)
