"""Data beside that of the run, which is measured or predicted: `evaluate.sets` and `predict.data`. Each is the data of
the run with other arguments, or another word of `data` with its own.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config import constraints, files
from dtrain.config.facts import about
from dtrain.config.schema import Config
from dtrain.errors import WordsError, nearest
from dtrain.planned import Part
from dtrain.resolve.declared import figures
from dtrain.resolve.mixture import SHARED, misfit

NAME = re.compile(r"[a-z][a-z0-9_]*")


def predicted(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `dtrain predict`; its data is empty for the held-out samples of the run."""
    problems = list[str]()
    given = config.predict.data
    part = _part("predict.data", given, draft["data"], config, problems) if given else {}
    if problems:
        raise WordsError(*problems)
    return {"predict": {**vars(config.predict), "data": part}}


def measured(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """The sets that are evaluated beside the held-out samples, and the objective with what is best of their figures."""
    problems, sets = list[str](), dict[str, Part]()
    objective, known = draft["objective"], figures(draft["objective"])
    for name, given in config.evaluate.sets.items():
        key = f"evaluate.sets.{name}"
        if not NAME.fullmatch(str(name)):
            problems.append(f"{key}: a set is named by small letters, digits and _, a letter first. Type another name.")
            continue
        if name == "ema" or any(each.startswith(f"eval_{name}_") for each in known):
            problems.append(f"{key}: eval_{name}_... is a figure of the run already. Type another name.")
            continue
        sets[name] = _part(key, given, draft["data"], config, problems)
    if problems:
        raise WordsError(*problems)
    best = {**known}
    for name in sets:
        best |= {figure.replace("eval_", f"eval_{name}_", 1): which for figure, which in known.items()}
    facts = {**about(objective), "figures": best}
    return {"evaluate_sets": sets, "objective": {**objective, "_about_": facts} if sets else objective}


def is_of_a_set(figure: str, sets: Iterable[str]) -> bool:
    """Whether an evaluation of one of these sets has the figure, such as eval_dev_loss or eval_ema_dev_loss."""
    return figure.removeprefix("eval_").removeprefix("ema_").startswith(tuple(f"{name}_" for name in sets))


def measured_on(key: str, figure: str, sets: Iterable[str], data: Mapping[str, Any]) -> str:
    """The words by which a figure of held-out samples is measured where nothing of `data` is held out: the figure of a
    set, which leaves the training samples alone; without a set, a part of the data.
    """
    begin = "eval_ema_" if figure.startswith("eval_ema_") else "eval_"
    for name in sets:
        return f"{key}={figure.replace(begin, f'{begin}{name}_', 1)}"
    return f"data.{next(name for name in data if name.startswith('holdout'))}=0.1"


def _part(key: str, given: Any, data: Part, config: Config, problems: list[str]) -> Part:
    """The part of one set, all of whose samples are used."""
    if not isinstance(given, Mapping) or not given:
        problems.append(f"{key}={given}: name what is other than in `data`, such as '{key}={{path: <files>}}'.")
        return {}
    given = {str(name).removeprefix("data."): value for name, value in given.items()}
    if isinstance(given.get("data"), Mapping):
        given |= given.pop("data")
    word, base = given.pop("data", None), {**data}
    words = files.groups()["data"]
    if word is not None and word not in words:
        problems.append(f"{key}.data={word}: there is no such data.{nearest(str(word), words)}")
        return {}
    if word is not None and word != config.choices["data"]:
        base = files.node("data", word)
        base |= {name: data[name] for name in SHARED if data.get(name) is not None and name in base}
    said = word or config.choices["data"] or data["_target_"]
    names = [name for name in base if name[0] != "_" and not name.startswith("holdout")]
    problems += [
        f"{key}.{name}: data={said} has no {name}.{nearest(name, names)}" for name in given if name not in names
    ]
    part = base | {name: value for name, value in given.items() if name in names}
    for name in (name for name in part if name.startswith("holdout")):
        part[name] = 0 if constraints.is_number(part[name]) else None
    for name, allowed in about(part).get("allowed", {}).items():
        if part.get(name) == "???" or not constraints.fits(part.get(name), allowed):
            problems.append(misfit(key, name, word=said, value=part[name], allowed=allowed, config=config))
    if about(part).get("replayed"):
        problems.append(f"{key}: data={said} has no index. Type {key}.data=<a word of data that has>, and its files.")
    return part
