"""An objective of the user's own trains as a plain loop does, on every mesh, or is refused with the reason."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from invariance.losses import ODD, SAMPLES, WEIGHTS, OfTasks, Unlabelled, by_hand
from invariance.run import _rank
from pool import RankFailed, resident
from small import plan
from torch import Tensor

from dtrain.data.dataset import Dataset
from dtrain.data.order import samples
from dtrain.model import construct
from dtrain.model.seeds import derive
from dtrain.planned import Plan
from dtrain.train import train as train_plan

WORDS = (
    "model._target_=invariance.losses.net", "data=dataset", "data.dataset._target_=invariance.losses.Rows", "data.holdout=0", "trust=[invariance]",
    f"batch={SAMPLES}", "optim=sgd", "optim.lr=0.5", "optim.momentum=0", "optim.nesterov=false", "optim.weight_decay=0", "clip=null",
    "schedule=constant", "schedule.warmup=0", "logger=[]", "hook=[]", "seed=3",
)  # fmt: skip
MESHES = ("devices=1", "devices=1 microbatch=2", "devices=2 strategy=ddp", "devices=2 strategy=fsdp microbatch=4")


def asked(*words: str) -> Plan:
    return plan(*WORDS, *(part for each in words for part in each.split()))


def train(*words: str, steps: int = 3) -> dict[str, Any]:
    made = asked(*words)
    return resident(made.world, _rank, made, steps)[0]


def launch(out: Path, *words: str) -> dict[str, Any]:
    """A run of train.py: its rows and caveats."""
    made = asked(*words, f"out={out}")
    resident(made.world, train_plan, made)
    rows, events = (
        [*map(json.loads, (out / name).read_text().splitlines())] for name in ("metrics.jsonl", "events.jsonl")
    )
    return {"rows": rows, "caveats": [event["text"] for event in events if event["event"] == "caveat"]}


def check(here: dict[str, Any], there: dict[str, Any]) -> None:
    assert here["losses"] == pytest.approx(there["losses"], rel=2e-6)
    for name, value in there["weights"].items():
        torch.testing.assert_close(torch.tensor(here["weights"][name]), torch.tensor(value), rtol=2e-6, atol=2e-6)


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, weight=torch.tensor(WEIGHTS))


OF_CLASSES = "objective._target_=invariance.losses.OfClasses"
CLASSIFICATION = f"objective=classification objective.weights=[{','.join(map(str, WEIGHTS))}]"


@pytest.mark.parametrize("objective", [OF_CLASSES, CLASSIFICATION])
def test_a_weighted_mean_is_that_of_torch_on_every_mesh(objective: str) -> None:
    expected = by_hand(weighted, steps=3, lr=0.5, seed=3)
    for mesh in MESHES:
        check(train(objective, mesh), expected)


@pytest.mark.parametrize("count", [*ODD])
def test_a_count_that_divides_nothing_is_refused(count: str) -> None:
    with pytest.raises(RankFailed, match=r"objective Miscounted: its count returned .*\. Let it return"):
        train("objective._target_=invariance.losses.Miscounted", f"objective.answer={count}", "devices=1", steps=1)


def test_a_step_in_which_no_target_counts_changes_nothing(tmp_path: Path) -> None:
    def loop() -> list[float | None]:
        model = construct({"_target_": "invariance.losses.net"}, facts={}, seed=derive(3, "model"))
        groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) == decays]} for decays in (True, False)]
        optimizer = torch.optim.SGD([groups[0] | {"weight_decay": 0.2}, groups[1]], 0.1, momentum=0.9)
        losses, rows = list[float | None](), Dataset(Unlabelled(first=10), holdout=0)
        for step in range(12):
            batch = rows.take(*samples(np.arange(2 * step, 2 * step + 2), n=SAMPLES, seed=derive(3, "data")))
            inputs, targets = batch["inputs"], batch["targets"]
            if bool((targets == -100).all()):
                losses.append(None)
                continue
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    expected = loop()
    assert 2 < expected.count(None) < 10
    words = (
        "objective=classification", "batch=2", "steps=12", "data.dataset._target_=invariance.losses.Unlabelled", "data.dataset.first=10",
        "optim.lr=0.1", "optim.weight_decay=0.2", "optim.momentum=0.9",
    )  # fmt: skip
    for mesh in ("devices=1", "devices=2 strategy=ddp"):
        run = launch(tmp_path / mesh.split()[-1], *words, mesh)
        assert [row.get("loss") for row in run["rows"]] == [
            loss if loss is None else pytest.approx(loss, rel=2e-6) for loss in expected
        ]
        assert any("changes no weight" in text for text in run["caveats"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("steps=3 data.dataset._target_=invariance.losses.Unlabelled", "data: no target counts in any of the 3 steps"),
        ("steps=30 data.dataset._target_=invariance.losses.Unlabelled", "data: no target counts in the first 10 steps"),
        (
            "steps=3 data.holdout_dataset._target_=invariance.losses.Unlabelled",
            "no target of the held-out samples counts",
        ),
    ],
)
def test_a_run_or_an_evaluation_without_a_target_ends_with_a_sentence(
    words: str, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(RankFailed, match=sentence):
        launch(tmp_path, "objective=classification", words, "devices=2 strategy=ddp")
    assert not (tmp_path / "checkpoints").exists()


def test_a_microbatch_without_a_target_adds_nothing_to_the_models_own_loss() -> None:
    words = "model._target_=invariance.losses.Judging objective=own devices=1"
    alone = train(words, steps=2)
    assert train(words, "objective.together=1", steps=2)["losses"] == pytest.approx(alone["losses"], rel=2e-6)


def test_parameters_of_the_loss_that_the_model_returns_train_on_every_mesh() -> None:
    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return OfTasks().loss(outputs, {"targets": targets}).sum / len(targets)

    expected = by_hand(loss, steps=3, lr=0.1, seed=3, model="Uncertain")
    words = "model._target_=invariance.losses.Uncertain objective._target_=invariance.losses.OfTasks optim.lr=0.1"
    for mesh in (*MESHES, "devices=2 strategy=zero3"):
        check(train(words, mesh), expected)


@pytest.mark.parametrize("name", ["Contrastive", "Triplets", "Correlation", "Normalised", "MeanOfMeans"])
def test_a_loss_that_is_no_sum_is_told_or_refused_where_a_forward_has_a_part_of_the_batch(
    name: str, tmp_path: Path
) -> None:
    words = f"objective._target_=invariance.losses.{name}"
    (told,) = [text for text in launch(tmp_path / "one", words, "steps=1 devices=1")["caveats"] if "no sum" in text]
    assert told.startswith(f"objective {name}: the loss of some samples is ")
    for mesh in ("devices=2 strategy=ddp", "devices=1 microbatch=8"):
        with pytest.raises(
            RankFailed, match=rf"{name}: .* no sum over samples.* sees 8 of 16\. .* objective\.together=8"
        ):
            launch(tmp_path / mesh[:9], words, "steps=1", mesh)


def test_a_loss_that_says_so_is_the_same_on_every_mesh_with_that_microbatch() -> None:
    words = "objective._target_=invariance.losses.Stated objective.together=4"
    one = train(words, "devices=1")
    for mesh in ("devices=2 strategy=ddp", "devices=2 strategy=fsdp"):
        check(train(words, mesh), one)


@pytest.mark.parametrize("name", ["Own", "Noisy", "Views", "Signed", "Centred", "OfClasses"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_sum_is_taken_and_stays_as_it_was(name: str, precision: str) -> None:
    checked = asked(f"objective._target_=invariance.losses.{name} devices=1 microbatch=8 precision={precision}")
    unchecked = replace(checked, objective={**checked.objective, "_about_": {"whole": False}})
    (here,), (there,) = (resident(1, _rank, each, 3) for each in (checked, unchecked))
    assert here["losses"] == there["losses"]
