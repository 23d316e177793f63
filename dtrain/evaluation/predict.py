"""One rank of `dtrain predict`: the answers of a checkpoint to rows, in their order.

A forward sees the same rows whatever the number of ranks, and rank r of R takes forwards r, r + R, ...; a part of rows
is durable before the next is begun.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain import compile
from dtrain.build import build
from dtrain.config.facts import about
from dtrain.data import IGNORE, Batch, Growing, Indices, Source, whole
from dtrain.data.collate import Sizes
from dtrain.data.dataset import Dataset
from dtrain.data.pictures import Pictures
from dtrain.data.stream import as_source, to_device
from dtrain.errors import PreflightError, Status, WordsError, about_data
from dtrain.evaluation.beside import beside, has_rows
from dtrain.evaluation.metrics import gathered
from dtrain.evaluation.session import load, other_data
from dtrain.files.predictions import Predictions
from dtrain.files.targetless import targetless
from dtrain.lifecycle.stop import StopSignal
from dtrain.loop.assemble import Parts
from dtrain.loop.step import call
from dtrain.model import evaluating, seeds
from dtrain.model.labels import names_in
from dtrain.model.limits import limits_of
from dtrain.objective import answer, asked
from dtrain.planned import Part, Plan
from dtrain.result import Result, versions
from dtrain.secrets import screen
from dtrain.storage import store
from dtrain.storage.attempts import place


def predict(plan: Plan) -> Result:
    """Write the rows; `metrics` of the result has their number and place. A signal stops it between two parts."""
    began, asked = time.perf_counter(), plan.predict
    if plan.mesh.cp > 1:
        raise WordsError(f"predict: mesh.cp={plan.mesh.cp} splits a row. Leave mesh.cp out.")
    with StopSignal(after=None, seconds=plan.stop_seconds) as stop, load(plan) as (parts, commit):
        if parts.mesh.rank == 0 and not asked["data"] and (sentence := other_data(parts, commit)):
            screen.complain(sentence, begin="note: ")
        source = _source(parts, commit)
        index, rows = _in_order(source)
        task, names = about(plan.objective).get("task"), getattr(parts.source, "class_names", None)
        labels = None if names else names_in(parts.model)
        if task != "classification" and asked["scores"] != "none":
            raise WordsError(f"predict.scores={asked['scores']}: only classes have scores. Leave it out.")
        data = asked["data"] or plan.data
        looked = beside(source, data, asked["columns"], names or ())
        form = _form_of(source, parts, data)
        facts = {
            "checkpoint": place(commit["url"]), "data": source.fingerprint, "rows": len(index),
            **{name: asked[name] for name in ("scores", "part", "batch", "columns")},
        }  # fmt: skip
        to, mesh = asked["to"] or store.join(plan.out, "predictions.jsonl"), parts.mesh
        sink = Predictions(to)
        begun = _told(parts, lambda: sink.begin(facts))
        per = max(1, asked["part"] // asked["batch"]) * asked["batch"]
        count = -(-len(index) // per)
        number = count if begun is None else begun
        with evaluating(parts.forward):
            while number < count and not stop.requested(number, mesh):
                mine = slice(number * per, (number + 1) * per)
                answers, targets = form.apart(_answers(parts, source, index[mine], asked["batch"], form))
                told = ragged(answers) if form.each else columns_of(answers, task, names, labels, asked["scores"])
                columns = _beside(
                    {"row": rows[mine].tolist(), **told, **targets_of(targets, names)}, looked(rows[mine])
                )
                mesh.on_rank_0("write predictions", partial(sink.write, number, columns))
                number += 1
                stop.listen()
        if begun is not None and number == count:
            mesh.on_rank_0("write predictions", lambda: sink.finish(facts, count))
    metrics = {"rows": min(number * per, len(index)), "to": to}
    status: Status = "finished" if number == count else stop.status
    return Result(
        status=status,
        step=commit["step"],
        loss=None,
        wall_seconds=time.perf_counter() - began,
        metrics=metrics,
        versions=versions(),
        reason=stop.cause,
    )


def columns_of(
    answers: Tensor, task: str | None, names: list[str] | None, labels: list[str] | None, scores: str
) -> dict[str, list[Any]]:
    """The columns of `answers` [N, K]: log-likelihood and number of tokens, scores of classes, or outputs. `names`: of
    the classes of the data, which answers have in place of numbers; `labels`: those that the model knows them by, which
    stand beside the numbers.
    """
    if task == "next_token":
        return {"log_likelihood": answers[:, 0].tolist(), "tokens": answers[:, 1].long().tolist()}
    if task != "classification":
        return {"prediction": (answers[:, 0] if answers.shape[1] == 1 else answers).tolist()}
    probabilities = answers.softmax(1)
    best, label = probabilities.max(1)
    named = names if names and len(names) >= answers.shape[1] else None
    columns = {"prediction": [named[each] for each in label.tolist()] if named else label.tolist()}
    if labels and len(labels) == answers.shape[1]:
        columns["label"] = [labels[each] for each in label.tolist()]
    columns["probability"] = best.tolist()
    if scores != "none":
        columns[scores] = (probabilities if scores == "probabilities" else answers).tolist()
    return columns


def _beside(columns: dict[str, list[Any]], others: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Columns of an answer, and those of the files. Raises WordsError for a name that both have."""
    if taken := [name for name in others if name in columns]:
        raise WordsError(
            f"predict.columns: an answer has a column {taken[0]} of its own. Leave {taken[0]} out, or rename it in the "
            "files; what the files have as the target of a row is in target."
        )
    return {**columns, **others}


