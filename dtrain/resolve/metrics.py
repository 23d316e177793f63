"""Decides the metrics of the evaluation, `evaluate.metrics`: words of conf/metric, classes of torchmetrics and of the
user's own. Their figures are added to those of the objective.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config import files
from dtrain.config.facts import about
from dtrain.config.schema import Config
from dtrain.config.trust import allowed
from dtrain.config.word import spelling
from dtrain.errors import WordsError, nearest
from dtrain.planned import Part
from dtrain.resolve.declared import dataset, figures
from dtrain.resolve.own import with_stated
from dtrain.resolve.signature import lineage
from dtrain.resolve.source import literal
from dtrain.resolve.targets import judged

KEY = "evaluate.metrics"
OF_TEXT = (
    "bleu compares generated text with references, and these metrics see the scores of the right tokens. It is one "
    "of tasks that write text: dtrain evaluate as=lm_eval evaluate.tasks=[<task>], with metric: bleu in its YAML."
)


OF_OTHERS = (
    " Others are classes of torchmetrics, such as [{_target_: torchmetrics.classification.MulticlassRecall, "
    "num_classes: 3}] with trust=[torchmetrics]."
)


def named(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics by the name of their figure, and the objective with what is best of each. Raises WordsError."""
    objective, parts, problems = draft["objective"], dict[str, Part](), list[str]()
    known = about(objective).get("figures") or {}
    for number, asked in enumerate(config.evaluate.metrics):
        part = _part(asked, f"{KEY}.{number}", config, problems)
        if part is None:
            continue
        name = asked if isinstance(asked, str) else name_of(str(part["_target_"]))
        if isinstance(asked, str) and f"eval_{name}" in known:
            continue  # the objective measures it already
        problems += _misfit(name, part, objective, config)
        if name in parts or f"eval_{name}" in known:
            problems.append(f"{KEY}: eval_{name} is there twice. Leave one of them out.")
        parts[name] = part
    if problems:
        raise WordsError(*dict.fromkeys(problems))
    best = {figure: which for name, part in parts.items() for figure, which in _best(name, part).items()}
    facts = {**about(objective), "figures": {**known, **best}}
    return {"evaluate_metrics": parts, "objective": {**objective, "_about_": facts} if best else objective}


def name_of(target: str) -> str:
    """The name of the figure of a class: MulticlassF1Score -> multiclass_f1_score."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", target.rpartition(".")[2]).lower()


def _part(asked: Any, place: str, config: Config, problems: list[str]) -> Part | None:
    """The part of one entry; None if there is none, or it may not be looked at."""
    words = files.groups()["metric"]
    if isinstance(asked, str) and asked in words:
        return files.node("metric", asked)
    if asked == "bleu":
        problems.append(f"{KEY}: {OF_TEXT}")
    elif not isinstance(asked, Mapping) or not isinstance(asked.get("_target_"), str):
        near = nearest(str(asked), words).replace("Did you mean ", f"Did you mean {KEY}=[").replace("?", "]?")
        others = "" if KEY in near else OF_OTHERS
        problems.append(f"{KEY}: there is no metric {spelling(asked)}.{near}{others}")
    elif allowed(asked["_target_"], "metric", config.trust):  # else the rule of trust says so
        wrong = [*judged(asked, place, config)]
        problems += wrong
        part: Part = with_stated("metric", asked)
        return None if wrong else part
    return None


def _misfit(name: str, part: Part, objective: Part, config: Config) -> Iterable[str]:
    """A metric that says nothing about what this run predicts."""
    tasks, task = about(part).get("tasks"), about(objective).get("task")
    if tasks and task not in tasks:
        said = f"objective={config.word('objective')}" if task is None else f"a run of {task}"
        yield f"{KEY}: {name} is a metric of {' or '.join(tasks)}, and this is {said}. Leave {name} out."
        return
    fewest, classes = about(part).get("classes", 0), _classes(config)
    if classes is not None and classes < fewest:
        yield f"{KEY}: {name} says nothing about {classes} classes. Leave {name} out."


def _classes(config: Config) -> int | None:
    """The number of classes, if the words or the class of the dataset say it."""
    names = "outputs", "vocab"
    said = [config.model.get(name) for name in names] + [config.data.get(name) for name in names]
    said.append(dataset(config.data.get("dataset")).get("outputs"))
    return next((number for number in said if type(number) is int), None)


def _best(name: str, part: Part) -> Mapping[str, str]:
    """Figure -> lowest or highest, as the word or the class states it; torchmetrics says `higher_is_better`."""
    if stated := figures(part):
        return stated
    for _, statement in lineage(str(part["_target_"])):
        higher = literal(statement, "higher_is_better")
        if higher is not None:
            return {f"eval_{name}": "highest" if higher else "lowest"}
    return {}
