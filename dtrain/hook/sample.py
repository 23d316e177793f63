"""A sample of text from the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

from dtrain.data import TextSource, context_of
from dtrain.hook import StepInfo
from dtrain.model.sampling import complete
from dtrain.objective import answer


@dataclass(frozen=True)
class Sample:
    about: ClassVar[Mapping[str, Any]] = {"figures": {}}
    every: int | Literal["epoch"]
    prompt: str
    tokens: int
    temperature: float

    def __call__(self, info: StepInfo) -> dict[str, Any]:
        source = cast(TextSource, info.source)
        options: dict[str, Any] = {
            "tokens": self.tokens,
            "context": context_of(source),
            "temperature": self.temperature,
            "seed": info.seed,
        }
        written = complete(lambda tokens: answer(info.forward(tokens)), source.encode(self.prompt), **options)
        return {"text": f"\n── sample after step {info.step} ──\n{source.decode(written)}\n"}
