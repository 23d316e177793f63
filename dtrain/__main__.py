"""python -m dtrain [verb] [word=choice] [key=value] [-m]: the verb, the words, one exit code."""

import gc
import importlib
import os
import sys
import time
from collections.abc import Sequence

from dtrain import __version__, screen, secrets, signals
from dtrain.errors import DtrainError, WordsError


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 training failed, 2 the words were wrong, 3 preflight, 75 preempted, 130 interrupted."""
    os.environ["DTRAIN_BEGAN"] = str(time.time())  # what time_limit counts from
    if argv is None:
        screen.outlive_readers()
        secrets.guard()
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
    from dtrain.config import VERBS

    secrets.hear(words)
    if words[:1] == ["help"] or {"--help", "-h"} & set(words):
        from dtrain.words.manual import about

        print(about([word for word in words if word not in ("help", "--help", "-h")]), end="")
        return 0
    if "--version" in words:
        print(f"dtrain {__version__}")
        return 0
    verb = words.pop(0) if words and words[0] in VERBS else "train"
    if verb not in ("diff", "completion"):  # which take words that belong to different runs, or are not complete
        from dtrain.compose import said_again

        for sentence in said_again(words) if os.environ.get("RANK", "0") == "0" else ():
            print(f"note: {sentence}", file=sys.stderr)
    code: int = importlib.import_module(f"dtrain.verb.{verb}").run(words)
    return code


if __name__ == "__main__":
    sys.exit(main())
