"""`dtrain completion bash|zsh|fish`: the script that lets a shell complete verbs, words, arguments, recipes and what stands behind `=`.

    eval "$(dtrain completion bash)"        in ~/.bashrc; for zsh in ~/.zshrc
    dtrain completion fish | source         in ~/.config/fish/config.fish

The shell asks `dtrain completion words <what was typed>`, which reads YAML alone: no torch, no Hydra.
"""

from collections.abc import Iterable, Sequence

from dtrain import conf, kinds
from dtrain.check import allowed_of
from dtrain.config import ALLOWED, GROUPS, LISTS, VERBS
from dtrain.errors import WordsError, nearest

BASH = """\
_dtrain() {
  local line=${COMP_LINE:0:COMP_POINT} typed
  read -ra typed <<< "${line#* }"
  [[ $line == *' ' ]] && typed+=("")
  mapfile -t COMPREPLY < <(dtrain completion words "${typed[@]}" 2>/dev/null)
  local current=${line##* }
  COMPREPLY=("${COMPREPLY[@]#"${current%"${current##*[=:]}"}"}")  # bash takes what stands behind = and : for a word of its own
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
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def run(words: Sequence[str]) -> int:
    shell = words[0] if words else ""
    if shell == "words":
        print("\n".join(found(words[1:])))
        return 0
    if shell not in SCRIPTS or len(words) > 1:
        raise WordsError(f"completion {' '.join(words)}:{nearest(shell, SCRIPTS)} Type dtrain completion bash.")
    print(SCRIPTS[shell], end="")
    return 0


def found(typed: Sequence[str]) -> list[str]:
    """What the last of the words that were typed may become; it is empty when a new one begins."""
    *before, current = typed or [""]
    key, sign, value = current.partition("=")
    candidates = _values(key, before) if sign else _keys(before)
    head, comma, _ = value.rpartition(",") if sign and value.startswith("[") else ("", "", "")
    return sorted({word for word in ([f"{key}={head}{comma}{one}" for one in candidates] if sign else candidates) if word.startswith(current)})


def _keys(before: Sequence[str]) -> Iterable[str]:
    if not any("=" in word for word in before) and not any(word in VERBS for word in before):
        yield from VERBS
    yield from (f"{name}=" for name in (*GROUPS, *ALLOWED, "recipe"))
    for group in GROUPS:
        yield from (f"{path}.{name}=" for path, part in _parts(group, before) for name in part if name[0] != "_")


def _values(key: str, before: Sequence[str]) -> Iterable[str]:
    if key in GROUPS:
        return conf.groups()[key]
    if key == "recipe":
        return conf.recipes()
    if key in ALLOWED:
        return kinds.choices_of(ALLOWED[key])
    group, _, _ = key.partition(".")
    parts = _parts(group, before) if group in GROUPS else []
    return [choice for path, part in parts for name in part if f"{path}.{name}" == key for choice in kinds.choices_of(allowed_of(part, name))]


def _parts(group: str, before: Sequence[str]) -> list[tuple[str, conf.Node]]:
    """(path, arguments) of the words of a group that this run has, as far as it was typed; of all when that is `auto`."""
    typed = [word.partition("=")[2] for word in before if word.startswith(f"{group}=")]
    default = conf.defaults()[group]
    names = typed[-1].strip("[]").split(",") if typed else default if isinstance(default, list) else [default]
    names = conf.groups()[group] if names == ["auto"] else [name for name in names if name in conf.groups()[group]]
    return [(f"{group}.{name}" if group in LISTS else group, conf.node(group, name)) for name in names]
