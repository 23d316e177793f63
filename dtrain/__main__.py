"""python -m dtrain [verb] [word=choice] [key=value] [-m]: the verb, the words, one exit code."""

import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":  # until `main` listens: inside of an import, Ctrl-C may be lost
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])

from dtrain.config import hidden

try:
    from dtrain import __version__, secrets
    from dtrain.config import environment
    from dtrain.errors import HELP, DtrainError, PreflightError, WordsError, why
    from dtrain.lifecycle import signals
    from dtrain.secrets import screen
except (ImportError, AttributeError) as error:
    if not (sentence := hidden.by_a_file(error)):
        raise
    sys.stderr.write(f"dtrain: {sentence}\n")
    sys.exit(2)

COMPOSE = ("train", "plan", "evaluate", "generate", "verify", "doctor", "diff")
"""Verbs that take what the working folder brings."""
OF_SEVERAL = ("diff", "runs", "completion", "new", "run", "tokenize")
"""Verbs whose words belong to several runs, or are not complete."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 training failed, 2 the words were wrong, 3 preflight, 75 preempted, 130 interrupted."""
    os.environ[environment.BEGAN] = str(time.monotonic())  # what time_limit counts from
    gc.freeze()  # what was there before need not be walked, again and again, by the collector of this command
    if argv is None:
        screen.outlive_readers()
        secrets.guard(screen.visible)
        _see_packages()
    try:
        _in_a_folder()
        with signals.ending():  # before anything heavy: a job may be told to go while it has hardly come
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            return _do(list(sys.argv[1:] if argv is None else argv))
    except DtrainError as error:
        if isinstance(error, WordsError) and not _speaks():
            time.sleep(
                5
            )  # so that rank 0, which reports the same mistake, is not killed before by the end of this rank
        else:
            for line in [*map(screen.on_one_line, getattr(error, "problems", ()))] or [str(error)]:
                screen.complain(line)
        return error.exit_code
    except (OSError, RuntimeError) as error:
        if not _refused(error):
            raise
        screen.complain(f"{why(error) if isinstance(error, OSError) else error}. The system has no room for this run.")
        return PreflightError.exit_code
    except (ImportError, AttributeError) as error:
        if not (sentence := hidden.by_a_file(error)):
            raise
        screen.complain(sentence)
        return WordsError.exit_code
    except signals.StopRequested as asked:
        screen.complain(str(asked))
        return asked.exit_code
    except KeyboardInterrupt:
        return 130
    finally:
        # the interpreter ends: with torch loaded its last collection takes most of a second, of which a save may be in
        # need
        gc.freeze()


def _see_packages() -> None:
    """Those of the folder it was started in, as `python -m` sees them: the console script begins with the folder of the
    scripts.
    """
    if not sys.flags.safe_path and Path(sys.argv[0]).stem == "dtrain":
        with suppress(OSError):  # gone, which is told next
            sys.path.insert(0, str(Path.cwd()))


def _in_a_folder() -> None:
    try:
        Path.cwd()
    except OSError as error:
        raise PreflightError(
            f"the folder this command was started in is gone ({why(error)}). Change to one that is there."
        ) from error


def _refused(error: OSError | RuntimeError) -> bool:
    """Whether the system has no more files, processes, threads or room; the rest is somebody's mistake, and shows
    where.
    """
    return error.errno in HELP if isinstance(error, OSError) else "can't start new thread" in str(error)


def _speaks() -> bool:
    """Whether this process, of all that a launcher started with these words, is the one that shows something."""
    from dtrain.cluster import allocation

    return allocation.speaks(os.environ)


def _do(words: list[str]) -> int:
    from dtrain.config.verbs import VERBS

    secrets.hear(words)
    if words[:1] == ["help"] or {"--help", "-h"} & set(words):
        _help([word for word in words if word not in ("help", "--help", "-h")])
        return 0
    if "--version" in words:
        screen.say(f"dtrain {__version__}")
        return 0
    verb = words.pop(0) if words and words[0] in VERBS else "train"
    run = _loaded(verb)
    if verb not in OF_SEVERAL:
        from dtrain.compose import said_again

        for sentence in said_again(words) if _speaks() else ():
            screen.complain(screen.on_one_line(sentence), begin="note: ")
    if verb in COMPOSE and _speaks():
        from dtrain.compose.here import look

        if note := look().note:
            screen.complain(screen.on_one_line(note), begin="note: ")
    code = run(words)
    sys.stdout.flush()
    full = screen.full()
    if full and verb != "train":  # what it prints is what it is for
        raise PreflightError(f"standard output: {why(full)}.")
    return code


def _loaded(verb: str) -> Callable[[Sequence[str]], int]:
    """The function of a verb, imported without the collector, which would walk the new objects again and again."""
    gc.disable()
    try:
        run: Callable[[Sequence[str]], int] = importlib.import_module(f"dtrain.verb.{verb}").run
        return run
    finally:
        gc.freeze()
        gc.enable()


def _help(topics: list[str]) -> None:
    from dtrain.config.manual import about
    from dtrain.verb import own

    problems = list[str]()
    with own.beside(topics, problems) as complaints:
        for sentence in complaints:
            screen.complain(screen.on_one_line(sentence), begin="note: ")
        screen.say(about([topic for topic in topics if not topic.startswith("hydra.searchpath=")]).removesuffix("\n"))
    if problems:
        raise WordsError(*problems)


if __name__ == "__main__":
    sys.exit(main())
