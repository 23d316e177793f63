"""Recipes are words written down, and config.yaml is one."""

import hashlib
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
from pool import ranks

from dtrain import recipe
from dtrain.__main__ import main
from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.errors import WordsError
from dtrain.resolve import resolve
from dtrain.storage import store


def refused(*words: str) -> str:
    with pytest.raises(WordsError) as caught:
        compose(words)
    return str(caught.value)


def written(tmp_path: Path, text: str) -> str:
    (tmp_path / "mine.yaml").write_text(text)
    return f"recipe={tmp_path}/mine.yaml"


def test_a_recipe_comes_before_the_words(tmp_path: Path) -> None:
    said = written(tmp_path, "defaults:\n  - override /optim: sgd\noptim: {lr: 0.5, momentum: 0.0}\nsteps: 5\n")
    config = compose(["steps=6", said])
    assert (config.steps, config.optim["lr"], config.optim["momentum"]) == (6, 0.5, 0.0)
    assert config.sources["steps"] == "command line"
    assert config.sources["optim.lr"] == f"{tmp_path}/mine.yaml:3"


def test_the_last_recipe_wins(tmp_path: Path) -> None:
    for name, steps in (("a", 5), ("b", 6)):
        (tmp_path / f"{name}.yaml").write_text(f"steps: {steps}\n{'seed: 4' if name == 'a' else ''}\n")
    config = compose([f"recipe=[{tmp_path}/a.yaml,{tmp_path}/b.yaml]"])
    assert (config.steps, config.seed) == (6, 4)


def test_another_choice_drops_the_arguments_of_the_recipe(tmp_path: Path) -> None:
    said = written(tmp_path, "defaults:\n  - override /model: mlp\n  - override /data: synthetic\nmodel: {width: 7}\n")
    config = compose([said, "model=gpt"])
    assert config.model["width"] == 128


def test_the_choice_that_a_recipe_leaves_to_the_default_keeps_its_arguments(tmp_path: Path) -> None:
    said = written(tmp_path, "model: {layers: 3}\n")
    assert compose([said, "model=gpt"]).model["layers"] == 3
    assert compose([said, "model=moe"]).model["layers"] != 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1\n b: 2", "mine.yaml:2:3: not YAML"),
        ("- 1", "it must be a mapping of words to values"),
        ("trust: [x]", "trust cannot come from a recipe"),
        ("out: /tmp", "out cannot come from a recipe"),
        ("defaults:\n  - model: gpt\n", "override /model: gpt"),
        ("modl: 3", "Did you mean model?"),
        ("optim: {lrr: 3}", "Did you mean optim.lr?"),
    ],
)
def test_a_broken_recipe_is_named_with_the_place(tmp_path: Path, text: str, said: str) -> None:
    message = refused(written(tmp_path, text))
    assert said in message
    assert "mine.yaml" in message


def test_a_recipe_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path}/none.yaml: it does not exist" in refused(f"recipe={tmp_path}/none.yaml")


def test_a_recipe_may_lie_at_any_url() -> None:
    fsspec.filesystem("memory").pipe_file("/far.yaml", b"steps: 9")
    assert compose(["recipe=memory://far.yaml"]).steps == 9


def test_a_recipe_from_elsewhere_does_not_read_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    fsspec.filesystem("memory").pipe_file("/spy.yaml", b'data: {path: "https://elsewhere/${oc.env:SECRET}"}')
    assert "environment" in refused("recipe=memory://spy.yaml")


RECIPES = recipe.folder("conf").with_name("recipes")
YOURS = {
    "classify": ("model.name=mine", "data.path=rows.parquet"),
    "dpo": ("model.name=mine", "data.path=pairs.jsonl", "data.tokenizer=mine"),
    "gpt2": ("data.path=mine",),
    "lora": ("data.path=chats.jsonl",),
    "sft": ("data.path=chats.jsonl",),
}
"""Recipe -> what its user adds."""


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_resolves(path: Path) -> None:
    assert resolve(compose([f"recipe={path.stem}", *YOURS.get(path.stem, ())]), Cluster(gpus=0, cpus=8)).steps > 0


# config.yaml


