"""`dtrain completion bash|zsh|fish`: prints the script that lets a shell complete verbs, words, arguments, recipes
and values.

    eval "$(dtrain completion bash)"        in ~/.bashrc; for zsh in ~/.zshrc
    dtrain completion fish | source         in ~/.config/fish/config.fish

The shell asks `dtrain completion words <what was typed>`, which reads only YAML and imports neither torch nor Hydra.
"""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from dtrain.config import constraints, files
from dtrain.config.facts import allowed_of
from dtrain.config.manual import YOURS
from dtrain.config.schema import ALLOWED, GROUPS, LISTED, LISTS, NAMED, WORDS
from dtrain.config.verbs import VERBS
from dtrain.errors import WordsError, nearest
from dtrain.secrets import screen
from dtrain.verb import own

BASH = """\
_dtrain() {
  local line=${COMP_LINE:0:COMP_POINT} typed
  read -ra typed <<< "${line#* }"
  [[ $line == *' ' ]] && typed+=("")
  mapfile -t COMPREPLY < <(dtrain completion words "${typed[@]}" 2>/dev/null)
  local current=${line##* }
  COMPREPLY=("${COMPREPLY[@]#"${current%"${current##*[=:]}"}"}")  # bash splits words at = and :
}
complete -o default -o nospace -F _dtrain dtrain
"""
ZSH = """\
_dtrain() {
  local -a found
  found=("${(@f)$(dtrain completion words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  compadd -Q -S '' -- $found
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -u }
compdef _dtrain dtrain
"""
FISH = """\
complete -c dtrain -f -a '(dtrain completion words (commandline -opc)[2..-1] (commandline -ct))'
"""
MOST = 200
"""Most files that are offered."""
HARMLESS = re.compile(r"[\w@%+=:,.~-]+")
"""A file name that needs no quoting. Others are not offered: the shell would run what is in them."""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


BEHIND = {
    "plan": ("best", "json", "why"),
    "doctor": ("json",),
    "checkpoint": (
        "ls",
        "verify",
        "export",
        "import",
        "out=",
        "to=",
        "step=",
        "weights=",
        "dtype=",
        "shard=",
        "names=",
    ),
    "runs": ("best", "rm", "send", "sort=", "figure=", "best_is="),
    "completion": tuple(SCRIPTS),
    "import": ("as=", "to="),
    "tokenize": ("to=", "tokenizer=", "column=", "shard=", "workers=", "cache="),
}
"""Arguments of a verb that are not words of a run; those with a value may also come later."""


def run(words: Sequence[str]) -> int:
    shell = words[0] if words else ""
    if shell == "words":
        with own.beside(words, []):
            for each in found(words[1:]):
                screen.say(each)
        return 0
    if shell not in SCRIPTS or len(words) > 1:
        raise WordsError(f"completion {' '.join(words)}:{nearest(shell, SCRIPTS)} Type dtrain completion bash.")
    screen.say(SCRIPTS[shell].removesuffix("\n"))
    return 0


def found(typed: Sequence[str]) -> list[str]:
    """Completions of the last word typed; it is empty if a new one begins."""
    *before, current = typed or [""]
    key, sign, value = current.partition("=")
    candidates = _values(key, before) if sign else _keys(before)
    items = value.removeprefix("[").split(",") if value.startswith("[") else [""]
    head = f"{key}={'[' * value.startswith('[')}{''.join(f'{item},' for item in items[:-1])}" if sign else ""
    offered = {
        word for one in candidates if one not in items[:-1] for word in [f"{head}{one}"] if word.startswith(current)
    }
    return sorted(offered) or [f"{key}{sign}{path}" if sign else path for path in _files(value if sign else current)]


def _files(begin: str) -> Iterable[str]:
    """Files of this machine whose paths begin like this."""
    if "://" not in begin and re.search(r"[/.~]", begin):
        above, slash, name = begin.rpartition("/")
        folder = Path(os.path.expanduser(above or slash or "."))  # noqa: PTH111 - that of nobody stays as it is
        for path in (
            sorted(path for path in folder.iterdir() if path.name.startswith(name))[:MOST] if folder.is_dir() else ()
        ):
            if HARMLESS.fullmatch(path.name):
                yield f"{above}{slash}{path.name}" + "/" * path.is_dir()


def _keys(before: Sequence[str]) -> Iterable[str]:
    if not any("=" in word for word in before) and not any(word in VERBS for word in before):
        yield from (*VERBS, "help", "--help", "--version")
    yield from (word for word in BEHIND.get(before[0] if before else "", ()) if len(before) == 1 or word.endswith("="))
    if before[:1] in (["completion"], ["import"], ["runs"], ["checkpoint"], ["new"], ["tokenize"]):
        return
    yield from (f"{name}=" for name in (*GROUPS, *ALLOWED, "recipe"))
    for group in GROUPS:
        yield from (f"{path}.{name}=" for path, part in _parts(group, before) for name in part if name[0] != "_")
    yield from (f"{group}._target_=" for group in YOURS if group not in LISTS)


def _values(key: str, before: Sequence[str]) -> Iterable[str]:
    if key in GROUPS:
        return files.groups()[key]
    if before[:1] == ["import"] and key == "as":
        from dtrain.integrations.importers import DIALECTS

        return DIALECTS
    if key == "recipe":
        return files.recipes()
    if key in NAMED:
        return files.groups()[NAMED[key]]
    if key in LISTED:
        return [f"[{word}]" for word in files.groups()[LISTED[key]]]
    if key in ALLOWED:
        return constraints.choices_of(ALLOWED[key])
    group, _, _ = key.partition(".")
    parts = _parts(group, before) if group in GROUPS else []
    return [
        choice
        for path, part in parts
        for name in part
        if f"{path}.{name}" == key
        for choice in constraints.choices_of(allowed_of(part, name))
    ]


def _parts(group: str, before: Sequence[str]) -> list[tuple[str, files.Node]]:
    """(path, arguments) of each part that a group has in the run as typed so far; of every part for `auto`."""
    choices = [word.partition("=")[2] for word in before if word.startswith(f"{group}=")]
    default = WORDS[group]
    names = default if isinstance(default, list) else [default]
    if choices:
        names = choices[-1].strip("[]").split(",")
    names = files.groups()[group] if names == ["auto"] else [name for name in names if name in files.groups()[group]]
    return [(f"{group}.{name}" if group in LISTS else group, files.node(group, name)) for name in names]
