"""python -m dtrain [verb] [word=choice] [key=value] [-m]: the verb, the words, one exit code."""

import gc
import importlib
import os
import sys
import time
from collections.abc import Sequence

from dtrain import signals
from dtrain.errors import DtrainError, WordsError

HELP = """dtrain [verb] [word=choice] [key=value] ... [-m]

verbs      train (the default), plan, evaluate, generate, verify, checkpoint, import, doctor
examples   dtrain                                           a small GPT learns Python's standard library
           dtrain plan strategy=fsdp nodes=2 devices=2      what would happen, without doing it
           dtrain plan cluster=h100x8 nodes=16 batch=256    what it would hold, send and take there
           dtrain strategy=fsdp nodes=2 out=runs/a          four words, two nodes, the same losses
           dtrain verify strategy=fsdp devices=2            does it give the losses of one process?
           dtrain checkpoint ls out=runs/a                  what was saved; also verify, export to=<folder>
           dtrain import ds_config.json                     a config of DeepSpeed (or six others) as a recipe
           dtrain doctor out=s3://bucket/run devices=2      what this machine, that storage and two ranks can do, and what to type where something is wrong
           dtrain recipe=shakespeare data.path=mine.txt     a recipe, with one thing changed
           dtrain -m optim.lr=1e-3,3e-3 seed=0,1            a sweep: four runs
           dtrain generate out=runs/a generate.prompt='class '
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 training failed, 2 the words were wrong, 3 preflight, 75 preempted, 130 interrupted."""
    os.environ["DTRAIN_BEGAN"] = str(time.time())  # what time_limit counts from
    try:
        with signals.ending():  # before anything heavy: a job may be told to go while it has hardly come
            return _do(list(sys.argv[1:] if argv is None else argv))
    except DtrainError as error:
        if isinstance(error, WordsError) and os.environ.get("RANK", "0") != "0":
            time.sleep(5)  # wrong words are wrong on every rank: rank 0 says so, and must not be killed before by the end of this one
        else:
            for line in getattr(error, "problems", None) or (str(error),):
                print(f"dtrain: {line}", file=sys.stderr)
        return error.exit_code
    except signals.Asked as asked:
        print(f"dtrain: {asked}", file=sys.stderr)
        return asked.exit_code
    except KeyboardInterrupt:
        return 130
    finally:
        gc.freeze()  # the interpreter ends: with torch loaded its last collection takes most of a second, of which a save may be in need


def _do(words: list[str]) -> int:
    from dtrain.config import VERBS  # with omegaconf, which --help can do without

    if "--help" in words or "-h" in words:
        print(HELP + _words(), end="")
        return 0
    verb = words.pop(0) if words and words[0] in VERBS else "train"
    code: int = importlib.import_module(f"dtrain.verb.{verb}").run(words)
    return code


def _words() -> str:
    """The groups and their words, and the recipes."""
    from dtrain.conf import folder

    groups = sorted(path for path in folder("conf").iterdir() if path.is_dir() and not path.name.startswith("_"))
    lines = [f"{group.name:<10} {', '.join(sorted(path.stem for path in group.glob('*.yaml')))}" for group in groups]
    return "\n".join([*lines, f"{'recipe':<10} {', '.join(sorted(path.stem for path in folder('recipes').glob('*.yaml')))}", ""])


if __name__ == "__main__":
    sys.exit(main())
