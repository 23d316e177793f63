"""dtrain: describe a training run in a few words; get the same losses on every mesh.

    from dtrain import run, plan, load, predictions                         # words and your own objects
    from dtrain import Mesh, assemble, prepare, parallelize, clip, Stream, Checkpoint    # a loop of your own

Nothing heavy is imported before it is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtrain.api import load as load
    from dtrain.api import plan as plan
    from dtrain.api import predictions as predictions
    from dtrain.api import run as run
    from dtrain.checkpoint import Checkpoint as Checkpoint
    from dtrain.data.stream import Stream as Stream
    from dtrain.errors import DtrainError as DtrainError
    from dtrain.errors import PreflightError as PreflightError
    from dtrain.errors import WordsError as WordsError
    from dtrain.loop.assemble import assemble as assemble
    from dtrain.loop.assemble import prepare as prepare
    from dtrain.mesh import Mesh as Mesh
    from dtrain.optim.clip import clip as clip
    from dtrain.parallel.order import parallelize as parallelize
    from dtrain.planned import Plan as Plan
    from dtrain.result import Result as Result

__version__ = "0.1.0"
_HOMES = {
    "run": "dtrain.api", "plan": "dtrain.api", "load": "dtrain.api", "predictions": "dtrain.api",
    "Plan": "dtrain.planned", "Result": "dtrain.result",
    "Mesh": "dtrain.mesh", "assemble": "dtrain.loop.assemble", "prepare": "dtrain.loop.assemble",
    "parallelize": "dtrain.parallel.order", "clip": "dtrain.optim.clip", "Stream": "dtrain.data.stream",
    "Checkpoint": "dtrain.checkpoint", "DtrainError": "dtrain.errors", "WordsError": "dtrain.errors",
    "PreflightError": "dtrain.errors",
}  # fmt: skip
"""Public name -> the module that holds it."""
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"dtrain has no {name}; it shows {', '.join(sorted(_HOMES))}")
    return getattr(importlib.import_module(_HOMES[name]), name)
