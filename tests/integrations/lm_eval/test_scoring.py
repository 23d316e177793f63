"""Likelihoods and texts that rank 0 asks for are those of one process, whatever the mesh."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import resident
from small import plan

from dtrain.cluster import Cluster
from dtrain.errors import WordsError
from dtrain.evaluation.session import load
from dtrain.integrations.lm_eval.scoring import Rows, Scoring, likelihoods, padded
from dtrain.planned import Plan
from dtrain.train import train

ONE = Cluster(gpus=0, cpus=1)
SMALL = ("data=synthetic", "model.layers=2", "model.width=16", "model.heads=2", "data.sequence=8", "data.samples=200")
ALWAYS = ("steps=3", "logger=[]", "hook=[]", "evaluate.every=0", "optim.lr=0.05", "schedule.warmup=1")
ROWS = [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8], [1, 6, 1], [5], [5, 5]]
WANTED = [(0, [2]), (0, [1, 5, 9, 2]), (1, [8, 2]), (2, [8]), (3, [7]), (0, [9, 4]), (4, [3])]
PROMPTS = [[3, 1, 4, 1], [2, 7, 1], [1, 6], [5, 5], [4]]
MESHES = [
    ("strategy=fsdp", "devices=2"),
    ("strategy=ddp", "devices=3", "batch=6"),
    pytest.param(("mesh.tp=2", "devices=2"), marks=pytest.mark.campaign("fuzz")),
    pytest.param(("strategy=pipeline", "devices=2"), marks=pytest.mark.campaign("fuzz")),
    pytest.param(("mesh.cp=2", "devices=2"), marks=pytest.mark.campaign("fuzz")),
]


def made(out: Path, *words: str) -> Plan:
    return plan(*SMALL, *ALWAYS, f"out={out}", *words, on=ONE)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("scoring") / "run"
    resident(1, train, made(out))
    return out


def _asked(asked: Plan) -> Any:
    with load(asked) as (parts, _):
        scoring = Scoring(parts, batch=2, context=12, ends={0}, decode=lambda tokens: str(tokens), tell=print)
        if parts.mesh.rank:
            scoring.serve()
            return None
        options = {"tokens": 5, "temperature": 0.0, "top_p": 1.0, "seed": 0}
        greedy = scoring.texts(PROMPTS, until=[], **options)
        stopped = scoring.texts(PROMPTS, until=[str(greedy[0][1])], **options)
        drawn = scoring.texts(PROMPTS, until=[], **options | {"temperature": 1.0, "top_p": 0.9})
        scored = scoring.likelihoods(ROWS, WANTED)
        scoring.end()
        with torch.no_grad():
            logits = [parts.forward(torch.tensor([row]))[0] for row in ROWS] if parts.mesh.world == 1 else []
        return scored, greedy, stopped, drawn, [each.log_softmax(-1).tolist() for each in logits]


@pytest.fixture(scope="module")
def alone(run: Path) -> Any:
    return resident(1, _asked, made(run))[0]


def test_a_likelihood_is_the_sum_of_those_of_its_tokens(alone: Any) -> None:
    scored, greedy, stopped, _, chances = alone
    for (row, tokens), (chance, is_greedy) in zip(WANTED, scored, strict=True):
        last = torch.tensor(chances[row])[-len(tokens) :]
        assert chance == pytest.approx(sum(float(last[place, token]) for place, token in enumerate(tokens)), rel=1e-6)
        assert bool(is_greedy) is (last.argmax(-1).tolist() == tokens)
    assert greedy[3][0] == torch.tensor(chances[4]).argmax(-1)[-1]
    assert (
        [len(text) for text in greedy] == [5] * 5
        and len(stopped[0]) <= 2
        and stopped[0] == greedy[0][: len(stopped[0])]
    )


@pytest.mark.parametrize("mesh", MESHES, ids="-".join)
def test_every_mesh_gives_what_one_process_gives(run: Path, alone: Any, mesh: tuple[str, ...]) -> None:
    asked = made(run, *mesh)
    scored, *texts, _ = resident(asked.world, _asked, asked)[0]
    assert torch.allclose(torch.tensor(scored), torch.tensor(alone[0]), rtol=1e-5)
    assert json.dumps(texts) == json.dumps([*alone[1:4]])


def test_rows_of_any_length_stand_in_one_tensor() -> None:
    rows = Rows.of([[1, 2, 3], [], [4]])
    assert [rows[number].tolist() for number in range(len(rows))] == [[1, 2, 3], [], [4]]
    assert padded([rows[0], rows[2]]).tolist() == [[1, 2, 3], [4, 0, 0]]
    assert len(Rows.of([])) == 0


def test_an_answer_longer_than_its_row_is_refused() -> None:
    with pytest.raises(WordsError, match=r"evaluate\.context: an answer has 3 tokens"):
        likelihoods(torch.zeros(2, 5), {0: torch.tensor([1, 2, 3])})
