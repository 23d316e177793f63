"""What a model, a dataset, an objective or a hook of the user's own, or the config of a Hugging Face model, declares: read off its source, like its signature, without running a line of it.

A mesh that such a model cannot take is refused before launch: `dtrain plan model._target_=mypkg.Net trust=[mypkg] devices=2 mesh.tp=2`.
"""

import ast
import contextlib
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config import Config
from dtrain.errors import WordsError
from dtrain.plan import MeshShape
from dtrain.resolve.mesh import nearest_divisors
from dtrain.resolve.signature import class_of

MODULES = ("nn.Module", "torch.nn.Module", "Module")
HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads", "v_proj": "num_key_value_heads"}
"""The last part of a name in the tensor-parallel plan of a Hugging Face config -> the size that a rank gets an even part of."""


def model(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Raises WordsError for each axis that a model of the user's own cannot be split over, as far as its source tells."""
    mesh, part = draft["mesh"], config.model
    problems = list[str]()
    if config.choices["model"] is None and isinstance(part.get("_target_"), str):
        problems += _own(mesh, part["_target_"])
        problems += _hugging_face(mesh, part.get("config"))
    if problems:
        raise WordsError(*problems)
    return {}


def dataset(part: Any) -> Mapping[str, Any]:
    """What the class of a map-style dataset states: `outputs`, where it has `classes` (their number or names) that no method changes, and the shapes of `inputs` and `targets` and the number of `samples` in its `about`."""
    found = class_of(part["_target_"]) if isinstance(part, Mapping) and isinstance(part.get("_target_"), str) else None
    if found is None:
        return {}
    classes, about = _literal(found[1], "classes"), _literal(found[1], "about")
    count, stated = len(classes) if isinstance(classes, list | tuple) else classes, about if isinstance(about, dict) else {}
    changed = any(isinstance(node, ast.Attribute) and node.attr == "classes" and isinstance(node.ctx, ast.Store) for node in ast.walk(found[1]))
    facts: dict[str, Any] = {"outputs": count} if type(count) is int and count > 0 and not changed else {}
    shapes = {name: stated[name] for name in ("inputs", "targets") if isinstance(stated.get(name), list | tuple)}
    facts |= {"samples": stated["samples"]} if type(stated.get("samples")) is int and stated["samples"] > 0 else {}
    return facts | {name: list(shape) for name, shape in shapes.items() if all(type(size) is int for size in shape)}


def figures(part: Mapping[str, Any]) -> Mapping[str, str]:
    """Figure -> lowest or highest, whichever is the best, as the word of an objective or a hook states it, or its class in `about`."""
    target = str(part.get("_target_"))
    found = None if target.startswith("dtrain.") else class_of(target)
    stated = (_literal(found[1], "about") if found else None) or part.get("_about_")
    named = stated.get("figures") if isinstance(stated, Mapping) else None
    return {name: which for name, which in named.items() if which in ("lowest", "highest")} if isinstance(named, Mapping) else {}


def _own(mesh: MeshShape, target: str) -> Iterable[str]:
    """A class that stands on nn.Module alone, and makes no module but those of torch and of its own file, has the tables of that file."""
    file, found = class_of(target) or (None, None)
    if file is None or found is None or found.keywords or [ast.unparse(base) for base in found.bases] not in ([name] for name in MODULES):
        return
    text = file.read_text()
    if mesh.tp > 1 and "tp_plan" not in text and _knows_its_modules(text):
        yield (
            f"mesh.tp={mesh.tp}: {target} has no tensor-parallel plan. "
            "Give the class a table such as tp_plan = {'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}, or leave mesh.tp out."
        )
    if mesh.pp > 1 and not any(word in text for word in ("pipeline", "_pp_plan", "nn.Sequential)")) and _knows_its_modules(text):
        yield (
            f"mesh.pp={mesh.pp}: {target} does not say where it may be cut. "
            "Give the class a table such as pipeline = ('embed', 'blocks', 'norm', 'head'): its modules in the order they run."
        )
    forward = next((entry.args for entry in found.body if isinstance(entry, ast.FunctionDef) and entry.name == "forward"), None)
    takes = {each.arg for each in (*forward.posonlyargs, *forward.args, *forward.kwonlyargs)} if forward else set()
    if mesh.cp > 1 and forward and not forward.kwarg and "position_ids" not in takes:
        yield (
            f"mesh.cp={mesh.cp}: the forward of {target} takes no position_ids, and a part of a sequence does not know where it stands. "
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
    plan = _literal(found[1], "base_model_tp_plan") if found else None
    if not isinstance(plan, dict):
        return
    split = {HEADS[last] for name, style in plan.items() if (last := str(name).split(".")[-1]) in HEADS and style == "colwise"}
    sizes = {name: part[name] for name in sorted(split) if isinstance(part.get(name), int) and part[name] > 0}
    for name, size in sizes.items():
        if size % mesh.tp:
            fits = nearest_divisors("mesh.tp", mesh.tp, math.gcd(*sizes.values(), mesh.ranks))
            yield f"mesh.tp={mesh.tp} does not divide model.config.{name}={size}. {fits}"


def _literal(found: ast.ClassDef, name: str) -> Any:
    """The value of a class attribute that is written out."""
    for entry in found.body:
        targets = entry.targets if isinstance(entry, ast.Assign) else [entry.target] if isinstance(entry, ast.AnnAssign) else []
        if isinstance(entry, ast.Assign | ast.AnnAssign) and entry.value and [ast.unparse(target) for target in targets] == [name]:
            with contextlib.suppress(ValueError):
                return ast.literal_eval(entry.value)
    return None