def test_config_yaml_runs_the_same_plan_again(tmp_path: Path) -> None:
    first = compose(
        [
            "strategy=fsdp",
            "devices=2",
            "optim=muon",
            "optim.lr=0.5",
            "logger=[console]",
            "data.holdout=0.2",
            "out=runs/a",
        ]
    )
    (tmp_path / "config.yaml").write_text(recipe.write(first))
    again = compose([f"recipe={tmp_path}/config.yaml", "out=runs/a"])
    here = Cluster(gpus=0, cpus=4)
    one, two = resolve(first, here).to_dict(), resolve(again, here).to_dict()
    assert {key: (one[key], two[key]) for key in one if one[key] != two[key]} == {}


def test_a_mistake_beside_config_yaml_is_still_found(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(recipe.write(compose([])))
    assert "optim.lr" in refused(f"recipe={tmp_path}/config.yaml", "optim.lrr=1")


def test_config_yaml_says_where_each_value_came_from() -> None:
    lines = recipe.write(compose(["optim.lr=0.5", "trust=[mine]"])).splitlines()
    assert "  lr: 0.5  # command line" in lines
    assert "# needs trust=['mine']" in lines
    assert not any(line.startswith("trust") for line in lines), "trust is given anew each time"


def test_another_verb_looks_from_any_mesh(tmp_path: Path) -> None:
    config = compose(["strategy=fsdp", "nodes=2", "devices=2", "model.layers=3", "microbatch=1", "resume=must"])
    (tmp_path / "config.yaml").write_text(recipe.write(config))
    looking = compose(["generate.tokens=3"], run=str(tmp_path))
    assert (looking.model["layers"], looking.generate.tokens) == (3, 3)
    assert (looking.nodes, looking.devices, looking.microbatch, looking.resume, looking.choices["strategy"]) == (
        1,
        "auto",
        None,
        "auto",
        "auto",
    )


@pytest.mark.parametrize(
    "text",
    [
        "no",
        "1e5",
        "012",
        "1:30",
        "~",
        "${x}",
        "a #b",
        "'",
        "a\nb",
        "\x1b[1m",
        "",
        " x ",
        "{a: 1}",
        "a\u202eb",
        "*a",
        "null",
        "=",
        "<<",
    ],
)
def test_a_text_survives_config_yaml(text: str, tmp_path: Path) -> None:
    config = compose([])
    config.generate.prompt, config.model["names"] = text, [text, {"k": text}]
    (tmp_path / "config.yaml").write_text(recipe.write(config))
    read = {word.key: word.value for word in recipe.of_run(str(tmp_path))}
    escaped = text.replace("${", "\\${")
    assert (read["generate.prompt"], read["model.names"]) == (escaped, [escaped, {"k": escaped}])


def test_a_text_that_was_looked_up_is_not_looked_up_again(tmp_path: Path) -> None:
    config = compose(["generate.prompt=costs \\${x}"])
    assert config.generate.prompt == "costs ${x}"
    (tmp_path / "config.yaml").write_text(recipe.write(config))
    assert compose([f"recipe={tmp_path}/config.yaml"]).generate.prompt == "costs ${x}"


def test_a_finished_run_is_a_recipe_and_gives_the_same_losses(corpus: Path, tmp_path: Path, s3: str) -> None:
    (tmp_path / "mine.yaml").write_text(
        "model: {layers: 1, width: 16}\nexpect: {loss: [0, 9]}\nrequires: {memory: 0.5}\nhook: []\n"
    )
    first = [f"recipe={tmp_path}/mine.yaml", "steps=4", "data.sequence=8", f"data.path={corpus}", "optim.lr=3e-3"]
    far = f"{s3}/{tmp_path.name}/config.yaml"

    def losses(out: str) -> list[float]:
        return [json.loads(line)["loss"] for line in (tmp_path / out / "metrics.jsonl").read_text().splitlines()]

    def runs() -> list[list[float]]:
        assert main([*first, f"out={tmp_path}/a"]) == 0
        store.write(far, (tmp_path / "a" / "config.yaml").read_bytes())
        assert main([f"recipe={tmp_path}/a/config.yaml", f"out={tmp_path}/b"]) == 0
        assert main(["plan", f"recipe={far}"]) == 2, "a file of this machine is for a person to name"
        assert main([f"recipe={far}", f"data.path={corpus}", f"out={tmp_path}/c"]) == 0
        return [losses(out) for out in "abc"]

    ((here, again, elsewhere),) = ranks(1, runs)  # a client of S3 starts threads
    assert len(here) == 4 and here == again == elsewhere
    text = (tmp_path / "a" / "config.yaml").read_text()
    assert (
        "expect" not in text
        and "memory: 0.5  # " in text
        and not any(line.startswith(("out", "trust", "sweep")) for line in text.splitlines())
    )


# from elsewhere


@contextmanager
def site(*, tls: Path | None = None, **pages: str) -> Iterator[str]:
    """A web server on loopback that has these files; with the `cert` and `key` of a folder it speaks TLS."""

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path.split("?")[0].lstrip("/").replace("/", "_").removesuffix(".yaml"))
            self.send_response(200 if page else 404)
            self.end_headers()
            self.wfile.write((page or "").encode())

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls / "cert", tls / "key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"{'https://localhost' if tls else 'http://127.0.0.1'}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def composed(*words: str) -> dict[str, Any]:
    """Steps, seed, and sources of a composed config, made in a fork: clients of the web start threads."""

    def work() -> dict[str, Any]:
        try:
            config = compose(words)
        except WordsError as error:
            return {"refused": str(error)}
        return {
            "steps": config.steps,
            "seed": config.seed,
            "width": config.model.get("width"),
            "sources": config.sources,
        }

    outcome: dict[str, Any] = ranks(1, work)[0]
    return outcome


