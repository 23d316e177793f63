"""Models that no run of dtrain has trained, for the verbs that use a model: a folder or hub name of transformers.

dtrain generate model=hf model.name=merged generate.prompt='Once'
"""

from collections.abc import Sequence

from dtrain.compose import value_of
from dtrain.config import files
from dtrain.config.schema import WORDS
from dtrain.config.word import text
from dtrain.errors import StoreError, WordsError
from dtrain.secrets import screen
from dtrain.storage import hub, store
from dtrain.weights.place import is_ours

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
UNLIKE = ("bytes", "???")
"""Values of data.tokenizer that no file of a model has."""


def place_of(words: Sequence[str]) -> str | None:
    """The place of pretrained weights that the words name; None if their model has none."""
    word = value_of(words, "model") or WORDS["model"]
    key = files.node("model", word).get("_about_", {}).get("weights_at") if word in files.own("model") else None
    name = value_of(words, f"model.{key}") if key else None
    return None if name is None or value_of(words, "model.weights") == "random" else hub.place(name)


def is_folder(url: str) -> bool:
    """Whether a folder of transformers is there, and nothing of dtrain."""
    return CONFIG in store.sizes(url) and not is_ours(url)


def check(words: Sequence[str], verb: str, key: str, url: str) -> None:
    """Raise WordsError, with the words to type, unless `key` is init and a model says how to read the folder at
    `url`.
    """
    if key == "init" and any(word.startswith(("model=", "model._target_=")) for word in words):
        return
    others = [word for word in words if word.partition("=")[0] not in (key, "model", "model.name", "init_names")]
    typed = " ".join(map(screen.typed, ["model=hf", f"model.name={url}", *others]))
    prompt = "" if verb != "generate" or "generate.prompt" in typed else " generate.prompt='...'"
    raise WordsError(f"{key}={url}: it is a folder of transformers, not a run. Type dtrain {verb} {typed}{prompt}")


def with_tokenizer(words: Sequence[str], place: str) -> list[str]:
    """The words, and the tokenizer beside the weights at `place` if the data needs one and none is typed. Raises
    WordsError if none is there.
    """
    data = value_of(words, "data") or WORDS["data"]
    known = files.node("data", data).get("tokenizer") if data in files.own("data") else None
    if known not in UNLIKE or value_of(words, "data.tokenizer"):
        return [*words]
    url = store.join(place, TOKENIZER)
    try:
        hub.read(place, TOKENIZER) if place.startswith(hub.SCHEME) else store.read(url)
    except StoreError as error:
        raise WordsError(
            f"{place}: there is no {TOKENIZER} beside the weights. Type data.tokenizer=<its tokenizer.json>."
        ) from error
    return [*words, f"data.tokenizer={text(url)}"]