def targets_of(targets: Tensor | None, names: Sequence[str] | None) -> dict[str, list[Any]]:
    """The column of `targets` [N] (classes, by their names) or [N, K]; None for those that do not count."""
    if targets is None:
        return {}
    listed = targets.squeeze(1).tolist() if targets.ndim == 2 and targets.shape[1] == 1 else targets.tolist()
    if targets.ndim == 1:
        listed = [None if each == IGNORE else int(each) for each in listed]
        listed = [names[each] if names and each is not None else each for each in listed]
    return {"target": listed}


def ragged(answers: Tensor) -> dict[str, list[Any]]:
    """The column of `answers` [N, 1 + K]: how many a row has, and these with what padding was given."""
    return {"prediction": [row[1 : 1 + int(row[0])].tolist() for row in answers]}


def _source(parts: Parts, commit: Mapping[str, Any]) -> Source:
    """The rows to predict: the held-out ones of then, or all of other data."""
    if parts.plan.predict["data"]:
        task = about(parts.plan.objective).get("task")
        with about_data("predict.data"):
            return parts.like_trained(
                whole(as_source(build(targetless(parts.plan.predict["data"], task=task, trained=parts.plan.data))))
            )
    stream = commit["facts"].get("stream")
    if stream and isinstance(parts.source, Growing):
        parts.source.as_of(stream["fingerprint"])
    if parts.heldout is None or not len(parts.heldout):
        raise PreflightError("predict: nothing is held out. Type 'predict.data={path: <files>}'.")
    return parts.heldout


def _in_order(source: Source) -> tuple[Indices, Indices]:
    """Samples of the source in the order of the user's rows, and the numbers of these rows."""
    index = np.arange(len(source), dtype=np.int64)
    if not isinstance(source, Dataset | Pictures):
        return index, index
    rows = source.original(index)
    order = np.argsort(rows)
    return order.astype(np.int64), rows[order]


def _told(parts: Parts, act: Callable[[], Any]) -> Any:
    """The result of `act` on rank 0, whose WordsError is raised on every rank."""

    def judged() -> list[Any]:
        try:
            return [act(), ""]
        except WordsError as error:
            return [None, str(error)]

    done, refused = parts.mesh.on_rank_0("look at predictions", judged)
    if refused:
        raise WordsError(refused)
    return done


class Form(NamedTuple):
    """The form of an answer. `each`: as `ragged` takes them, one for each entry of a row that was padded; `targets`: so
    many numbers behind it are the target of the row.
    """

    task: str | None
    each: bool
    targets: int

    def apart(self, answers: Tensor) -> tuple[Tensor, Tensor | None]:
        """(answers, targets)."""
        if not self.targets:
            return answers, None
        targets = answers[:, -self.targets :]
        return answers[:, : -self.targets], targets[:, 0] if self.task == "classification" else targets


