"""Real storage that fills, goes away and comes back: a tmpfs that only this process and what it starts can see."""

import ctypes
import random
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

from dtrain.checkpoint import survey
from dtrain.storage.attempts import listed

NAMESPACE = 0x00020000
"""CLONE_NEWNS: mounts that only this process sees."""


@cache
def are_allowed() -> bool:
    """Whether this user may make a mount namespace, and mount there."""
    return (
        subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode
        == 0
    )


def alone() -> None:
    """From here on nobody else sees what this process mounts."""
    assert ctypes.CDLL(None).unshare(NAMESPACE) == 0
    mount("--make-rprivate", "/")


def mount(*words: str | Path) -> None:
    subprocess.run(["mount", *words], check=True)


def small(place: Path) -> None:
    """A tmpfs of 4 MiB at `place`."""
    mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", place)


def fill(place: Path) -> None:
    """To the last byte."""
    with (place / "filler").open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 9, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def cover(place: Path) -> None:
    """Another filesystem over it, empty and read-only; what is open stays open."""
    mount("-t", "tmpfs", "-o", "ro", "tmpfs", place)


def uncover(place: Path) -> None:
    subprocess.run(["umount", place], check=True)


class Unsteady:
    """A tmpfs at `disk`, with the trouble that begins and ends there at random moments."""

    def __init__(self, disk: Path) -> None:
        alone()
        self.disk, self._device = disk, disk.with_name("device")
        for folder in (disk, self._device):
            folder.mkdir()
        small(self._device)
        self._attach()
        self.trouble, self._committed, self._was_in_trouble = "", 0, False
        self.begun = dict.fromkeys(TROUBLES, 0)

    def turn(self, chance: random.Random) -> None:
        """A trouble begins, or the one there is ends."""
        if self.trouble:
            self.heal()
        else:
            self.trouble = chance.choice([*TROUBLES])
            self.begun[self.trouble] += 1
            self._was_in_trouble = True
            TROUBLES[self.trouble][0](self)

    def heal(self) -> None:
        if self.trouble:
            TROUBLES[self.trouble][1](self)
            self.trouble = ""

    def excuses(self, code: int) -> bool:
        """Whether a command may have ended so: since the one before it ended there was trouble, in which it was refused or done elsewhere."""
        before, self._was_in_trouble = self._was_in_trouble, bool(self.trouble)
        return before and code in (0, 3)

    def check(self, out: str) -> None:
        """Every commit under `out` is what was written, and the newest is no older than when this was asked last."""
        if self.trouble in ("", "full"):
            attempts = list(survey.attempts(listed(out)))
            wrong = [attempt.fault for attempt in attempts if attempt.status == "damaged"]
            wrong += [
                fault
                for attempt in attempts
                if attempt.commit is not None
                for fault in survey.faults(attempt.url, attempt.commit)
            ]
            assert not wrong, wrong
            newest = max((attempt.step for attempt in attempts if attempt.commit is not None), default=0)
            assert newest >= self._committed, f"step {self._committed} was committed, now there is {newest}"
            self._committed = newest

    def _attach(self) -> None:
        mount("--bind", self._device, self.disk)

    def _detach(self) -> None:
        """At once, though files are open: below lies an empty folder that can be written."""
        subprocess.run(["umount", "--lazy", self.disk], check=True)

    def _empty(self) -> None:
        (self.disk / "filler").unlink()


TROUBLES: dict[str, tuple[Callable[[Unsteady], None], Callable[[Unsteady], None]]] = {
    "full": (lambda storage: fill(storage.disk), Unsteady._empty),
    "covered": (lambda storage: cover(storage.disk), lambda storage: uncover(storage.disk)),
    "detached": (Unsteady._detach, Unsteady._attach),
}
