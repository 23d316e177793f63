"""Reads a Python script with a training loop of its own, on PyTorch alone or on Accelerate, into a tree: the calls that
make its accelerator, optimizer, schedule and loader, and what the loop counts. No line is run.
"""

import ast
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from dtrain.integrations.importers import scopes
from dtrain.integrations.importers.calls import Script, is_seed, last, same
from dtrain.integrations.importers.ledger import Code
from dtrain.integrations.importers.made import WRAPPERS, made
from dtrain.integrations.importers.terms import DEFAULTS

LOOP = "loop"
"""The only key at the top of such a tree."""
OPTIMIZERS = {
    *DEFAULTS, "adadelta", "adagrad", "adamax", "nadam", "radam", "rmsprop", "lion", "adafactor", "muon", "lbfgs",
    "rprop", "asgd", "adamw8bit", "adam8bit", "pagedadamw8bit",
}  # fmt: skip
SCHEDULES = {
    "get_scheduler": "", "get_linear_schedule_with_warmup": "linear", "get_cosine_schedule_with_warmup": "cosine",
    "get_constant_schedule": "constant", "get_constant_schedule_with_warmup": "constant_with_warmup",
    **{name: name for name in (
        "StepLR", "MultiStepLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "OneCycleLR", "LambdaLR",
        "LinearLR", "ExponentialLR", "ReduceLROnPlateau", "SequentialLR", "PolynomialLR", "ConstantLR", "CyclicLR",
        "get_polynomial_decay_schedule_with_warmup", "get_cosine_with_hard_restarts_schedule_with_warmup",
    )},
}  # fmt: skip
"""Function or class -> its curve; of get_scheduler its first argument."""
EVALUATION = re.compile(r"(^|[^a-z])(eval|val|valid|validation|test|dev)([^a-z]|$|_?(data)?_?loader)", re.IGNORECASE)
"""In the name of a loader of held-out data."""
TOOLS = ("Accelerator", "Fabric")
SEEDS = ("set_seed", "manual_seed", "seed_everything")
LOSSES = {
    "cross_entropy": "classification", "CrossEntropyLoss": "classification", "nll_loss": "classification",
    "NLLLoss": "classification", "mse_loss": "regression", "MSELoss": "regression",
}  # fmt: skip
"""Function or class -> the objective that is the same loss."""
PLACES: Mapping[str, Sequence[str]] = {
    "DataLoader": ("dataset", "batch_size", "shuffle"),
    "scheduler": ("optimizer", "num_warmup_steps", "num_training_steps"),
    "CosineAnnealingLR": ("optimizer", "T_max", "eta_min"),
    "get_scheduler": ("name", "optimizer", "num_warmup_steps", "num_training_steps"),
    "clip_grad_norm_": ("parameters", "max_norm"),
    "optimizer": ("params", "lr"),
}
"""Call -> the names of its first arguments."""


def read(module: ast.Module, script: Script) -> dict[str, Any]:
    """The tree, empty if the file has no loop with an optimizer."""
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
    by_name = {
        name: [call for call in calls if last(call.func) == name] for name in {last(each.func) for each in calls}
    }
    optimizers = [call for name in by_name if name.lower() in OPTIMIZERS for call in by_name[name]]
    if "backward" not in by_name or not (optimizers or "Accelerator" in by_name or "Fabric" in by_name):
        return {}
    tree: dict[str, Any] = {name: same([script.arguments(call) for call in by_name.get(name, ())]) for name in TOOLS}
    tree["optimizer"] = same([optimizer(call, script) for call in optimizers])
    tree["scheduler"] = same([scheduler(call, script) for name in SCHEDULES for call in by_name.get(name, ())])
    loaders, trained = by_name.get("DataLoader", []), scopes.loaders(module)
    tree["DataLoader"] = same([_loader(call, module, script) for call in trained])
    tree["evaluation"] = _evaluation(module, [call for call in loaders if call not in trained])
    clips = [_named(script.arguments(call), "clip_grad_norm_") for call in by_name.get("clip_grad_norm_", ())]
    tree["clip_grad_norm"] = same([clip.get("max_norm", Code("its norm")) for clip in clips])
    tree["clip_grad_value"] = same([Code(ast.unparse(call)) for call in by_name.get("clip_grad_value_", ())])
    seeds = [call for name in SEEDS for call in by_name.get(name, ()) if call.args and is_seed(call)]
    tree["seed"] = same([script.value(call.args[0]) for call in seeds])
    tree |= _length(module, script)
    tree["precision"] = _precision(by_name, script)
    tree["wrapper"] = same(sorted({kind for name, kind in WRAPPERS.items() if name in by_name}))
    tree["compile"] = True if any(ast.unparse(call.func) == "torch.compile" for call in calls) else None
    told = {name for name in tree["Accelerator"] or {} if name.startswith("gradient_accumulation")}
    tree["accumulation"] = None if told else _accumulation(module, script)
    tree["model"] = _model(module, optimizers, script)
    tree["loss"] = same([name for name in LOSSES if name in by_name]) or Code("the loss")
    return {LOOP: {name: value for name, value in tree.items() if value is not None}}


def _named(arguments: Mapping[str, Any], call: str) -> dict[str, Any]:
    """Arguments, of which the first have their names."""
    places = {f"args.{place}": name for place, name in enumerate(PLACES[call])}
    return {places.get(name, name): value for name, value in arguments.items()}


