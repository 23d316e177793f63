"""The pages of `--help`: the overview, or the words of a group with the allowed values of each argument. Read from
files, without torch and OmegaConf.

dtrain --help              verbs, groups, recipes, examples
dtrain optim --help        dtrain help optim optim=sgd: words, arguments, defaults, allowed values, your own parts
dtrain runs --help         the docstring of dtrain/verb/runs.py
"""

import ast
import re
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

from dtrain.config import constraints, facts, files
from dtrain.config.schema import ALLOWED, GROUPS, LISTED, LISTS, NAMED, SENTENCES, WORDS, default
from dtrain.config.verbs import VERBS
from dtrain.config.word import spelling
from dtrain.errors import WordsError, nearest

EXAMPLES = """\
dtrain                                            a small GPT learns Python's standard library
dtrain plan strategy=fsdp nodes=2 devices=2       what would happen, without doing it
dtrain strategy=fsdp nodes=2 out=runs/a           four words, two nodes, the same losses
dtrain recipe=shakespeare data.path=mine.txt      a recipe, with one thing changed
dtrain -m optim.lr=1e-3,3e-3 seed=0,1             a sweep: four runs
dtrain model --help                               the words of a group, and what each takes
"""
WIDTH = 150
YOURS = {
    "model": "an nn.Module, or a function that returns one; its arguments are words too: model.width=64",
    "data": "a source of samples (dtrain/data/__init__.py); for a map-style dataset type data=dataset "
    "data.dataset._target_=mypkg.Faces instead",
    "objective": "has inputs(batch), count(batch), loss(outputs, batch) -> Loss(sum, metrics) and unit "
    "(dtrain/objective/__init__.py); it may derive from the class of a word, such as "
    "dtrain.objective.classification.Classification, and override only what differs; a batch has inputs and targets",
    "optim": "a function of the model that returns a torch optimizer, with parameter groups if you like: def "
    "optimizer(model, lr=1e-3)",
    "schedule": "takes steps, the length of the run; has factor(step), with step from 0, which multiplies the lr "
    "of each group",
    "logger": "takes out and steps; derives from dtrain.logger.Logger, and has of begin(facts), back(step), "
    "scalars(step, values), text(step, name, text) and end(result) what it wants; runs on rank 0. "
    "dtrain.run(logger=...) takes an object, a class, or a function of step and row",
    "strategy": "has shard, wrap and sync (dtrain/strategy/__init__.py), and states how it stores state, "
    "about = {'fill': 'dp_shard', 'holds': 'shards', 'reshard': 'forward', 'reduce': 'last'}",
    "hook": "has an attribute every (steps between calls, or 'epoch') and __call__(info), called on all ranks. A "
    "returned mapping of names to numbers is logged as figures. dtrain.run(hook=...) takes an object, a class, or a "
    "function of info. It cannot change the training; it gets\n"
    "    info.step, .steps, .seen, .epoch  steps done of all, samples seen, passes over the data that are complete\n"
    "    info.loss, .norm, .lr             this rank's sum over its part of the batch, the norm of the gradient\n"
    "    info.source, .seed                the data of the run\n"
    "    info.forward(inputs)              runs the model on its mesh, without gradients; all ranks call it alike\n"
    "    info.model()                      a whole copy of it on the CPU, whatever the mesh; all ranks call it alike\n"
    "    info.weights()                    its parameters and buffers by name, whole, on the CPU; as model()",
}
"""Group -> requirements on a user's own part, in a package that `trust` names."""


def overview() -> str:
    lines = ["dtrain [verb] [word=choice] [key=value] ... [-m]", "", "verbs"]
    lines += [f"  {verb:<12} {sentence}" for verb, sentence in VERBS.items()]
    lines += ["", "groups"]
    lines += [
        f"  {group:<12} {', '.join(files.groups()[group])}  (default {spelling(WORDS[group])})" for group in GROUPS
    ]
    lines += [f"  {key} {', '.join(files.groups()[group])}" for key, group in (NAMED | LISTED).items()]
    lines += ["", "recipes"]
    lines += [f"  {name:<12} {files.sentences(path).get('', '')[:WIDTH]}" for name, path in files.recipes().items()]
    lines += ["", "keys", *_wrapped(ALLOWED), "", "examples", *(f"  {line}" for line in EXAMPLES.splitlines())]
    return "\n".join(lines) + "\n"


