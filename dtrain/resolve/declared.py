"""Reads what a user's own model, dataset, objective or hook, or the config of a Hugging Face model, declares in its
source, without running it.

A mesh that such a model cannot run on is refused before launch: `dtrain plan model._target_=mypkg.Net trust=[mypkg]
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
"""Last part of a name in the tensor-parallel plan of a Hugging Face config -> the size that tp must divide."""


def model(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Raises WordsError for each mesh axis that, according to its source, cannot split a user's own model."""
    mesh, part = draft["mesh"], config.model
    problems = list[str]()
    if config.choices["model"] is None and isinstance(part.get("_target_"), str):
        problems += _own(mesh, part["_target_"])
        problems += _hugging_face(mesh, part.get("config"))
    if problems:
        raise WordsError(*problems)
    return {}


def dataset(part: Any) -> Mapping[str, Any]:
    """Facts that the class of a map-style dataset or one of its bases states: `outputs`, from a `classes` attribute
    (number or names) that no method changes, and from `about` the shapes of `inputs` and `targets` and the number of
    `samples`.
    """
    target = part["_target_"] if isinstance(part, Mapping) and isinstance(part.get("_target_"), str) else ""
    statements = [statement for _, statement in lineage(target)]
    classes, about = _inherited(statements, "classes"), _inherited(statements, "about")
    count, stated = (
        len(classes) if isinstance(classes, list | tuple) else classes,
        about if isinstance(about, dict) else {},
    )
    stores = [
        node
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    ]
    changed = any(node.attr == "classes" for node in stores)
    facts: dict[str, Any] = {"outputs": count} if type(count) is int and count > 0 and not changed else {}
    shapes = {name: stated[name] for name in ("inputs", "targets") if isinstance(stated.get(name), list | tuple)}
    facts |= {"samples": stated["samples"]} if type(stated.get("samples")) is int and stated["samples"] > 0 else {}
    return facts | {name: list(shape) for name, shape in shapes.items() if all(type(size) is int for size in shape)}


def figures(part: Mapping[str, Any]) -> Mapping[str, str]:
    """Figure -> whether its lowest or highest value is the best, as stated by the word of an objective or hook, by the
    `about` of its class, or by the word or class it derives from.
    """
    stated = [part.get("_about_")]
    for module, statement in lineage(_own_target(part)):
        group, _, word = module.removeprefix("dtrain.").partition(".")
        ours = module.startswith("dtrain.") and word in files.groups().get(group, ())
        stated.append(files.node(group, word).get("_about_") if ours else literal(statement, "about"))
    return {name: which for each in reversed(stated) for name, which in _directions(each).items()}


def states_figures(part: Mapping[str, Any]) -> bool:
    """Whether all figures of an objective or hook are known: it is dtrain's own, or its class declares them."""
    classes = lineage(_own_target(part))
    own = [literal(statement, "about") for module, statement in classes if not module.startswith("dtrain.")]
    stated = [each for each in (part.get("_about_"), *own) if isinstance(each, Mapping)]
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
    """Problems of a class that derives from nn.Module alone and whose file imports no other modules: all its tables are
    in that file.
    """
    file, statement = class_of(target) or (None, None)
    if (
        file is None
        or statement is None
        or statement.keywords
        or [ast.unparse(base) for base in statement.bases] not in ([name] for name in MODULES)
    ):
        return
    text = file.read_text()
    if mesh.tp > 1 and "tp_plan" not in text and _knows_its_modules(text):
        yield (
            f"mesh.tp={mesh.tp}: {target} has no tensor-parallel plan. Give the class a table such as tp_plan = "
            "{'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}, or leave mesh.tp out."
        )
    if (
        mesh.pp > 1
        and not any(word in text for word in ("pipeline", "_pp_plan", "nn.Sequential)"))
        and _knows_its_modules(text)
    ):
        yield (
            f"mesh.pp={mesh.pp}: {target} does not say where it may be cut. Give the class a table such as pipeline = "
            "('embed', 'blocks', 'norm', 'head'): its modules in the order they run."
        )
    forward = next(
        (entry.args for entry in statement.body if isinstance(entry, ast.FunctionDef) and entry.name == "forward"), None
    )
    takes = {each.arg for each in (*forward.posonlyargs, *forward.args, *forward.kwonlyargs)} if forward else set()
    if mesh.cp > 1 and forward and not forward.kwarg and "position_ids" not in takes:
        yield (
            f"mesh.cp={mesh.cp}: the forward of {target} takes no position_ids, so a rank cannot know the "
            "positions of its part of a sequence. Add that argument (int64, shape [1, T]), or leave mesh.cp out."
        )


def _knows_its_modules(text: str) -> bool:
    """Whether a file imports nothing that could define a model with its own tables."""
    imported = set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add("." if node.level else str(node.module).split(".")[0])
    return imported <= {"torch", "einops", *sys.stdlib_module_names, "numpy", "__future__"}


def _hugging_face(mesh: MeshShape, part: Any) -> Iterable[str]:
    """Problems of the sizes in a Hugging Face config with the tensor-parallel plan that its class declares."""
    if not isinstance(part, Mapping) or not isinstance(part.get("_target_"), str):
        return
    if mesh.pp > 1 and part.get("tie_word_embeddings") is True:
        yield (
            f"mesh.pp={mesh.pp}: model.config.tie_word_embeddings=true is one weight in the first and the last stage. "
            "Type model.config.tie_word_embeddings=false, or leave mesh.pp out."
        )
    definition = class_of(part["_target_"]) if mesh.tp > 1 else None
    plan = literal(definition[1], "base_model_tp_plan") if definition else None
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


def _inherited(classes: Iterable[ast.ClassDef], name: str) -> Any:
    """The attribute of the first of these classes that defines it, if its value is a literal."""
    for statement in classes:
        if any(name == getattr(entry, "name", "") or name in assigned(entry) for entry in statement.body):
            return literal(statement, name)
    return None
