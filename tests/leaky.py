"""Parts that know secrets and say them in every way they have: a hook, a logger, a model. LEAKY in the environment names the file they read."""

import hashlib
import json
import os
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dtrain.hook import StepInfo
from dtrain.logger import Logger
from dtrain.storage import store


def texts() -> list[str]:
    return list(json.loads(Path(os.environ["LEAKY"]).read_text()))


def digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


class Leak:
    """Leaves a digest of what it was given in the file `seen`."""

    def __init__(self, every: int, seen: str, **given: Any) -> None:
        self.every = every
        Path(seen).write_text(digest(given))

    def __call__(self, info: StepInfo) -> dict[str, Any]:
        if info.step == 1:
            return {}
        for text in texts():
            warnings.warn(f"deprecated: {text}", stacklevel=1)
        thread = threading.Thread(target=self.fail)
        thread.start()
        thread.join()
        return {
            "text": "\n".join(texts()),
            "deep": {"list": [texts()], "password": texts()[0]},
            **{text[:60]: 1 for text in texts()},
        }

    def fail(self) -> None:
        raise KeyError(*texts())


class Tracker(Logger):
    """A logger that fails."""

    def __init__(self, *, out: str, steps: int) -> None:
        pass

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        raise ConnectionError(" and ".join(texts()))


class Net(nn.Module):
    """Fails on the last rank: in its constructor's arguments, its messages, its causes and its environment is all that must not be told."""

    def __init__(self, at: int = 4) -> None:
        super().__init__()
        self.layer, self.at, self.calls = nn.Linear(64, 10), at, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at and os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1):
            self.fail()
        return self.layer(x)

    def fail(self) -> None:
        try:
            store.read(f"memory://nowhere/{'/'.join(texts())}")
        except Exception as error:
            raise ValueError(f"first\n{texts()}\n{dict(os.environ)}\n{json.dumps(texts())}") from error
