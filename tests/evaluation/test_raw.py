"""Raw inputs get the answers of the same inputs in files."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from data.drawn import drawn, folder
from PIL import Image
from torch import Tensor, nn

import dtrain
from dtrain.errors import PreflightError, WordsError
from dtrain.verb import predict

SMALL = ("steps=2", "batch=4", "logger=[]", "hook=[]", "evaluate.every=0")


def written(run: Path, *words: str, to: str = "said.jsonl") -> list[dict[str, Any]]:
    """What `dtrain predict` writes."""
    predict.run([f"out={run}", f"predict.to={run}/{to}", *words])
    return [json.loads(line) for line in (run / to).read_text().splitlines()]


def refused(run: Path, given: list[tuple[Any, str]], **objects: Any) -> None:
    """Each of these inputs is refused with this sentence."""
    for inputs, sentence in given:
        with pytest.raises((WordsError, PreflightError)) as caught:
            dtrain.predictions(run, inputs, **objects)
        assert re.search(sentence, said := str(caught.value)) and "/dtrain-" not in said, said


def test_images_get_the_answers_of_their_files_which_are_named(tmp_path: Path) -> None:
    words = ("model=cnn", "data=images", f"data.path={folder(tmp_path / 'a', 4)}", "data.size=16", "data.holdout=0.3")
    dtrain.run(*words, *SMALL, f"data.cache={tmp_path}/cache", out=tmp_path / "run")
    said = written(tmp_path / "run")
    assert all(Path(row["file"]).parent.name == row["target"] for row in said) and len(said) == 4
    paths = [row["file"] for row in said]
    for inputs in (paths, [Image.open(path) for path in paths], [np.asarray(Image.open(path)) for path in paths]):
        ours = dtrain.predictions(tmp_path / "run", inputs)
        assert [row["prediction"] for row in ours] == [row["prediction"] for row in said]
        assert [row["probability"] for row in ours] == pytest.approx([row["probability"] for row in said], rel=1e-5)
    (tmp_path / "torn.png").write_bytes(Path(paths[0]).read_bytes()[:200])
    (tmp_path / "text.png").write_text("text")
    refused(
        tmp_path / "run",
        [
            (paths[0], "the inputs are a str. Give a list, also of one: "),
            (Path(paths[0]), "the inputs are a PosixPath. Give a list"),
            (drawn(1), "the inputs are an Image. Give a list"),
            (np.asarray(drawn(1)), "the inputs are a ndarray. Give a list"),
            ([paths[0], "nope.png"], "input 1, nope.png, is not there"),
            ([paths[0], tmp_path], f"input 1, {tmp_path}, is a folder"),
            ([tmp_path / "text.png"], f"input 0, {tmp_path}/text.png, is no image"),
            ([paths[0], tmp_path / "torn.png"], r"dtrain.predictions: input 1 is torn"),
            ([3], "input 0 is an int. Give paths"),
        ],
    )
    (tmp_path / "flat").mkdir()
    drawn(1).save(tmp_path / "flat" / "photo.jpeg")
    (row,) = written(tmp_path / "run", f"predict.data.path={tmp_path}/flat", to="flat.jsonl")
    assert row.keys() == {"row", "prediction", "probability", "file"}, "a picture without a class has no target"
    Path(paths[0]).rename(unnamed := tmp_path / "photo")
    (ours,) = dtrain.predictions(tmp_path / "run", [unnamed])
    assert ours["prediction"] == said[0]["prediction"], "a file is an image whatever its name"


def test_rows_are_written_with_their_target_and_the_columns_that_are_asked_for(tmp_path: Path) -> None:
    rows = [{"id": f"r{number}", "a": number % 5, "b": number % 3 / 2, "y": "xz"[number % 2]} for number in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ("model=mlp", "data=jsonl", f"data.path={tmp_path}/a.jsonl", "data.inputs=[a,b]", "data.targets=y")
    dtrain.run(*words, *SMALL, "objective=classification", f"data.cache={tmp_path}/cache", out=tmp_path / "run")
    said = written(tmp_path / "run", "predict.columns=[id,b]")
    assert [(row["id"], row["b"], row["target"]) for row in said] == [
        (rows[row["row"]]["id"], rows[row["row"]]["b"], rows[row["row"]]["y"]) for row in said
    ]
    asked = [rows[row["row"]] for row in said]
    for inputs in (asked, [torch.tensor([row["a"], row["b"]]) for row in asked]):
        ours = dtrain.predictions(tmp_path / "run", inputs, "predict.scores=logits")
        assert [row["probability"] for row in ours] == [row["probability"] for row in said]
        assert ours[0].keys() == {"row", "prediction", "probability", "logits"}
    refused(
        tmp_path / "run",
        [
            (["text"], r"a row of this run has several columns \(a, b\), and input 0 is a str. Give a dict"),
            (rows[0], "the inputs are a dict. Give a list"),
            (torch.ones(2), "the inputs are a Tensor. Give a list"),
            ([rows[0], {"a": 1, "c": 2}], "input 1 lacks b. It has a, c."),
            ([rows[0], {"a": 1, "b": "many"}], "input 1"),
            ([{"a": 1, "b": None}, rows[0]], "input 0"),
        ],
    )
    with pytest.raises(WordsError, match=r"predict.columns: .* has no column ib. Did you mean"):
        dtrain.predictions(tmp_path / "run", asked, "predict.columns=[ib]")


@pytest.mark.parametrize("named", [{0: "bad", 1: "good"}, None])
def test_numbers_of_classes_stand_beside_the_names_that_the_model_has_for_them(
    named: dict[int, str] | None, tmp_path: Path
) -> None:
    sizes = {
        "vocab_size": 12,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    config = transformers.BertConfig(**sizes, **({"id2label": named} if named else {}))
    config.save_pretrained(tmp_path / "bert")
    rows = [{"id": row, "x": [row % 12, 3, 5], "y": row % 2} for row in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ["model=hf", f"model.name={tmp_path}/bert", "model.task=classification", "model.weights=random"]
    words += ["data=jsonl", f"data.path={tmp_path}/a.jsonl", "data.inputs=x", "data.targets=y", "data.pad=0"]
    dtrain.run(*words, *SMALL, "objective=classification", f"data.cache={tmp_path}/cache", out=tmp_path / "run")
    said = written(tmp_path / "run")
    for row in (*said, *dtrain.predictions(tmp_path / "run", [[1, 3, 5], [2, 3, 5]])):
        assert row.get("label") == (named and named[row["prediction"]])
        assert row["prediction"] in (0, 1)
    asked = "predict.columns=[probability]"
    with pytest.raises(WordsError, match="an answer has a column probability of its own"):
        dtrain.predictions(tmp_path / "run", [{"x": [1], "probability": 1}], asked)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Pairs:
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), float(index)), torch.ones(2)


def test_tensors_of_a_dataset_of_the_caller(tmp_path: Path) -> None:
    class Own(Net):
        """Of this function alone."""

    dtrain.run(*SMALL, "objective=regression", model=Own, data=Pairs(), out=tmp_path / "run")
    inputs = [torch.randn(4) for _ in range(3)]
    said = dtrain.predictions(tmp_path / "run", inputs, model=Own, data=Pairs())
    with torch.no_grad():
        there = dtrain.load(tmp_path / "run", model=Own, data=Pairs())(torch.stack(inputs))
    torch.testing.assert_close(torch.tensor([row["prediction"] for row in said]), there)
    mistakes = [(inputs[0], "the inputs are a Tensor. Give a list"), (3, "the inputs are an int. Give a list")]
    refused(tmp_path / "run", mistakes, model=Own, data=Pairs())


def noisy(sample: Any, generator: torch.Generator | None) -> Any:
    return sample if generator is None else (sample[0] + 1000, sample[1])


def test_data_beside_training_is_read_as_held_out_data_is(tmp_path: Path) -> None:
    table = np.random.default_rng(0).random((12, 3)).astype(np.float32)
    np.savetxt(tmp_path / "t.csv", table, delimiter=",", header="a,b,y", comments="")
    words = ("model=mlp", "data=csv", f"data.path={tmp_path}/t.csv", "data.targets=y", "data.inputs=[a,b]")
    noise = ("data.transform._target_=evaluation.test_raw.noisy", "trust=[evaluation.test_raw]")
    sets = (f"evaluate.sets.all.path={tmp_path}/t.csv", "objective=regression", f"data.cache={tmp_path}/cache")
    result = dtrain.run(*words, *noise, *sets, *SMALL, out=tmp_path / "run")
    with torch.no_grad():
        model = dtrain.load(tmp_path / "run", noise[1])
        told = model(torch.from_numpy(table[:, :2]))[:, 0].numpy()
    said = written(tmp_path / "run", f"predict.data.path={tmp_path}/t.csv", noise[1])
    assert [row["prediction"] for row in said] == pytest.approx(told.tolist(), rel=1e-4)
    assert result.metrics["eval_all_loss"] == pytest.approx(np.square(told - table[:, 2]).mean(), rel=1e-4)
    ours = dtrain.predictions(tmp_path / "run", table[:, :2], noise[1])
    assert [row["prediction"] for row in ours] == pytest.approx(told.tolist(), rel=1e-4)