def test_a_recipe_from_the_web_builds_on_what_lies_beside_it() -> None:
    with site(
        a_mine="recipe: [base.yaml, ../digits.yaml]\nsteps: 3\n",
        a_base="steps: 1\nseed: 5\nmodel: {width: 64}\n",
        digits="# web\nseed: 6\n",
    ) as url:
        config = composed(f"recipe={url}/a/mine.yaml?v=1")
        assert (config["steps"], config["seed"], config["width"]) == (3, 6, 64)
        assert config["sources"] == {
            "steps": f"{url}/a/mine.yaml?v=1:2",
            "seed": f"{url}/digits.yaml:2",
            "model.width": f"{url}/a/base.yaml:3",
        }


def test_a_run_on_the_web_is_a_recipe_and_the_best_of_a_sweep_is_told() -> None:
    config = "defaults:\n  - override /launcher: {}\nsteps: 3\n"
    with site(
        run_config=config.format("auto"), sw_a_config="seed: 7\n", sw_sweep="format: 1\n", raw="seed: 8\n",
        far_config=config.format("slurm"), page="<html>",
    ) as url:  # fmt: skip
        for name, key, value in (
            ("run", "steps", 3),
            ("run/?v=1", "steps", 3),
            ("sw/a", "seed", 7),
            ("raw", "seed", 8),
        ):
            assert composed(f"recipe={url}/{name}")[key] == value
        assert list(composed(f"recipe={url}/run")["sources"].values())[-1] == f"{url}/run/config.yaml:3"
        best = composed(f"recipe={url}/sw/best")["refused"]
        assert "dtrain sweep best <its folder or bucket>" in best and f"recipe={url}/sw/<that job>" in best
        assert "launcher=slurm" in composed(f"recipe={url}/far")["refused"]
        assert "a web page, not YAML" in composed(f"recipe={url}/page")["refused"]


def test_a_pinned_recipe_pins_what_it_builds_on(tmp_path: Path) -> None:
    base = "seed: 5\n"
    digest = hashlib.sha256(base.encode()).hexdigest()
    loose, pinned = "recipe: base.yaml\nsteps: 3\n", f"recipe: base.yaml@sha256:{digest}\nsteps: 3\n"
    with site(loose=loose, held=pinned, base=base) as url:
        assert composed(f"recipe={url}/held.yaml@sha256:{hashlib.sha256(pinned.encode()).hexdigest()}")["seed"] == 5
        message = composed(f"recipe={url}/loose.yaml@sha256:{hashlib.sha256(loose.encode()).hexdigest()}")["refused"]
        assert f"Write {url}/base.yaml@sha256:{digest}" in message
        (tmp_path / "between.yaml").write_text(f"recipe: {url}/base.yaml\n")  # a local file needs no pin
        (tmp_path / "mine.yaml").write_text("recipe: between.yaml\n")
        pin = hashlib.sha256((tmp_path / "mine.yaml").read_bytes()).hexdigest()
        assert "is pinned, and builds on" in composed(f"recipe={tmp_path}/mine.yaml@sha256:{pin}")["refused"]


