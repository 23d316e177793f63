"""Fifty shapes of secrets through every channel of real runs: found nowhere under `out`, nowhere on the screen, in no command line."""

import contextlib
import importlib.util
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import fsspec
import pytest
from commands import COMMAND
from leaky import digest
from secret_shapes import Shape, shapes
from storage.test_options import descendants

pytestmark = pytest.mark.campaign("fuzz")

TESTS = str(Path(__file__).parent.parent)
TOLD, FOUND = shapes(0), shapes(1)
"""Those that are typed as words; those that a user's code has from elsewhere."""
PARTS = [
    "data=synthetic",
    "objective=regression",
    "model._target_=leaky.Net",
    "trust=[leaky]",
    "log.every=1",
    "batch=4",
]


def key_of(number: int, shape: Shape) -> str:
    return f"note_{number}" if shape.key == "note" else shape.key


def nested(words: Sequence[tuple[str, str]]) -> dict[str, object]:
    """As the part gets them: dots make mappings, digits a number."""
    made: dict[str, object] = {}
    for key, value in words:
        *above, last = key.split(".")
        place = made
        for name in above:
            place = place.setdefault(name, {})  # type: ignore[assignment]
        place[last] = int(value) if value.isdigit() else value
    return made


ARGUMENTS = [(key_of(number, shape), shape.text) for number, shape in enumerate(TOLD)]
WORDS = [f"hook.leak.{key}={value}" for key, value in ARGUMENTS]
STORES = {"csv": "", "wandb": "logger.wandb.mode=offline", "mlflow": "logger.mlflow.uri=file:{}/left/mlruns"}
TRACKERS = [name for name in STORES if name == "csv" or importlib.util.find_spec(name)]
"""Trackers that are installed, with what keeps them on this disk."""
CORES = [shape.core for shape in (*TOLD, *FOUND)]


class Place:
    """Runs of one folder: what they say, start and leave."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, dict[str, bytes]()
        said = [
            shape.text if shape.key == "note" else f"{shape.key.split('.')[-1]}={shape.text}"
            for shape in FOUND
            if "holder" not in shape.name
        ]
        (folder / "texts.json").write_text(json.dumps([*(shape.text for shape in TOLD), *said]))
        self.environment = {
            "PYTHONPATH": f"{TESTS}:{Path(TESTS).parent}",
            "LEAKY": str(folder / "texts.json"),
            "MY_SERVICE_PASSWORD": "in-the-environment-17",
        }
        self.environment |= {"XDG_CACHE_HOME": str(folder / "left/cache"), "TMPDIR": str(folder / "left/tmp")}
        self.environment |= {"XDG_DATA_HOME": str(folder / "left/data"), "XDG_CONFIG_HOME": str(folder / "left/config")}
        (folder / "left/tmp").mkdir(parents=True)

    def run(self, *words: str) -> tuple[int, str]:
        process = subprocess.Popen(
            [*COMMAND, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **self.environment},
            cwd=self.folder / "left",
        )
        typed, lines = Path(f"/proc/{process.pid}/cmdline").read_bytes(), b""
        while True:
            for pid in descendants(process.pid):
                with contextlib.suppress(OSError):
                    line = Path(f"/proc/{pid}/cmdline").read_bytes()
                    lines += b"" if line == typed and has_hardly_begun(pid) else line
            try:
                said, _ = process.communicate(timeout=0.25)
                break
            except subprocess.TimeoutExpired:
                continue
        self.said |= {f"screen {len(self.said)}": said.encode(), f"processes {len(self.said)}": lines}
        return process.returncode, said

    def search(self, written: dict[str, bytes]) -> None:
        """Every byte and every name."""
        files = {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in (self.folder / "left").rglob("*")
            if path.is_file()
        }
        everything = {**self.said, **files, **written, "names": "\n".join([*files, *written]).encode()}
        leaks = [
            (where, core)
            for where, data in everything.items()
            for core in (*CORES, "in-the-environment-17")
            if core.encode() in data
        ]
        assert leaks == []


def has_hardly_begun(pid: int) -> bool:
    """Whether a process has computed for less than 0.05 s: a fork shows the line of its parent until it sets its own, which
    on a busy machine may be seen."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK") < 0.05


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    yield Place(tmp_path)


