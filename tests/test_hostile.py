"""300 recipes that want more than to train, each through `plan` and `train`: nothing runs, nothing is written, nothing leaves, and a few lines say why."""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import pytest
from hostile import Hostile, recipes
from watched import watched

from dtrain.__main__ import main

ALL = list(recipes())
SECRET = "hunter2-of-this-machine"


class Trap(NamedTuple):
    """Where recipes lie, what they are after, and where commands run."""

    folder: Path
    secret: Path
    marker: Path
    here: Path
    web: str


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trap]:
    folder = tmp_path_factory.mktemp("hostile")
    for name in ("recipes", "here", "foreign"):
        (folder / name).mkdir()
    marker, secret = folder / "marker", folder / "secret.yaml"
    secret.write_text("steps: 3\n")
    (folder / "foreign" / "evilpkg.py").write_text(
        f"import os\nopen({str(marker)!r}, 'w')\ndef loop(plan): pass\nclass Evil: pass\n"
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder / "recipes"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder / "foreign"))
        patch.chdir(folder / "here")
        assert main(["plan", "model=mlp", "data=synthetic", "objective=regression"]) == 0, (
            "what every command imports is there"
        )
        web = f"http://127.0.0.1:{server.server_port}"
        (folder / "recipes" / "kind.yaml").write_text("steps: 3\n")
        fsspec.filesystem("memory").pipe_file("/hostile/kind.yaml", b"steps: 3")
        for place in (web, "memory://hostile"):
            assert main(["plan", f"recipe={place}/kind.yaml"]) == 0, "what a storage imports is there"
        yield Trap(folder / "recipes", secret, marker, folder / "here", web)
    server.shutdown()
    server.server_close()


def planted(trap: Trap, recipe: Hostile, number: int) -> str:
    """The words that read it."""
    marks = {b"@marker@": trap.marker, b"@secret@": trap.secret, b"@folder@": trap.folder}
    content = recipe.content
    for mark, path in marks.items():
        content = content.replace(mark, str(path).encode())
    name = f"{number}.yaml"
    if recipe.place == "memory":
        fsspec.filesystem("memory").pipe_file(f"/hostile/{name}", content)
        return f"recipe=memory://hostile/{name}"
    (trap.folder / name).write_bytes(content)
    return f"recipe={trap.web if recipe.place == 'web' else trap.folder}/{name}"


def survives(trap: Trap, recipe: Hostile, number: int) -> None:
    word = planted(trap, recipe, number)
    for verb in ("plan", "train"):
        done = watched(
            [verb, word],
            environ={"CANARY": SECRET},
            foreign=("evilpkg", "pty", "timeit", "cProfile", str(trap.secret), "/etc/passwd"),
        )
        assert done.deeds == []
        assert done.code in (2, 3), done.text
        assert 1 <= len(done.text.splitlines()) <= 5, done.text
        assert all(
            line.startswith("dtrain: ") and len(line) < 800 and line.isprintable() for line in done.text.splitlines()
        ), done.text
        assert SECRET not in done.text and "Traceback" not in done.text
    assert not trap.marker.exists()
    assert not list(trap.here.iterdir())


def test_there_are_enough_of_them() -> None:
    assert len(ALL) >= 300
    assert len({recipe.id for recipe in ALL}) == len(ALL)


@pytest.mark.parametrize("number", range(0, len(ALL), 15), ids=lambda number: ALL[number].id[:60])
def test_a_hostile_recipe_does_nothing(trap: Trap, number: int) -> None:
    survives(trap, ALL[number], number)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [number for number in range(len(ALL)) if number % 15], ids=lambda number: ALL[number].id[:60]
)
def test_no_hostile_recipe_does_anything(trap: Trap, number: int) -> None:
    survives(trap, ALL[number], number)


def test_the_watch_sees_deeds(trap: Trap) -> None:
    """Its own control: a recipe that is trusted imports and writes."""
    (trap.folder / "trusted.yaml").write_text("model: {_target_: evilpkg.Evil}\ndata: {path: '@'}\nsteps: 1\n")
    done = watched(
        [
            "train",
            f"recipe={trap.folder}/trusted.yaml",
            f"out={trap.folder}/out",
            "trust=[evilpkg]",
            "hook=[]",
            f"data.path={trap.secret}",
        ],
        environ={},
        foreign=("evilpkg",),
    )
    trap.marker.unlink(missing_ok=True)
    assert any(deed.startswith("exec of") and "evilpkg.py" in deed for deed in done.deeds)
    assert any(deed.startswith("open") and "marker" in deed for deed in done.deeds)
    assert any(deed.startswith("os.mkdir") for deed in done.deeds)