def _form_of(source: Source, parts: Parts, data: Part) -> Form:
    """Targets of files are read there, others come with the samples."""
    task, first = about(parts.plan.objective).get("task"), np.array([0])
    each = task == "regression" and "target_mask" in parts.source.take(first, first)
    if each or task not in ("classification", "regression") or has_rows(data) or isinstance(source, Pictures):
        return Form(task, each, 0)
    targets = source.take(first, first)["targets"]
    return Form(task, each, targets.numel() if task == "regression" or targets.ndim == 1 else 0)


def _answers(parts: Parts, source: Source, index: Indices, batch: int, form: Form) -> Tensor:
    """The answers [N, K] to these samples in fp32 on the CPU, on every rank, as `form` says."""
    mesh, mine = parts.mesh, list[Tensor]()
    forwards, limits = -(-len(index) // batch), limits_of(parts.model)
    for first in range(0, forwards, mesh.data_ranks):
        number = first + mesh.data_rank
        idle = number >= forwards
        taken = index[:batch] if idle else index[number * batch : (number + 1) * batch]
        sizes: Sizes = {}
        if isinstance(source, Dataset):
            rows, sizes = source.sized(taken, np.zeros_like(taken))
        else:
            rows = source.take(taken, np.zeros_like(taken))
        limits.check(rows)
        given = to_device(rows, mesh.device)
        compile.begin()
        seeds.reseed(0, number, mesh.batch_rank)
        with parts.precision.autocast(mesh.device):
            try:
                outputs = answer(call(parts.forward, asked(parts.objective, given)))
            except Exception:
                _refuse_other(given, parts)
                raise
        answers = _of_rows(outputs, given, form.task)
        if form.targets:
            answers = torch.cat([answers, given["targets"].float().reshape(len(answers), -1)], 1)
        if form.each:
            answers = _counted(answers, outputs, sizes)
        mine.append(answers[:0] if idle else answers)
    whole = [list(rows.cpu().split(batch)) for rows in gathered(torch.cat(_even(mine)), mesh)]
    ordered = [whole[number % mesh.data_ranks].pop(0) for number in range(forwards)]
    return torch.cat(_even(ordered))


def _counted(answers: Tensor, outputs: Tensor, sizes: Sizes) -> Tensor:
    """Flat answers [B, K] behind the number that are of entries of their row, of `outputs` [B, T, ...]."""
    lengths = sizes.get("targets", sizes.get("inputs"))
    if lengths is None:
        lengths = torch.full((len(answers),), outputs.shape[1])
    counts = lengths * (answers.shape[1] // outputs.shape[1])
    return torch.cat([counts[:, None].to(answers), answers], 1)


def _even(parts: list[Tensor]) -> list[Tensor]:
    """Answers of forwards whose rows were padded to different lengths."""
    widest = max(part.shape[1] for part in parts)
    return [F.pad(part, (0, widest - part.shape[1])) for part in parts]


def _refuse_other(given: Batch, parts: Parts) -> None:
    """Raises WordsError for samples of another shape than those of training."""
    inputs, trained = given["inputs"], parts.source.facts.get("inputs")
    shape = list(inputs.shape[1:]) if isinstance(inputs, Tensor) else [*inputs]
    if trained is not None and shape != list(trained):
        raise WordsError(
            f"predict.data: a sample is {shape}, and the model of this run was trained on {list(trained)}. Name data "
            "of that shape."
        )


def _of_rows(outputs: Tensor, batch: Batch, task: str | None) -> Tensor:
    """[B, K] of the outputs of one forward."""
    if task == "next_token":
        targets = batch["targets"]
        each = F.cross_entropy(outputs.float().movedim(-1, 1), targets, ignore_index=IGNORE, reduction="none")
        return torch.stack([-each.sum(1), (targets != IGNORE).sum(1).float()], 1)
    if (task == "classification" and outputs.ndim != 2) or (task is None and outputs.ndim > 2):
        raise WordsError(
            f"predict: the model gives {list(outputs.shape)}, and the objective does not say what answer a row has in "
            "them. Its class may state about = {'task': 'classification'}, next_token or regression."
        )
    return outputs.float().flatten(1) if outputs.ndim > 1 else outputs.float()[:, None]
