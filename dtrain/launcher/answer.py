"""Answers of a scheduler's own commands, such as squeue or kubectl."""

import os
import re
import subprocess
from collections.abc import Collection, Mapping, Sequence

from dtrain.config.word import cut
from dtrain.errors import PreflightError, why

ANSWER_SECONDS = 60.0


def answer(
    command: Sequence[str],
    *,
    launcher: str,
    install: str,
    stdin: str = "",
    environment: Mapping[str, str] | None = None,
    without: Collection[str] = (),
    unreached: tuple[re.Pattern[str], str],
) -> str:
    """The output of a command for `launcher`. `install`: what to do if it is not here. `environment`: beside that of
    this process, of which the variables `without` are left out. `unreached`: what the command says where its scheduler
    is not reached, and the sentence for it. Ctrl-C in the terminal does not reach the command. Raises PreflightError
    with its own sentence.
    """
    name = command[0]
    kept = {variable: value for variable, value in os.environ.items() if variable not in without}
    try:
        done = subprocess.run(
            command, input=stdin, env={**kept, **(environment or {})}, capture_output=True, encoding="utf-8",
            errors="replace", timeout=ANSWER_SECONDS, check=True, start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise PreflightError(f"launcher={launcher}: {name} is not here. {install}") from error
    except OSError as error:
        raise PreflightError(f"launcher={launcher}: {name} cannot be started: {why(error)}.") from error
    except subprocess.TimeoutExpired as error:
        raise PreflightError(f"launcher={launcher}: {name} did not answer within {ANSWER_SECONDS:g} s.") from error
    except subprocess.CalledProcessError as error:
        reasons = [line.partition("error: ")[2] or line for line in error.stderr.splitlines() if line.strip()]
        # the name of a Secret is none, but stands where one would
        said = re.sub(r'\bsecrets "([\w.-]+)"', r"the Secret \1", "; ".join(reasons))
        sentence = cut(said, 400).rstrip(".") or f"it ended with exit code {error.returncode}"
        told = f" {unreached[1]}" if unreached[0].search(sentence) else ""
        raise PreflightError(f"launcher={launcher}: {name}: {sentence}.{told}") from error
    return done.stdout
