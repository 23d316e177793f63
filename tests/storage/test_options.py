"""What the storage of `out` is told reaches the storage and the ranks, and nothing that is written or shown."""

import contextlib
import os
import subprocess
import time
from pathlib import Path

import fsspec
import pytest
from commands import COMMAND
from killing import descendants
from launching import WORDS

from dtrain import recipe
from dtrain.cluster import Cluster
from dtrain.compose import compose, connect
from dtrain.errors import WordsError
from dtrain.resolve import resolve
from dtrain.storage import clients, options, store
from dtrain.sweep import foreign, jobs

SECRET = "Zx9/qW+secret=17"
MEMORY = "memory://options/run"


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test leaves the storage told."""
    monkeypatch.setattr(options, "_chosen", {})
    monkeypatch.setattr(clients, "_chosen", {})


def refused(*words: str) -> str:
    with pytest.raises(WordsError) as caught:
        compose(words)
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_the_storage_is_told_and_the_config_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = {}
    monkeypatch.setattr(store, "use", lambda url, options: passed.update({url: dict(options)}))
    monkeypatch.setenv("MINE", SECRET)
    words = [
        f"out_options.key={SECRET}",
        "out_options.secret='${oc.env:MINE}'",
        "out_options.client_kwargs.region_name=us-east-1",
        "out_options.anon=false",
    ]
    config = compose(["out=s3://b/run", *words])
    assert passed == {
        "s3://b/run": {"key": SECRET, "secret": SECRET, "client_kwargs": {"region_name": "us-east-1"}, "anon": False}
    }
    written = recipe.write(config)
    assert SECRET not in written and SECRET not in repr(config)
    assert "# needs out_options.key=<not written> out_options.secret=<not written>" in written


def test_the_ranks_are_told_what_the_command_was(monkeypatch: pytest.MonkeyPatch) -> None:
    compose(["out=s3://b/run", f"out_options.key={SECRET}"])
    text = options.hand_over()
    passed = {}
    monkeypatch.setattr(store, "use", lambda url, options: passed.update({url: dict(options)}))
    options.take_over(text)
    assert passed == {"s3://b/run": {"key": SECRET}}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((f"out_options.key={SECRET}",), "out_options.key (command line): a folder of this machine takes no options. Type out=<a URL>"),
        (("out=/tmp/x", f"out_options.key={SECRET}"), "a folder of this machine takes no options"),
        (("out=s3://b/x", f"out_options.sceret={SECRET}"), "out_options.sceret: the client of s3:// has no such option. Did you mean secret?"),
        (("out=memory://x", f"out_options.key={SECRET}"), "out_options.key: the client of memory:// has no such option."),
        (("out=s3://b/x", f"out_options={SECRET}"), "out_options=*** (command line): options have names. Type out_options.<name>=<value>."),
        (("out=s3://b/x", "out_options.key=pass,word"), "out_options.key=*** (command line): several values are a sweep"),
        (("out=s3://b/x", f"--out_options.key={SECRET}"), "words have no dashes. Type out_options.key=***"),
        (("out=s3://b/x", "out_options.key=${oc.env:NOT_THERE}"), "Environment variable 'NOT_THERE' not found"),
        ((f"out=s3://key:{SECRET[5:8]}@bucket/x",), "out=s3://***@bucket/x (command line): it holds a secret and would be saved."),
        (("init=https://me:pass@host/x",), "init=https://***@host/x (command line): it holds a secret"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_without_the_value(words: tuple[str, ...], sentence: str) -> None:
    assert sentence in refused(*words)


def test_no_recipe_brings_options_or_passwords(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"out_options: {{key: '{SECRET}'}}\n")
    assert "out_options cannot come from a recipe. Type it on the command line." in refused(f"recipe={tmp_path}/a.yaml")
    (tmp_path / "b.yaml").write_text("init: s3://me:pass@bucket/x\n")
    message = refused(f"recipe={tmp_path}/b.yaml")
    assert "init='s3://***@bucket/x'" in message and "it holds a secret and would be saved" in message


def test_jobs_of_a_sweep_are_told_too_and_a_launcher_that_writes_their_words_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed = []
    monkeypatch.setattr(store, "use", lambda url, options: passed.append((url, dict(options))))
    words = ["seed=0,1", "sweep.out=s3://b/sweep", f"out_options.key={SECRET}"]
    judged = jobs.judged(jobs.read(words), Cluster(0, 2), resolve)
    assert len(judged.jobs) == 2 and set(map(str, passed)) == {str(("s3://b/sweep/job", {"key": SECRET}))}
    for private in (words, ["seed=0,1", "logger.mine.api_key=abcdef123456"]):
        with pytest.raises(WordsError, match="writes the words of its workers to files") as caught:
            foreign.split([*private, "hydra/launcher=joblib"])
        assert SECRET not in str(caught.value) and "abcdef123456" not in str(caught.value)


def test_no_folder_is_named_after_a_secret() -> None:
    with pytest.raises(WordsError) as caught:
        jobs.read(["logger.mine.api_key=abcdef123456,fedcba654321"])
    assert (
        str(caught.value)
        == "logger.mine.api_key=*** (command line): the folder of a job is named after what is swept, and a secret cannot be."
    )


def test_a_verb_that_looks_at_a_run_can_tell_its_storage_first(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = {}
    monkeypatch.setattr(store, "use", lambda url, options: passed.update({url: dict(options)}))
    connect([f"out_options.key={SECRET}"], "s3://b/run/checkpoints/step-00000001")
    assert list(passed.values()) == [{"key": SECRET}]
    with pytest.raises(WordsError, match="no such option"):
        connect(["out_options.kye=1"], "s3://b/run")


@pytest.mark.campaign("network")
def test_a_run_on_object_storage_writes_its_credentials_nowhere(s3: str, tmp_path: Path) -> None:
    """The command is told by words alone; everything that it leaves, says and starts is searched."""
    endpoint, out = os.environ["AWS_ENDPOINT_URL"], f"{s3}/options-{os.getpid()}"
    env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")} | {
        "MINE": SECRET,
        "TMPDIR": str(tmp_path),
    }
    env["PYTHONPATH"] = str(Path(__file__).parents[1])
    passed = [
        f"out={out}",
        f"out_options.endpoint_url={endpoint}",
        "out_options.key=abc",
        "out_options.secret='${oc.env:MINE}'",
    ]
    words = [*passed, "devices=2", "logger=[console,tensorboard]", "steps=6", "checkpoint.every=2"]
    run = subprocess.Popen(
        [*COMMAND, *WORDS, "model=mlp", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )
    seen, deadline = b"", time.monotonic() + 120
    while run.poll() is None:
        assert time.monotonic() < deadline
        for pid in descendants(run.pid):
            with contextlib.suppress(OSError):
                seen += Path(f"/proc/{pid}/cmdline").read_bytes()
        time.sleep(0.02)
    assert run.stdout
    output = run.stdout.read()
    run.stdout.close()
    assert run.returncode == 0, output
    fs = fsspec.filesystem("s3", endpoint_url=endpoint, key="a", secret="b", use_listings_cache=False)
    written = {path: fs.cat_file(path) for path in fs.find(out)}
    names = {path.rsplit("/", 1)[-1] for path in written}
    assert {"config.yaml", "plan.yaml", "metrics.jsonl", "events.jsonl", "result.json", "COMMIT.json"} <= names
    assert any("tensorboard" in path for path in written)
    for path, data in {**written, "processes": seen, "said": output.encode()}.items():
        assert SECRET.encode() not in data, path
    looked = subprocess.run(
        [*COMMAND, "evaluate", *passed], capture_output=True, text=True, env=env, check=False, timeout=300
    )
    assert looked.returncode == 0 and "loss" in looked.stdout, looked.stderr
