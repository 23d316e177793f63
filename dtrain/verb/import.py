"""`dtrain import <file or URL>`: translates a config of another tool into a recipe, and reports on each of its keys. No
code in the file is run.

    dtrain import ds_config.json                     prints the recipe, and the result for every key
    dtrain import llama3_8b.toml to=mine.yaml        writes it there; then: dtrain plan recipe=mine.yaml
    dtrain import train.py as=lightning              if the tool cannot be recognised

It reads DeepSpeed's JSON, Accelerate's, torchtune's and axolotl's YAML, torchtitan's TOML and JSON, the config of a W&B
sweep, and the calls of Lightning's and Ray's Trainer and configs, and of Hugging Face's TrainingArguments, in a Python
file, or the same as YAML; and scripts with a loop of their own, on PyTorch alone, Accelerate or Fabric.
"""

from collections.abc import Sequence

from dtrain.config.word import Word, text
from dtrain.errors import StoreError, WordsError, nearest
from dtrain.integrations.importers import complete, load, recognise, translate
from dtrain.integrations.importers.ledger import Ledger
from dtrain.integrations.importers.read import read
from dtrain.integrations.importers.write import command, lists, not_given, recipe
from dtrain.recipe.locate import Place
from dtrain.recipe.policy import refused
from dtrain.secrets import screen
from dtrain.storage import store

TAKES = ("as", "to")


def run(words: Sequence[str]) -> int:
    place, options = _read(words)
    tree = read(place)
    name = options.get("as") or recognise(tree, place)
    ledger, silent = translate(tree, name, place), load(name).SILENT
    complete(ledger, silent)
    if not store.is_local(place):
        _ask_for_closed(ledger, place)
    if "to" not in options:
        screen.say(recipe(ledger, silent, "<this file>").removesuffix("\n"))
        return 0
    to = options["to"]
    _write(to, recipe(ledger, silent, to))
    head = screen.on_one_line(f"{place} is a file of {ledger.tool}; {to} is a recipe of dtrain")
    screen.say(head, *lists(ledger), *not_given(ledger, silent), f"next  {command(ledger, to)}")
    return 0


def _ask_for_closed(ledger: Ledger, place: str) -> None:
    """Move what a recipe at the URL of the file could not say, such as local paths, from the recipe to the command
    line, where somebody sees it before it counts.
    """
    far = Place(place, "remote")
    for key, value in list(ledger.words.items()):
        if any(refused(Word(key, value, text(value), place), far)):
            ledger.command[key] = ledger.words.pop(key)
            ledger.implied.pop(key, None)


def _read(words: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The file, and the options as= and to=. Raises WordsError with every mistake."""
    pairs = [word.split("=", 1) for word in words if word.split("=", 1)[0] in TAKES and "=" in word]
    others = [word for word in words if word.split("=", 1)[0] not in TAKES or "=" not in word]
    files = [word for word in others if not word.startswith("-") and ("=" not in word or "/" in word.split("=")[0])]
    problems = [
        f"{word}: import does not take it.{nearest(word.lstrip('-').split('=')[0], TAKES)}"
        for word in others
        if word not in files
    ]
    problems += [
        f"{key}= is empty. Type {key}=<{'dialect' if key == 'as' else 'file'}>." for key, value in pairs if not value
    ]
    if len(files) != 1:
        problems.append(f"import takes one file or URL, not {len(files) or 'none'}. Type dtrain import ds_config.json.")
    options: dict[str, str] = {}
    for key, value in pairs:
        if options.setdefault(key, value) != value:
            problems.append(f"{key}={value}: {key}={options[key]} was given before. Leave one of them out.")
    if problems:
        raise WordsError(*problems)
    if "as" in options:
        load(options["as"])
    return files[0], options


def _write(url: str, text: str) -> None:
    """Write the recipe. Raises WordsError if another file is there already."""
    try:
        store.publish(url, text.encode())
    except StoreError as error:
        if error.kind != "exists":
            raise
        raise WordsError(f"to={url}: another file is there already. Remove it, or name another file.") from error
