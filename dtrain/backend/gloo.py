"""Collectives over TCP, on the CPU."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

from dtrain.backend import process_group


@dataclass(frozen=True)
class Gloo:
    """`timeout`: seconds of every collective."""

    timeout: float

    def open(self) -> AbstractContextManager[None]:
        return process_group("gloo", timeout=self.timeout)