def optimizer(call: ast.Call, script: Script) -> dict[str, Any]:
    arguments = _named(script.arguments(call), "optimizer")
    parameters = arguments.get("params")
    if isinstance(parameters, dict) and str(parameters.get("class_path")).endswith(".parameters"):
        arguments["params"] = Code(f"{parameters['class_path']}()")
    return {"class_path": last(call.func), "init_args": arguments}


def scheduler(call: ast.Call, script: Script) -> dict[str, Any]:
    name = last(call.func)
    arguments = _named(script.arguments(call), name if name in PLACES else "scheduler")
    curve = SCHEDULES[name] or arguments.pop("name", Code("its name"))
    arguments.pop("optimizer", None)
    return {"name": curve, **arguments}


def _loader(call: ast.Call, module: ast.Module, script: Script) -> dict[str, Any]:
    arguments = _named(script.arguments(call), "DataLoader")
    nodes = [*call.args[:1], *(word.value for word in call.keywords if word.arg == "dataset")]
    found = {"dataset": made(nodes[0], module, script)} if nodes else {}
    return arguments | found | scopes.batch_size([call], module, script)


def _evaluation(module: ast.Module, loaders: Sequence[ast.Call]) -> Code | None:
    """The data of the evaluation: the name that a loop without a backward goes over, or the other loaders."""
    loops = [node for node in ast.walk(module) if isinstance(node, ast.For)]
    names = [ast.unparse(node.iter) for node in loops if not _has_backward(node)]
    own = [name for name in names if EVALUATION.search(name)]
    own += [ast.unparse(call.args[0] if call.args else call) for call in loaders]
    return Code(own[0]) if own else None


def _has_backward(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Call) and last(each.func) == "backward" for each in ast.walk(node))


def _length(module: ast.Module, script: Script) -> dict[str, Any]:
    """`epochs` or `steps` that the loop goes round."""
    found: dict[str, list[Any]] = {"epochs": [], "steps": []}
    for node in ast.walk(module):
        call = node.iter if isinstance(node, ast.For) else None
        while isinstance(call, ast.Call) and last(call.func) in ("tqdm", "trange", "enumerate") and call.args:
            call = ast.Call(ast.Name("range"), call.args, []) if last(call.func) == "trange" else call.args[0]
        if not isinstance(node, ast.For) or not isinstance(call, ast.Call) or last(call.func) != "range":
            continue
        is_epoch = "epoch" in ast.unparse(node.target).lower() or "epoch" in ast.unparse(call).lower()
        steps = _has_backward(node)
        if is_epoch or (steps and not any(isinstance(each, ast.For) for each in ast.walk(node) if each is not node)):
            found["epochs" if is_epoch else "steps"].append(script.value(_rounds(call.args)))
    kind = next((name for name in found if found[name]), None)
    return {kind: same(found[kind])} if kind else {}


def _rounds(bounds: Sequence[ast.expr]) -> ast.expr:
    """How often a range goes round: of `range(1, n + 1)` n."""
    last = bounds[min(1, len(bounds) - 1)]
    starts_at_one = len(bounds) > 1 and isinstance(bounds[0], ast.Constant) and bounds[0].value == 1
    if not starts_at_one:
        return last
    is_one_more = isinstance(last, ast.BinOp) and isinstance(last.op, ast.Add) and ast.unparse(last.right) == "1"
    return last.left if isinstance(last, ast.BinOp) and is_one_more else ast.BinOp(last, ast.Sub(), ast.Constant(1))


def _precision(made: Mapping[str, Collection[ast.Call]], script: Script) -> str | None:
    """The type of the products under autocast."""
    casts = [call for name in ("autocast", "GradScaler") for call in made.get(name, ())]
    if not casts:
        return None
    types = {str(script.arguments(call).get("dtype", "")).rpartition(".")[2] for call in casts}
    return "bf16" if "bfloat16" in types else "fp16"


def _accumulation(module: ast.Module, script: Script) -> Any:
    """The forwards of a step where a loop counts them itself: the name behind `%` or `/` that says accum."""
    operands = (node.right for node in ast.walk(module) if isinstance(node, ast.BinOp))
    return same([script.value(each) for each in operands if "accum" in ast.unparse(each).lower()])


def _model(module: ast.Module, optimizers: Sequence[ast.Call], script: Script) -> Any:
    """The call that makes the model whose parameters the optimizer has; of one of the hub its class and name."""
    named = [node.value for call in optimizers for node in _of_parameters(call) if isinstance(node.value, ast.Name)]
    model = made(named[0] if named else ast.Name("model"), module, script)
    call = model.node
    if not isinstance(call, ast.Call) or last(call.func) != "from_pretrained":
        return model
    arguments = script.arguments(call)
    place = arguments.pop("args.0", arguments.pop("pretrained_model_name_or_path", Code("its name")))
    owner = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    return {"class": last(owner), "name": place, **arguments}


def _of_parameters(call: ast.Call) -> Iterator[ast.Attribute]:
    """The functions `.parameters` that are called in the arguments of a call."""
    for node in ast.walk(call):
        if isinstance(node, ast.Attribute) and node.attr in ("parameters", "named_parameters"):
            yield node
