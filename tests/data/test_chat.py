"""Conversations as samples: their answers are the targets, as TRL has them; one position on any world; rows that were added."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
import torch
from chat import talks

from dtrain.chat.tokenizer import Tokenizer, described
from dtrain.data import IGNORE
from dtrain.data.chat import Chat, PackedChat
from dtrain.data.mixture import Mixture
from dtrain.data.stream import Stream
from dtrain.errors import DtrainError, WordsError
from dtrain.planned import BatchShape

WORDS: dict[str, Any] = {
    "kind": "auto", "columns": {}, "split": None, "template": None, "template_args": {}, "date": None, "train_on": "answers", "sequence": 128,
    "long": "cut", "padding": "sequence", "padding_token": None, "mask": False, "holdout": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("chats")
    talks.tokenizer(place / "tk")
    return place


@pytest.fixture
def source(folder: Path, tmp_path: Path) -> Any:
    def made(rows: Any = None, **changed: Any) -> Chat:
        path = (
            talks.write(tmp_path / "rows.jsonl", talks.talks() if rows is None else rows)
            if not isinstance(rows, str)
            else rows
        )
        return Chat(**WORDS | {"path": path, "tokenizer": str(folder / "tk"), "cache": str(folder / "cache")} | changed)

    return made


class Place:
    """What a Stream asks of a mesh, for one rank of a world that is not there."""

    def __init__(self, ranks: int, rank: int) -> None:
        self.data_ranks, self.batch_ranks, self.data_rank, self.device = ranks, ranks, rank, torch.device("cpu")

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values


@pytest.fixture
def stream() -> Iterator[Any]:
    """Makes streams, whose threads end with the test: others fork."""
    made = list[Stream]()

    def begin(source: Any, shape: BatchShape, rank: int = 0) -> Stream:
        place: Any = Place(shape.data, rank)
        made.append(
            Stream(source, batch=shape, mesh=place, seed=5, count=lambda batch: int((batch["targets"] != IGNORE).sum()))
        )
        return made[-1]

    yield begin
    for each in made:
        each.close()


def walk(stream: Stream, steps: int) -> list[list[list[int]]]:
    """The rows of each step."""
    return [[row for part in next(stream).microbatches for row in part["inputs"].tolist()] for _ in range(steps)]


def whole(made: Any) -> dict[str, Any]:
    return made.take(np.arange(len(made)), np.zeros(len(made), int))


def test_a_target_is_the_next_token_of_an_answer(source: Any, folder: Path) -> None:
    made, tokenizer = source(), Tokenizer(described(str(folder / "tk"), None))
    batch = whole(made)
    inputs, targets = batch["inputs"], batch["targets"]
    assert inputs.shape == targets.shape == (50, 128) and inputs.dtype == targets.dtype == torch.int64
    counts = targets[:, :-1] != IGNORE
    assert torch.equal(targets[:, :-1][counts], inputs[:, 1:][counts]) and bool((targets[:, -1] == IGNORE).all())
    row = int((inputs == tokenizer.number("pad_token")).sum(1).argmax())
    learnt = tokenizer.inner.decode(targets[row][targets[row] != IGNORE].tolist(), skip_special_tokens=False)
    assert learnt.startswith("The square of") and learnt.endswith("<|im_end|>\n")
    assert made.facts == {"vocab": tokenizer.vocab} and not made.dense and made.holdout() is None
    assert made.decode(made.encode("Paris é 😀")) == "Paris é 😀"


def test_rows_are_cut_and_padded(source: Any) -> None:
    full, cut = whole(source()), whole(source(sequence=100))
    assert torch.equal(cut["inputs"], full["inputs"][:, :100])
    assert torch.equal(cut["targets"][:, :99], full["targets"][:, :99]) and bool(
        (cut["targets"][:, 99] == IGNORE).all()
    )
    lengths = source().lengths
    assert lengths.tolist() == (full["inputs"] != 0).sum(1).tolist()
    short = source(padding="longest", sequence=1000)
    assert (
        whole(short)["inputs"].shape[1] == 128
        and whole(source(padding="longest", sequence=90))["inputs"].shape[1] == 90
    )
    padded = whole(source(padding_token=7))["inputs"]
    assert bool((padded[:, -1] == 7)[torch.from_numpy(lengths < 128)].all())
    assert len(source(sequence=80, long="skip")) == int((lengths <= 80).sum())


def test_a_mask_is_given_where_it_is_asked_for(source: Any) -> None:
    batch = whole(source(mask=True))
    assert sorted(batch["inputs"]) == ["attention_mask", "input_ids"]
    assert torch.equal(batch["inputs"]["attention_mask"] == 1, batch["inputs"]["input_ids"] != 0)


def test_a_pair_is_two_rows_of_one_sample(source: Any, folder: Path) -> None:
    made, tokenizer = source(talks.pairs(), mask=True), Tokenizer(described(str(folder / "tk"), None))
    batch = whole(made)
    ids, mask, targets = batch["inputs"]["input_ids"], batch["inputs"]["attention_mask"], batch["targets"]
    assert ids.shape == mask.shape == targets.shape == (30, 2, 128)
    assert torch.equal(mask == 1, ids != 0)
    learnt = [tokenizer.decode([token for token in row.tolist() if token != IGNORE]) for row in targets[0]]
    assert learnt[0].startswith("It is ") and learnt[1].startswith("no ")
    texts = [tokenizer.decode(row.tolist()) for row in ids[0]]
    assert texts[0].split("It is")[0] == texts[1].split("no ")[0]
    assert torch.equal(whole(source(talks.pairs()))["inputs"], ids)


def test_pairs_whose_answers_are_alike_are_noted(source: Any) -> None:
    same = {**talks.pairs(1)[0], "rejected": talks.pairs(1)[0]["chosen"]}
    late = {"prompt": "hi", "chosen": "no " * 99 + "yes", "rejected": "no " * 99}
    assert source(talks.pairs()).notes == source().notes == []
    assert source([*talks.pairs(), same, late]).notes == [
        "2 of 32 pairs have the same answer twice within data.sequence=128 tokens: nothing is learnt from them"
    ]
    assert source([*talks.pairs(), same, late], sequence=512).notes[0].startswith("1 of 32 pairs")


def test_what_is_held_out_is_not_trained_on(source: Any) -> None:
    made = source(holdout=0.2)
    held = made.holdout()
    assert (len(made), len(held)) == (40, 10) and held.holdout() is None and held.facts == made.facts
    rows = {tuple(row) for part in (made, held) for row in whole(part)["inputs"].tolist()}
    assert len(rows) == 50 and len(held.lengths) == 10


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_step_is_the_same_on_any_ranks(ranks: int, source: Any, stream: Any) -> None:
    made = source()
    one = walk(stream(made, BatchShape(12, 12, 1, 1)), 10)
    shares = [walk(stream(made, BatchShape(12, 2, ranks, 6 // ranks), rank=rank), 10) for rank in range(ranks)]
    assert [[row for share in shares for row in share[step]] for step in range(10)] == one


def test_a_run_goes_on_with_the_rows_that_were_there(source: Any, stream: Any) -> None:
    shape = BatchShape(6, 6, 1, 1)
    rows = talks.talks(70)
    before = source(rows[:50], holdout=0.1)
    begun, all_ = stream(before, shape), walk(stream(source(rows[:50], holdout=0.1), shape), 30)
    assert walk(begun, 10) == all_[:10]
    held = whole(before.holdout())["inputs"]
    grown = source(rows, holdout=0.1)
    kept = grown.holdout()
    after = stream(grown, shape)
    after.load_state_dict(begun.state_dict())
    assert after.notes == [
        "20 rows were added since this run began, which goes on with the 50 that it has. To train on all type out=<another place>."
    ]
    assert walk(after, 20) == all_[10:] and torch.equal(whole(kept)["inputs"], held)
    rows[3]["messages"][-1]["content"] += "!"
    with pytest.raises(WordsError, match="trained on other data"):
        stream(source(rows, holdout=0.1), shape).load_state_dict(begun.state_dict())


def test_other_words_are_other_data(source: Any) -> None:
    prints = [
        source(**each).fingerprint for each in ({}, {"sequence": 100}, {"train_on": "last"}, {"template": talks.MARKED})
    ]
    assert len({*prints}) == 4 and source().fingerprint == prints[0]


def test_conversations_are_part_of_a_mixture(source: Any) -> None:
    made = Mixture(of={"a": source(), "b": source(talks.talks(20))}, weights={"a": 1, "b": 1}, sequence=128)
    assert made.take(*made.order(np.arange(8), seed=1))["inputs"].shape == (8, 128)


def test_files_are_opened_when_a_sample_is_needed(source: Any) -> None:
    made = source("nowhere.jsonl")
    assert made.facts["vocab"] and made.prompts([talks.said("hi")])[0]
    with pytest.raises(DtrainError, match="no file is there"):
        len(made)


AS_TRL = """
import json, sys, warnings
warnings.simplefilter("ignore")
import numpy as np, torch, transformers
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from dtrain.data.chat import Chat
from dtrain.objective.next_token import NextToken
words, theirs = json.loads(sys.argv[1]), json.loads(sys.argv[2])
torch.manual_seed(0)
tokenizer = transformers.AutoTokenizer.from_pretrained(words["tokenizer"])
config = transformers.LlamaConfig(vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = transformers.AutoModelForCausalLM.from_config(config)
rows = load_dataset("json", data_files=words["path"], split="train")
given = SFTConfig(max_length=words["sequence"], report_to=[], output_dir=sys.argv[3], per_device_train_batch_size=50, use_cpu=True, **theirs)
trainer = SFTTrainer(model=model, args=given, train_dataset=rows, processing_class=tokenizer)
mine = Chat(**words)
order = mine.part.original(np.arange(50))
batch = mine.take(np.argsort(order), np.zeros(50, int))
other = trainer.data_collator([trainer.train_dataset[row] for row in range(50)])
other = {name: value for name, value in other.items() if name in ("input_ids", "attention_mask", "labels")}
longest = other["input_ids"].shape[1]
hides = other["attention_mask"] == 1
assert torch.equal(batch["inputs"][:, :longest][hides], other["input_ids"][hides])
assert torch.equal(batch["targets"][:, : longest - 1], other["labels"][:, 1:]), "which tokens count"
assert bool((batch["targets"][:, longest - 1 :] == -100).all())
with torch.no_grad():
    their = torch.nn.functional.cross_entropy(model(**{k: other[k] for k in ("input_ids", "attention_mask")}).logits[:, :-1].flatten(0, 1), other["labels"][:, 1:].flatten(), reduction="none", ignore_index=-100)
    our = torch.nn.functional.cross_entropy(model(batch["inputs"]).logits.flatten(0, 1), batch["targets"].flatten(), reduction="none", ignore_index=-100)
    objective = NextToken()
    count, loss = objective.count(batch), float(objective.loss(model(batch["inputs"]), batch).sum)
    mean = float(trainer.compute_loss(model, dict(other)))
apart = (our.view(50, -1)[:, : longest - 1] - their.view(50, -1)).abs().max()
print("APART", float(apart), abs(loss / count / mean - 1), count)
"""


@pytest.mark.often("marked", "cut", "completion-llama")
@pytest.mark.campaign("fuzz")
@pytest.mark.parametrize(
    ("rows", "template", "words", "theirs"),
    [
        (talks.talks(), talks.MARKED, {}, {"assistant_only_loss": True}),
        (talks.talks(), talks.MARKED, {"sequence": 90}, {"assistant_only_loss": True}),
        (talks.talks(), talks.CHATML, {"train_on": "all"}, {}),
        (talks.talks(), talks.LLAMA, {"train_on": "all"}, {}),
        ([{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in talks.talks()], talks.CHATML, {}, {}),
        ([{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in talks.talks()], talks.LLAMA, {}, {}),
    ],
    ids=["marked", "cut", "all", "llama", "completion", "completion-llama"],
)  # fmt: skip
def test_the_loss_is_that_of_trl(
    rows: Any, template: str, words: dict[str, Any], theirs: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("trl")
    given = WORDS | {
        "path": talks.write(tmp_path / "rows.jsonl", rows),
        "tokenizer": talks.tokenizer(tmp_path / "tk", template),
        "cache": str(tmp_path / "cache"),
    }
    done = commands.python("-c", AS_TRL, json.dumps(given | words), json.dumps(theirs), str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr[-3000:]
    token, mean, count = map(float, done.stdout.split("APART ")[1].split())
    assert token <= 1e-6 and mean <= 1e-6 and count > 200


def test_packed_conversations_are_those_of_padded_rows(source: Any) -> None:
    alone = source(sequence=300, holdout=0.2)
    packed = PackedChat(alone)
    assert packed.facts["vocab"] == alone.facts["vocab"] and packed.decode(packed.encode("Paris")) == "Paris"
    for part, windows in ((alone, packed), (alone.holdout(), packed.holdout())):
        assert windows is not None and len(windows) < len(part)
        rows, batch = whole(part), whole(windows)
        lengths = part.lengths.tolist()
        wanted = sorted(
            (x[:n].tolist(), y[:n].tolist()) for x, y, n in zip(rows["inputs"], rows["targets"], lengths, strict=True)
        )
        tokens, positions = batch["inputs"]["input_ids"], batch["inputs"]["position_ids"]
        found = []
        for x, y, places in zip(tokens, batch["targets"], positions, strict=True):
            starts = [*(places == 0).nonzero()[:, 0].tolist(), len(places)]
            found += [(x[a:b].tolist(), y[a:b].tolist()) for a, b in pairwise(starts)]
        assert sorted(each for each in found if any(target != IGNORE for target in each[1])) == wanted


def test_pairs_are_not_packed(source: Any) -> None:
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4
    with pytest.raises(WordsError, match=r"the rows are pairs, which are compared. Type data.packing=none"):
        whole(PackedChat(source(pairs)))