def leak(folder: Path) -> list[str]:
    return ["hook.leak._target_=leaky.Leak", "hook.leak.every=1", f"hook.leak.seen={folder}/seen", *WORDS]


@pytest.mark.parametrize("where", ["disk", pytest.param("s3", marks=pytest.mark.slow)])
def test_a_run_that_fails_tells_none(place: Place, where: str, request: pytest.FixtureRequest) -> None:
    """A hook gets all of them as arguments and returns them as an event; a logger and then a model of two ranks fail with all of them in their words."""
    out = str(place.folder / "left/run")
    if where == "s3":
        out = f"{request.getfixturevalue('s3')}/secrets-{os.getpid()}"
    words = [
        f"out={out}",
        "devices=2",
        "steps=6",
        "checkpoint.every=2",
        "logger=[console,tensorboard]",
        "logger.mine._target_=leaky.Tracker",
    ]
    code, said = place.run(*PARTS, *leak(place.folder), *words)
    assert (
        code == 1
        and "rank 1 failed" in said
        and "logger mine failed" in said
        and "hook.leak" not in said.split("Traceback")[-1]
    ), said
    assert (place.folder / "seen").read_text() == digest(nested(ARGUMENTS)), "the part got what was typed"
    fs = (
        fsspec.filesystem("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"], use_listings_cache=False)
        if where == "s3"
        else fsspec.filesystem("file")
    )
    written = {path: fs.cat_file(path) for path in fs.find(out)}
    names = {path.rsplit("/", 1)[-1] for path in written}
    assert {"config.yaml", "plan.yaml", "metrics.jsonl", "events.jsonl", "failure.json"} <= names and any(
        "tensorboard" in path for path in written
    )
    events = [
        json.loads(data)
        for path, data in written.items()
        if path.endswith("events.jsonl")
        for data in data.splitlines()
    ]
    assert {"leak", "logger_failed", "restarted"} <= {event["event"] for event in events}
    assert b"${secret:hook.leak.password}" in next(
        data for path, data in written.items() if path.endswith("config.yaml")
    )
    place.search(written)


def small(folder: Path) -> list[str]:
    """A run of two steps that ends well, with a hook that tells all at the end."""
    return [
        *PARTS[:2],
        "model=mlp",
        "trust=[leaky]",
        "batch=4",
        "steps=2",
        "logger=[console]",
        "hook.leak.every=0",
        *leak(folder)[0::2][:2],
        *WORDS,
    ]


def test_plans_mistakes_and_sweeps_tell_none(place: Place) -> None:
    words = small(place.folder)
    code, said = place.run("plan", *words)
    assert code == 0 and "leak" in said, said
    code, said = place.run("plan", "why", *words)
    assert code == 0 and "hook.leak.password" in said, said
    code, said = place.run(
        "plan",
        *words,
        "optim.lrr=1",
        f"hook.leek.password={TOLD[-5].core}",
        f"--hook.leak.token={TOLD[1].core}",
        "--secret",
        TOLD[2].core,
    )
    assert code == 2 and "optim.lrr" in said, said
    code, said = place.run("-m", "seed=0,1", *words)
    assert code == 0, said
    jobs = sorted((place.folder / "left/outputs").glob("*/*/config.yaml"))
    assert len(jobs) == 2
    code, said = place.run("diff", str(jobs[0].parent), str(jobs[1].parent))
    assert code == 1 and "seed" in said, said
    code, said = place.run(f"recipe={jobs[0]}", "trust=[leaky]", "out=again")
    assert code == 2 and said.count("a secret, which is never saved. Type hook.leak.") == len(WORDS), said
    place.search({})


@pytest.mark.slow
def test_verbs_that_look_tell_none(place: Place) -> None:
    words, out = small(place.folder), f"out={place.folder}/left/run"
    stores = [word for name in TRACKERS for word in STORES[name].format(place.folder).split()]
    code, said = place.run(*words, out, f"logger=[console,{','.join(TRACKERS)}]", *stores)
    assert code == 0, said
    assert {each.stem for each in (place.folder / "left/run/trackers").iterdir()} == {*TRACKERS}
    code, said = place.run("evaluate", out, "trust=[leaky]")
    assert code == 0 and "loss" in said, said
    code, said = place.run("verify", *words, f"out={place.folder}/left/verified", "verify.steps=1")
    assert code == 0 and json.loads((place.folder / "left/verified/verify.json").read_text())["same"], said
    place.search({})
