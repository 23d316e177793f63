"""Reads what a user's own model, dataset, objective or hook, or the config of a Hugging Face model, declares in its
source, without running it.

A mesh that such a model cannot run on is refused before launch: `dtrain plan model._target_=mypkg.Net trust=[mypkg]
devices=2 mesh.tp=2`.
"""

import ast
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from dtrain.build import received
from dtrain.cluster import Cluster
from dtrain.config import files
from dtrain.config.facts import about
from dtrain.config.schema import Config
from dtrain.planned import MeshShape
from dtrain.resolve.mesh import undivided
from dtrain.resolve.signature import class_of, lineage
from dtrain.resolve.source import assigned, literal

MODULES = ("nn.Module", "torch.nn.Module", "Module")
HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads", "v_proj": "num_key_value_heads"}
"""Last part of a name in the tensor-parallel plan of a Hugging Face config -> the size that tp must divide."""


def model(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> Iterable[str]:
    """Check each mesh axis against what the source of a user's own model says that can be split."""
    mesh, part = draft["mesh"], config.model
    if config.choices["model"] is None and isinstance(part.get("_target_"), str):
        yield from _own(mesh, part["_target_"])
        yield from _hugging_face(mesh, part.get("config"))


def dataset(part: Any) -> Mapping[str, Any]:
    """Facts that the class of a map-style dataset or one of its bases states: `outputs`, from a `classes` attribute
    (number or names) that no method changes, and from `about` the shapes of `inputs` and `targets` and the number of
    `samples`.
    """
    target = part["_target_"] if isinstance(part, Mapping) and isinstance(part.get("_target_"), str) else ""
    statements = [statement for _, statement in lineage(target)]
    classes, about = _inherited(statements, "classes"), _inherited(statements, "about")
    count = len(classes) if isinstance(classes, list | tuple) else classes
    stated = about if isinstance(about, dict) else {}
    nodes = (node for statement in statements for node in ast.walk(statement))
    stores = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    counts = {"samples": stated.get("samples")}
    if not any(node.attr == "classes" for node in stores):
        counts["outputs"] = count
    facts: dict[str, Any] = {name: number for name, number in counts.items() if type(number) is int and number > 0}
    for name in ("inputs", "targets"):
        shape = stated.get(name)
        if isinstance(shape, list | tuple) and all(type(size) is int for size in shape):
            facts[name] = list(shape)
    return facts


def figures(part: Mapping[str, Any]) -> Mapping[str, str]:
    """Figure -> whether its lowest or highest value is the best, as stated by the word of an objective or hook, by the
    `about` of its class, or by the word or class it derives from.
    """
    stated = [part.get("_about_"), getattr(received(part), "about", None)]
    for module, statement in lineage(_own_target(part)):
        group, _, word = module.removeprefix("dtrain.").partition(".")
        ours = module.startswith("dtrain.") and word in files.groups().get(group, ())
        stated.append(files.node(group, word).get("_about_") if ours else literal(statement, "about"))
    return {name: which for each in reversed(stated) for name, which in _directions(each).items()}


def states_figures(part: Mapping[str, Any]) -> bool:
    """Whether all figures of an objective or hook are known: it is dtrain's own and no model
    `logs` others, or its class declares them.
    """
    classes, given = lineage(_own_target(part)), received(part)
    own = [literal(statement, "about") for module, statement in classes if not module.startswith("dtrain.")]
    stated = [each for each in (part.get("_about_"), getattr(given, "about", None), *own) if isinstance(each, Mapping)]
    is_ours = not _own_target(part) and given is None
    if about(part).get("logs"):
        return False
    return is_ours or any(_directions(each) or each.get("figures") == {} for each in stated)


def may_have(name: str, *parts: Mapping[str, Any]) -> bool:
    """Whether an evaluation may have a figure that no source names, of an objective or hook that does not state all."""
    return name.startswith("eval_") and not all(map(states_figures, parts))


def _own_target(part: Mapping[str, Any]) -> str:
    target = str(part.get("_target_", ""))
    return "" if target.startswith("dtrain.") else target


def _directions(stated: Any) -> dict[str, str]:
    named = stated.get("figures") if isinstance(stated, Mapping) else None
    if not isinstance(named, Mapping):
        return {}
    return {name: which for name, which in named.items() if which in ("lowest", "highest")}


def _own(mesh: MeshShape, target: str) -> Iterable[str]:
    """Problems of a class that derives from nn.Module alone and whose file imports no other modules: all its tables are
    in that file.
    """
    definition = class_of(target)
    if definition is None:
        return
    file, statement = definition
    if statement.keywords or [ast.unparse(base) for base in statement.bases] not in ([name] for name in MODULES):
        return
    text = file.read_text("utf-8", errors="replace")
    if mesh.tp > 1 and "tp_plan" not in text and _knows_its_modules(text):
        yield (
            f"mesh.tp={mesh.tp}: {target} has no tensor-parallel plan. Give the class a table such as tp_plan = "
            "{'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}, or leave mesh.tp out."
        )
    uncut = not any(word in text for word in ("pipeline", "_pp_plan", "nn.Sequential)"))
    if mesh.pp > 1 and uncut and _knows_its_modules(text):
        yield (
            f"mesh.pp={mesh.pp}: {target} does not say where it may be cut. Give the class a table such as pipeline = "
            "('embed', 'blocks', 'norm', 'head'): its modules in the order they run."
        )
    methods = {entry.name: entry.args for entry in statement.body if isinstance(entry, ast.FunctionDef)}
    forward = methods.get("forward")
    if forward is None or forward.kwarg or mesh.cp == 1:
        return
    if "position_ids" not in {node.arg for node in ast.walk(forward) if isinstance(node, ast.arg)}:
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
    split = {HEADS.get(str(name).split(".")[-1], "") for name, style in plan.items() if style == "colwise"}
    sizes = {name: part[name] for name in sorted(split) if isinstance(part.get(name), int) and part[name] > 0}
    yield from undivided(mesh, "model.config", sizes)


def _inherited(classes: Iterable[ast.ClassDef], name: str) -> Any:
    """The attribute of the first of these classes that defines it, if its value is a literal."""
    for statement in classes:
        if any(name == getattr(entry, "name", "") or name in assigned(entry) for entry in statement.body):
            return literal(statement, name)
    return None
