"""Text classification from rows of text: tokens, padding and classes are those of transformers."""

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from small import CPUS
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

import dtrain
from dtrain.build import build
from dtrain.compose import compose
from dtrain.data.stream import as_source
from dtrain.errors import DtrainError
from dtrain.resolve import resolve
from dtrain.verb import checkpoint, predict

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "good", "bad", "film", "book", "very", ",", "not"]
TEXTS = [
    ("a good film", "positive"),
    ("a very , very bad book", "negative"),
    ("123", "neutral"),
    ('not "bad"', "positive"),
]
NAMES = ["negative", "neutral", "positive"]
ROWS = [TEXTS[row % 4] for row in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a BERT as transformers saves them, and ROWS in files of each kind."""
    place = tmp_path_factory.mktemp("bert")
    made = Tokenizer(models.WordPiece({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep")}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=16, **names).save_pretrained(
        place / "m"
    )
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(
        **sizes,
        vocab_size=len(WORDS),
        max_position_embeddings=16,
        num_labels=3,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(place / "m")
    with (place / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *ROWS])
    (place / "rows.jsonl").write_text(
        "".join(f"{json.dumps({'text': text, 'label': label})}\n" for text, label in ROWS)
    )
    pq.write_table(pa.table(dict(zip(("text", "label"), zip(*ROWS, strict=True), strict=True))), place / "rows.parquet")
    return place


def words(folder: Path, *more: str, format: str = "csv") -> tuple[str, ...]:
    return (
        "model=hf", f"model.name={folder}/m", "model.task=classification", f"data={format}", f"data.path={folder}/rows.{format}",
        "data.inputs=text", "data.targets=label", f"data.tokenizer={folder}/m", f"data.cache={folder}/cache", "logger=[]", *more,
    )  # fmt: skip


@pytest.mark.parametrize("format", ["csv", "jsonl", "parquet"])
def test_a_batch_is_that_of_transformers(format: str, folder: Path) -> None:
    plan = resolve(compose(words(folder, "data.sequence=6", format=format)), CPUS)
    source = as_source(build(plan.data))
    source.with_mask("input_ids")
    index = np.arange(8)
    batch = source.take(index, np.zeros_like(index))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "m")
    rows = [ROWS[row] for row in source.original(index)]
    theirs = tokenizer([text for text, _ in rows], padding=True, truncation=True, max_length=6, return_tensors="pt")
    for name in ("input_ids", "attention_mask"):
        assert torch.equal(batch["inputs"][name], theirs[name]), name
    assert source.class_names == NAMES
    assert [source.class_names[label] for label in batch["targets"]] == [label for _, label in rows]
    assert "of 40 rows 10 have more than 6 tokens and lose their end; data.sequence=" in source.notes[-1]


def test_it_trains_evaluates_and_predicts_the_names_of_classes(folder: Path, tmp_path: Path) -> None:
    asked = words(folder, "model.head=new", "epochs=1", "batch=36", "optim=sgd", "optim.lr=0", "evaluate.metrics=[f1]")
    (tmp_path / "dev.csv").write_text("text,label\na good film,positive\n123,positive\n")
    first = dtrain.run(*asked, f"evaluate.sets.dev.path={tmp_path}/dev.csv", out=tmp_path / "run")
    assert checkpoint.run(["export", f"out={tmp_path}/run", f"to={tmp_path}/tuned"]) == 0
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "tuned").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "m")
    assert model.config.id2label == dict(enumerate(NAMES))

    def theirs(rows: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
        given = tokenizer([text for text, _ in rows], padding=True, return_tensors="pt")
        with torch.no_grad():
            answer = model(**given, labels=torch.tensor([NAMES.index(label) for _, label in rows]))
        return answer.loss, answer.logits

    source = as_source(build(resolve(compose([], run=str(tmp_path / "run")), CPUS).data))
    assert first.step == 1 and {"eval_accuracy", "eval_f1", "eval_dev_f1"} <= first.metrics.keys()
    trained = [ROWS[row] for row in source.original(np.arange(36))]
    dev = [("a good film", "positive"), ("123", "positive")]
    assert first.loss == pytest.approx(float(theirs(trained)[0]), rel=1e-5)
    assert first.metrics["eval_dev_loss"] == pytest.approx(float(theirs(dev)[0]), rel=1e-5), "of class 2, not 0"
    (tmp_path / "new.csv").write_text(
        "text\n" + "".join(f'"{text.replace(chr(34), chr(34) * 2)}"\n' for text, _ in ROWS)
    )
    predict.run([f"out={tmp_path}/run", f"predict.to={tmp_path}/a.jsonl", f"predict.data.path={tmp_path}/new.csv"])
    said = [json.loads(line)["prediction"] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert said == [NAMES[label] for label in theirs(ROWS)[1].argmax(1)]
    ours = dtrain.predictions(tmp_path / "run", [text for text, _ in ROWS], "predict.scores=logits")
    torch.testing.assert_close(torch.tensor([row["logits"] for row in ours]), theirs(ROWS)[1])


def test_what_does_not_go_with_text_is_told(folder: Path, tmp_path: Path) -> None:
    def told(*more: str, format: str = "csv") -> str:
        with pytest.raises(DtrainError) as error:
            dtrain.run(*words(folder, "steps=1", *more, format=format), out=tmp_path / "run")
        return str(error.value)

    assert (
        "column text holds text" in (said := told("data.tokenizer=null", format="jsonl")) and "data.tokenizer=<" in said
    )
    assert "reads one column of text. Type data.inputs=<its name>" in told("data.inputs=null")
    assert "type data=text" in told("data.packing=pack", "data.sequence=8", format="jsonl")
    both = told(f"data.tokenizer={tmp_path}", "data.inputs=txt")
    assert "there is no tokenizer.json" in both and "has no column txt. Did you mean text?" in both
    assert "no column" not in told(f"data.tokenizer={tmp_path}")
    assert "data.sequence=8 is longer than data.length=4" in told("data.sequence=8", "data.length=4")
    assert "names of classes (negative, neutral, positive)" in told("objective=regression")
    assert "model=gpt gives an answer for each token" in told("model=gpt")
    assert "model=mlp takes features" in told("model=mlp")
    assert "Type model.task=classification." in told("model.task=causal_lm")
    assert "data.sequence=8 is the most tokens of a row of text" in told("data.sequence=8", "data.tokenizer=null")
    (tmp_path / "dev.csv").write_text("text,label\nfilm,odd\n")
    assert 'evaluate.sets.dev: column label has "odd"' in told(f"evaluate.sets.dev.path={tmp_path}/dev.csv")


def test_words_are_classes_of_rows_of_numbers_too(tmp_path: Path) -> None:
    rows = [f"{number},{'ab'[number % 2]}" for number in range(30)]
    (tmp_path / "a.csv").write_text("\n".join(["x,y", *rows]) + "\n")
    words = (
        "model=mlp",
        "data=csv",
        f"data.path={tmp_path}/a.csv",
        "data.targets=y",
        "objective=classification",
        "steps=2",
    )
    dtrain.run(*words, out=tmp_path / "run")
    with (tmp_path / "a.csv").open("a") as file:
        file.write("30,B\n")  # a class that comes before the others
    result = dtrain.run(*words, "steps=4", out=tmp_path / "run")
    assert result.step == 4, "a run goes on with the rows, and the classes, that it began with"


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        ("cat dog NA", "data: column y has the class 'NA'. If no value is meant by it, leave these rows out"),
        ("cat Cat dog", "data: column y has the classes 'Cat' and 'cat', which differ by spaces or capitals alone"),
        ("cat dog none", ""),
    ],
)
def test_words_that_are_hardly_classes_of_their_own_are_told(labels: str, sentence: str, tmp_path: Path) -> None:
    rows = [f"{number},{label}" for number, label in enumerate(labels.split() * 5)]
    (tmp_path / "a.csv").write_text("\n".join(["x,y", *rows]) + "\n")
    words = ["model=mlp", "data=csv", f"data.path={tmp_path}/a.csv", "data.targets=y", "objective=classification"]
    source = as_source(build(resolve(compose(words), CPUS).data))
    assert source.notes == ([sentence] if sentence else [])