def test_a_page_that_is_not_there_is_told() -> None:
    with site() as url:
        assert f"cannot read {url}/none.yaml: it does not exist" in composed(f"recipe={url}/none.yaml")["refused"]


def test_a_recipe_may_lie_on_the_hub(tmp_path: Path) -> None:
    """The hub's answers are played: https://huggingface.co/docs/hub/api."""
    pytest.importorskip("huggingface_hub")
    body = b"steps: 7\n"

    class Hub(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            listed = "/tree/" in self.path or "/paths-info/" in self.path
            files = [{"type": "file", "path": "mine.yaml", "size": len(body), "oid": "a" * 40}]
            said = (
                json.dumps(files if listed else {"id": "user/repo", "sha": "b" * 40}).encode()
                if self.path.startswith("/api/")
                else body
            )
            self.send_response(200)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(said)

        do_GET = do_POST = do_HEAD = answer  # noqa: N815 - http.server looks for these

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environ = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
    words = ["plan", "recipe=hf://user/repo/mine.yaml"]
    done = subprocess.run(
        [sys.executable, "-m", "dtrain", *words], env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    server.shutdown()
    server.server_close()
    assert done.returncode == 0, done.stderr
    assert "7 steps" in done.stdout


# recipes on recipes


def test_recipes_come_in_the_order_they_are_said(tmp_path: Path) -> None:
    for name, steps in (("a", 5), ("b", 6)):
        (tmp_path / f"{name}.yaml").write_text(f"steps: {steps}\n{'seed: 4' if name == 'a' else ''}\n")
    config = compose([f"recipe={tmp_path}/a.yaml", f"recipe={tmp_path}/b.yaml"])
    assert (config.steps, config.seed) == (6, 4)


def test_a_recipe_builds_on_others_and_a_new_choice_drops_their_arguments(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("model: {width: 64, layers: 2}\noptim: {lr: 0.5}\nstrategy: single\n")
    (tmp_path / "mine.yaml").write_text("optim: {lr: 0.25}\nrecipe: base.yaml\n")
    (tmp_path / "other.yaml").write_text("recipe: [mine.yaml]\nmodel: mlp\ndata: synthetic\n")
    config = compose([f"recipe={tmp_path}/other.yaml"])
    assert (config.model["width"], config.optim["lr"], config.choices["strategy"]) == (128, 0.25, "single")
    assert compose([f"recipe={tmp_path}/mine.yaml"]).model["width"] == 64


def test_circles_and_towers_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("recipe: b.yaml\n")
    (tmp_path / "b.yaml").write_text("recipe: a.yaml\n")
    assert f"in a circle: {tmp_path}/a.yaml -> {tmp_path}/b.yaml -> {tmp_path}/a.yaml" in refused(
        f"recipe={tmp_path}/a.yaml"
    )
    for n in range(12):
        (tmp_path / f"t{n}.yaml").write_text(f"recipe: t{n + 1}.yaml\n" if n < 11 else "steps: 1\n")
    assert "at most 8 recipes may build on each other" in refused(f"recipe={tmp_path}/t0.yaml")
    for n in range(7):
        (tmp_path / f"w{n}.yaml").write_text(
            f"recipe: [w{n + 1}.yaml, w{n + 1}.yaml, w{n + 1}.yaml]\n" if n < 6 else "steps: 1\n"
        )
    assert "32 in all" in refused(f"recipe={tmp_path}/w0.yaml")


def test_a_key_may_look_up_another(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model: {width: 64, hidden: '${model.width}'}\n")
    fsspec.filesystem("memory").pipe_file("/looks.yaml", (tmp_path / "mine.yaml").read_bytes())
    for name in (f"{tmp_path}/mine.yaml", "memory://looks.yaml"):
        assert compose([f"recipe={name}"]).model["hidden"] == 64


def test_what_a_person_says_is_not_refused_of_the_recipe(tmp_path: Path) -> None:
    fsspec.filesystem("memory").pipe_file("/says.yaml", b"data: {cache: /elsewhere}\nout: /elsewhere\nsteps: 3\n")
    assert "data.cache" in refused("recipe=memory://says.yaml", "out=mine")
    config = compose(["recipe=memory://says.yaml", "out=mine", f"data.cache={tmp_path}"])
    assert (config.out, config.data["cache"], config.steps) == ("mine", str(tmp_path), 3)


def test_a_header_that_is_not_read_is_told(tmp_path: Path) -> None:
    assert "@package model is not supported" in refused(written(tmp_path, "# @package model\nwidth: 3\n"))


def test_a_recipe_below_another_is_named_by_its_shortest_path_and_by_who_builds_on_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/child.yaml").write_text("recipe: ../base.yaml\n")
    (tmp_path / "base.yaml").write_text("seed: 3\n")
    assert compose([f"recipe={tmp_path}/sub/child.yaml"]).sources["seed"] == f"{tmp_path}/base.yaml:1"
    (tmp_path / "base.yaml").unlink()
    message = refused(f"recipe={tmp_path}/sub/child.yaml")
    assert f"cannot read {tmp_path}/base.yaml" in message and f"({tmp_path}/sub/child.yaml builds on it)" in message


def test_a_server_that_is_not_there_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain.storage.patience.PATIENCE", 0.1)
    monkeypatch.setattr("dtrain.recipe.locate.SECONDS", 0.1)
    assert "Cannot connect to host 127.0.0.1:1" in composed("recipe=http://127.0.0.1:1/x.yaml")["refused"]


def test_a_folder_beside_stands_for_the_recipe_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("steps: 3\n")
    monkeypatch.chdir(tmp_path)
    assert compose(["recipe=run"]).steps == 3


def test_a_folder_of_words_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "there is no such folder" in refused(f"hydra.searchpath=[{tmp_path}/nothing]")
    assert f"Type hydra.searchpath=[{tmp_path}]" in refused(f"hydra.searchpath={tmp_path}")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
def test_a_server_with_a_certificate_of_its_own(tmp_path: Path) -> None:
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        "key",
        "-out",
        "cert",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    subprocess.run([*made, "-addext", "subjectAltName=DNS:localhost"], cwd=tmp_path, check=True, capture_output=True)
    with site(mine="steps: 7\n", tls=tmp_path) as url:

        def plan(**environ: str) -> tuple[int, str]:
            words = [sys.executable, "-m", "dtrain", "plan", f"recipe={url}/mine.yaml"]
            done = subprocess.run(
                words, env={**os.environ, **environ}, capture_output=True, text=True, timeout=300, check=False
            )
            return done.returncode, done.stdout + done.stderr

        assert "7 steps" in plan(SSL_CERT_FILE=str(tmp_path / "cert"))[1]
        code, output = plan()
        assert code == 2 and "Set SSL_CERT_FILE=<" in output and len(output.splitlines()) == 1


LEFT_OPEN = "# @package _global_\ndefaults:\n  - override /optim: ???\n  - override /model: ???\noptim:\n  lr: ???\n"


def test_epochs_are_an_answer_to_a_recipe_that_leaves_its_steps_open(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("steps: ???\nmodel: mlp\ndata: synthetic\ndata.samples: 64\nbatch: 8\n")
    words = [f"recipe={tmp_path}/mine.yaml", "objective=regression"]
    with pytest.raises(WordsError, match=r"steps=<an integer >= 1, in steps>, or epochs=<passes over the data>\."):
        resolve(compose(words), Cluster(gpus=0, cpus=2))
    assert resolve(compose([*words, "epochs=2"]), Cluster(gpus=0, cpus=2)).steps == 16


@pytest.mark.parametrize(
    ("typed", "open_"),
    [
        ("", ["optim", "model"]),
        ("optim=sgd model=mlp", ["optim.lr"]),
        ("optim=sgd optim.lr=1 model._target_=torch.nn.Linear model.in_features=3 model.out_features=3", []),
    ],
)
def test_a_group_that_a_recipe_leaves_open_is_to_be_chosen(typed: str, open_: list[str], tmp_path: Path) -> None:
    """No default stands in, also not for an argument of what is chosen then."""
    path = tmp_path / "r.yaml"
    path.write_text(LEFT_OPEN)
    words = [f"recipe={path}", "data=synthetic", *typed.split()]
    if not open_:
        assert compose(words).optim["lr"] == 1
        return
    with pytest.raises(WordsError) as raised:
        resolve(compose(words), Cluster(gpus=0, cpus=2))
    assert sorted(re.findall(r" leaves (\S+) to you\. Type \1=<", str(raised.value))) == sorted(open_)