def about(topics: Sequence[str]) -> str:
    """Pages of the groups, words (`optim=sgd`), keys, arguments, verbs and recipes in `topics`; the overview if there
    are none. Raises WordsError for an unknown topic.
    """
    pages = {topic: [*_page(*topic.partition("=")[::2])] for topic in topics}
    own = {word for topic in topics if topic in VERBS for word in re.findall(r"[\w-]+", _verb(topic))}
    unknown = [
        topic for topic, page in pages.items() if not page and "=" not in topic and topic[0] != "-" and topic not in own
    ]
    if unknown:
        words = dict.fromkeys(chain(*files.groups().values()))
        arguments = [f"{group}.{name}" for group in GROUPS for name in _arguments(group)]
        known = (*GROUPS, *ALLOWED, *VERBS, *files.recipes(), *words, *arguments)
        near = {topic: nearest(topic, known) for topic in unknown}
        raise WordsError(
            *(
                f"help {topic}: there is no such topic.{hint if 'Did you' in hint else ' dtrain --help lists all.'}"
                for topic, hint in near.items()
            )
        )
    return "\n".join(page for parts in pages.values() for page in parts) or overview()


def _arguments(group: str) -> Iterable[str]:
    """Names of the arguments of all words of a group."""
    return dict.fromkeys(name for word in files.groups()[group] for name in files.node(group, word) if name[0] != "_")


def _page(topic: str, word: str) -> Iterable[str]:
    if topic in VERBS and not word:
        yield _verb(topic)
    if topic in GROUPS:
        chosen = [word] if word else files.groups()[topic]
        if word and word not in files.groups()[topic]:
            raise WordsError(f"help {topic}={word}: there is no {topic} {word}.{nearest(word, files.groups()[topic])}")
        yield from ("\n".join(_word(topic, name)) + "\n" for name in chosen)
        yield from () if word else _yours(topic)
    elif topic in files.recipes():
        yield files.recipes()[topic].read_text("utf-8")
    elif topic not in VERBS:
        group, _, name = topic.partition(".")
        words = [word for word in files.groups().get(group, ()) if name[:1] != "_" and name in files.node(group, word)]
        yield from ("\n".join(_word(group, word, name)) + "\n" for word in words)
        yield from ("\n".join(_word(group, topic)) + "\n" for group, words in files.groups().items() if topic in words)
        yield from _yours(group) if name.split(".")[-1] == "_target_" else ()
        yield from _keys(topic)


def _verb(verb: str) -> str:
    """The page of a verb: the docstring of its file, and the keys of the same name."""
    source = (Path(__file__).parents[1] / "verb" / f"{verb}.py").read_bytes()
    return "\n".join([f"{ast.get_docstring(ast.parse(source))}\n", *_keys(verb)])


def _keys(topic: str) -> Iterable[str]:
    """The page of a plain key, or of all keys with this prefix."""
    names = [key for key in ALLOWED if key == topic or key.startswith(f"{topic}.")]
    if names:
        yield "\n".join(_row(key, default(key), ALLOWED[key], SENTENCES[key]) for key in names) + "\n"
    if group := (NAMED | LISTED).get(topic):
        yield "".join("\n".join(_word(group, word)) + "\n" for word in files.groups()[group])


def _yours(group: str) -> Iterable[str]:
    if group in YOURS:
        yield (
            f"{group}{'.<name>' if group in LISTS else ''}._target_=<package.name> trust=[<package>]  yours: "
            f"{YOURS[group]}\n"
        )


def _word(group: str, word: str, only: str = "") -> Iterable[str]:
    """The page of a word, or its row for one argument."""
    part = files.node(group, word)
    sentences = files.sentences(files.path(group, word))
    yield f"{group}={word}  {sentences.get('', '')}"
    path = f"{group}.{word}" if group in LISTS else group
    for name, value in part.items():
        if name[0] != "_" and only in ("", name):
            yield _row(f"{path}.{name}", value, facts.allowed_of(part, name), sentences.get(name, ""))


def _row(key: str, default: object, allowed: object, sentence: str) -> str:
    shown = "needed" if default == "???" else spelling(default)
    return f"  {f'{key}={shown}':<34} {constraints.say(allowed)}" + (f"; {sentence}" if sentence else "")


def _wrapped(names: Iterable[str]) -> Iterable[str]:
    line = " "
    for name in names:
        if len(line) + len(name) > 110:
            yield line
            line = " "
        line += f" {name}"
    yield line
