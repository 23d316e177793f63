"""The tokenizer with which the text of a task becomes tokens: as transformers reads the same files."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dtrain.chat.tokenizer import Tokenizer, described
from dtrain.data import Source
from dtrain.errors import PreflightError, WordsError
from dtrain.planned import Plan
from dtrain.tokenizer import SEPARATOR, Bytes


class Spoken(Protocol):
    """Text to tokens and back."""

    @property
    def first(self) -> int:
        """The token before a text that nothing precedes. Raises PreflightError if there is none."""
        ...

    @property
    def ends(self) -> set[int]:
        """Tokens that end a text."""
        ...

    @property
    def end_texts(self) -> Sequence[str]:
        """Texts of such tokens."""
        ...

    def encode(self, text: str, *, special: bool | None = None) -> list[int]:
        """`special`: with the special tokens that its tokenizer adds; None: unless the text begins with `first`."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """Without special tokens."""
        ...


def spoken(plan: Plan, source: Source) -> Spoken:
    """The tokenizer of `evaluate.tokenizer`, of the data, or of the model. Raises PreflightError and WordsError."""
    named = [plan.tasks["tokenizer"], *_tokenizers(plan.data), plan.model.get("name")]
    place = next((name for name in named if name is not None), None)
    if place == "bytes":
        return OfBytes()
    if place is not None:
        return OfFiles(str(place))
    if hasattr(source, "encode") and hasattr(source, "decode"):
        return OfSource(source)
    raise WordsError(
        "evaluate as=lm_eval: the data of this run does not say what its tokens mean. Type evaluate.tokenizer=<a "
        "tokenizer.json, or a folder with one>."
    )


@dataclass
class OfBytes:
    """Tokens are bytes."""

    _inner: Bytes = field(default_factory=Bytes)
    first = SEPARATOR[0]
    ends: set[int] = field(default_factory=lambda: {SEPARATOR[0]})
    end_texts: Sequence[str] = ()

    def encode(self, text: str, *, special: bool | None = None) -> list[int]:
        return list(self._inner.encode(text.encode()))

    def decode(self, tokens: list[int]) -> str:
        return self._inner.decode(tokens)


class OfFiles:
    """A tokenizer of Hugging Face: `name` is a tokenizer.json, or a folder, URL or hub name."""

    def __init__(self, name: str) -> None:
        of = described(name, None)
        self._name, self._inner = name, Tokenizer(of)
        self._special = {each: self._inner.number(each) for each in ("bos_token", "eos_token")}
        numbers = [*of.ends, self._special["eos_token"]]
        self.ends = {number for number in numbers if number is not None}
        self.end_texts = [of.special["eos_token"]] if self._special["eos_token"] is not None else []
        self._begin = of.special.get("bos_token") or of.special.get("eos_token")

    @property
    def first(self) -> int:
        known = (self._special["bos_token"], self._special["eos_token"])
        number = next((each for each in known if each is not None), None)
        if number is None:
            raise PreflightError(
                f"evaluate.tasks: the tokenizer {self._name} has no bos_token and no eos_token, one of which stands "
                "before a text. Name it in a tokenizer_config.json beside tokenizer.json."
            )
        return number

    def encode(self, text: str, *, special: bool | None = None) -> list[int]:
        if special is None:
            special = not (self._begin and text.startswith(self._begin))
        return list(self._inner.inner.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: list[int]) -> str:
        return self._inner.decode(tokens)


class OfSource:
    """The tokenizer of a user's own source of text."""

    end_texts: Sequence[str] = ()

    def __init__(self, source: Any) -> None:
        self._source, self.ends = source, set[int]()

    @property
    def first(self) -> int:
        raise WordsError(
            "evaluate.tasks: the data of this run does not say which token stands before a text. Type "
            "evaluate.tokenizer=<a tokenizer.json, or a folder with one>."
        )

    def encode(self, text: str, *, special: bool | None = None) -> list[int]:
        return list(self._source.encode(text))

    def decode(self, tokens: list[int]) -> str:
        return str(self._source.decode(tokens))


def _tokenizers(data: Any) -> Iterator[str]:
    """The tokenizers that a source names, also inside of a mixture."""
    if isinstance(data, Mapping):
        if isinstance(data.get("tokenizer"), str):
            yield data["tokenizer"]
        for name, below in data.items():
            yield from _tokenizers(below) if name != "_about_" else ()
