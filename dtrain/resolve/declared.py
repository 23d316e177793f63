"""Declarations of a model, dataset, objective or hook of the user's own, or of the config of a Hugging Face model:
read off its source, like its signature, without running a line of it.

A mesh that such a model cannot take is refused before launch: `dtrain plan model._target_=mypkg.Net trust=[mypkg]
devices=2 mesh.tp=2`.
"""

import ast
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config import files
from dtrain.config.schema import Config
from dtrain.errors import WordsError
from dtrain.planned import MeshShape
from dtrain.resolve.mesh import nearest_divisors
from dtrain.resolve.signature import class_of, lineage
from dtrain.resolve.source import assigned, literal

MODULES = ("nn.Module", "torch.nn.Module", "Module")
HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads", "v_proj": "num_key_value_heads"}
"""The last part of a name in the tensor-parallel plan of a Hugging Face config -> the size that a rank gets an even
part of.
"""


def model(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Raises WordsError for each axis that a model of the user's own cannot be split over, as far as its source
    tells.
    """
    mesh, part = draft["mesh"], config.model
    problems = list[str]()
    if config.choices["model"] is None and isinstance(part.get("_target_"), str):
        problems += _own(mesh, part["_target_"])
        problems += _hugging_face(mesh, part.get("config"))
    if problems:
        raise WordsError(*problems)
    return {}


def dataset(part: Any) -> Mapping[str, Any]:
    """Facts that the class of a map-style dataset states, or a base class: `outputs`, where it has `classes` (their
    number or names) that no method changes, and the shapes of `inputs` and `targets` and the number of `samples` in its
    `about`.
    """
    target = part["_target_"] if isinstance(part, Mapping) and isinstance(part.get("_target_"), str) else ""
    of = [found for _, found in lineage(target)]
    classes, about = _inherited(of, "classes"), _inherited(of, "about")
    count, stated = (
        len(classes) if isinstance(classes, list | tuple) else classes,
        about if isinstance(about, dict) else {},
    )
    stores = [
        node
        for found in of
        for node in ast.walk(found)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    ]
    changed = any(node.attr == "classes" for node in stores)
    facts: dict[str, Any] = {"outputs": count} if type(count) is int and count > 0 and not changed else {}
    shapes = {name: stated[name] for name in ("inputs", "targets") if isinstance(stated.get(name), list | tuple)}
    facts |= {"samples": stated["samples"]} if type(stated.get("samples")) is int and stated["samples"] > 0 else {}
    return facts | {name: list(shape) for name, shape in shapes.items() if all(type(size) is int for size in shape)}


def figures(part: Mapping[str, Any]) -> Mapping[str, str]:
    """Figure -> lowest or highest, whichever is the best, as the word of an objective or a hook states it, or its class
    in `about`, or the word or class it is derived from.
    """
    stated = [part.get("_about_")]
    for module, found in lineage(_own_target(part)):
        group, _, word = module.removeprefix("dtrain.").partition(".")
        ours = module.startswith("dtrain.") and word in files.groups().get(group, ())
        stated.append(files.node(group, word).get("_about_") if ours else literal(found, "about"))
    return {name: which for each in reversed(stated) for name, which in _directions(each).items()}


def states_figures(part: Mapping[str, Any]) -> bool:
    """Whether all figures of an objective or a hook are known: of ours, and where a class of one's own says which it
    has.
    """
    of = [literal(found, "about") for module, found in lineage(_own_target(part)) if not module.startswith("dtrain.")]
    stated = [each for each in (part.get("_about_"), *of) if isinstance(each, Mapping)]
    return not _own_target(part) or any(_directions(each) or each.get("figures") == {} for each in stated)


def _own_target(part: Mapping[str, Any]) -> str:
    target = str(part.get("_target_", ""))
    return "" if target.startswith("dtrain.") else target


def _directions(stated: Any) -> dict[str, str]:
    named = stated.get("figures") if isinstance(stated, Mapping) else None
    return (
        {name: which for name, which in named.items() if which in ("lowest", "highest")}
        if isinstance(named, Mapping)
        else {}
    )


def _own(mesh: MeshShape, target: str) -> Iterable[str]:
    """A class that stands on nn.Module alone, and makes no module but those of torch and of its own file, has the
    tables of that file.
    """
    file, found = class_of(target) or (None, None)
    if (
        file is None
        or found is None
        or found.keywords
        or [ast.unparse(base) for base in found.bases] not in ([name] for name in MODULES)
    ):
        return
    text = file.read_text()
    if mesh.tp > 1 and "tp_plan" not in text and _knows_its_modules(text):
        yield (
            f"mesh.tp={mesh.tp}: {target} has no tensor-parallel plan. "
            "Give the class a table such as tp_plan = {'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}, or "
            "leave mesh.tp out."
        )
    if (
        mesh.pp > 1
        and not any(word in text for word in ("pipeline", "_pp_plan", "nn.Sequential)"))
        and _knows_its_modules(text)
    ):
        yield (
            f"mesh.pp={mesh.pp}: {target} does not say where it may be cut. "
            "Give the class a table such as pipeline = ('embed', 'blocks', 'norm', 'head'): its modules in the order "
            "they run."
        )
    forward = next(
        (entry.args for entry in found.body if isinstance(entry, ast.FunctionDef) and entry.name == "forward"), None
    )
    takes = {each.arg for each in (*forward.posonlyargs, *forward.args, *forward.kwonlyargs)} if forward else set()
    if mesh.cp > 1 and forward and not forward.kwarg and "position_ids" not in takes:
        yield (
            f"mesh.cp={mesh.cp}: the forward of {target} takes no position_ids, and a part of a sequence does not "
            "know where it stands. "
            "Give a model of sequences that argument ([1, T], whole numbers), or leave mesh.cp out."
        )


def _knows_its_modules(text: str) -> bool:
    """Whether a file imports nothing that may be, or make, a model with tables of its own."""
    imported = set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add("." if node.level else str(node.module).split(".")[0])
    return imported <= {"torch", "einops", *sys.stdlib_module_names, "numpy", "__future__"}


def _hugging_face(mesh: MeshShape, part: Any) -> Iterable[str]:
    """Sizes in the words of its config, against the tensor-parallel plan that the class of the config declares."""
    if not isinstance(part, Mapping) or not isinstance(part.get("_target_"), str):
        return
    if mesh.pp > 1 and part.get("tie_word_embeddings") is True:
        yield (
            f"mesh.pp={mesh.pp}: model.config.tie_word_embeddings=true is one weight in the first and the last stage. "
            "Type model.config.tie_word_embeddings=false, or leave mesh.pp out."
        )
    found = class_of(part["_target_"]) if mesh.tp > 1 else None
    plan = literal(found[1], "base_model_tp_plan") if found else None
    if not isinstance(plan, dict):
        return
    split = {
        HEADS[last]
        for name, style in plan.items()
        if (last := str(name).split(".")[-1]) in HEADS and style == "colwise"
    }
    sizes = {name: part[name] for name in sorted(split) if isinstance(part.get(name), int) and part[name] > 0}
    for name, size in sizes.items():
        if size % mesh.tp:
            fits = nearest_divisors("mesh.tp", mesh.tp, math.gcd(*sizes.values(), mesh.ranks))
            yield f"mesh.tp={mesh.tp} does not divide model.config.{name}={size}. {fits}"


def _inherited(of: Iterable[ast.ClassDef], name: str) -> Any:
    """The value of an attribute of the first of these classes that has it, where that is written out."""
    having = (
        found
        for found in of
        if name in {said for entry in found.body for said in (getattr(entry, "name", ""), *assigned(entry))}
    )
    return next((literal(found, name) for found in having), None)
