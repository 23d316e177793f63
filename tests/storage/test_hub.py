"""The hub of Hugging Face where nothing answers: one sentence at once in place of its client's own tries; where it answers, nothing is changed."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from small import plan

from dtrain.errors import PreflightError, WordsError
from dtrain.launcher import preflight
from dtrain.storage import answering, hub

DEADLINE = 300
CLIENT = "from dtrain.storage import hub\nhub.watch()\nfrom huggingface_hub import constants\nprint(constants.HF_HUB_OFFLINE)"
USE = "\nfrom huggingface_hub import errors\ntry: raise errors.LocalEntryNotFoundError('x')\nexcept Exception: pass"


@contextmanager
def taking(act: Callable[[socket.socket], Any]) -> Iterator[str]:
    """The URL of a server that takes connections and does this with each."""
    kept = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                kept.append(server.accept()[0])
                act(kept[-1])

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    for connection in kept:
        connection.close()


def nothing(connection: socket.socket) -> None:
    pass


def answer(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    connection.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")


@pytest.fixture
def closed() -> str:
    """The URL of a port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the proxies nor the hub of whoever runs the tests."""
    for name in (*hub.OFFLINE, "HF_ENDPOINT", "http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_what_does_not_answer(closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answering.silence(closed) == "Connection refused"
    assert answering.silence("http://no-such-host.invalid")
    with taking(socket.socket.close) as url:
        assert answering.silence(url) in ("it closes the connection", "Connection reset by peer")
        assert answering.silence(url.replace("http", "https"))
    monkeypatch.setattr(answering, "SECONDS", 0.5)
    with taking(nothing) as url:
        assert answering.silence(url) == "timed out"
        assert answering.silence(url.replace("http", "https")) == "timed out"


def test_any_answer_is_one(closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with taking(answer) as url:
        assert answering.silence(url) == ""
        assert answering.silence(url.replace("http", "https")) == "", (
            "its client is to say what is wrong with its certificate"
        )
        really = socket.getaddrinfo

        def both(host: str, port: int, *args: Any, **more: Any) -> list[Any]:
            addresses = ("127.0.0.2", "127.0.0.1") if host == "two-addresses" else (host,)
            return [entry for address in addresses for entry in really(address, port, *args, **more)]

        monkeypatch.setattr(socket, "getaddrinfo", both)
        assert answering.silence(url.replace("127.0.0.1", "two-addresses")) == "", "one of them answers"
    for url in ("socks5://127.0.0.1:1", "http://127.0.0.1:port", "nonsense", ""):
        assert answering.silence(url) == "", "its client is to say what is wrong with it"


def test_a_proxy_is_asked_in_its_place(closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", closed)
    assert answering.silence("https://hub.example.org") == "Connection refused"
    with taking(nothing) as url:
        monkeypatch.setenv("https_proxy", url)
        assert answering.silence("https://hub.example.org") == "", "only the hub itself is known to be silent"
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert answering.silence(closed.replace("http", "https")) == "Connection refused"


def offline(use: str = USE, **environ: str) -> bool:
    done = subprocess.run(
        [sys.executable, "-c", CLIENT + use],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    is_told = bool(use) and "True" in done.stdout and "HF_HUB_OFFLINE" not in environ
    assert ("does not answer" in done.stderr) == is_told
    return "True" in done.stdout


def test_the_client_is_offline_where_nothing_answers_unless_the_user_has_chosen(closed: str) -> None:
    pytest.importorskip("huggingface_hub")
    assert offline(HF_ENDPOINT=closed)
    assert offline(use="", HF_ENDPOINT=closed), "what only imports the client is told nothing"
    assert not offline(HF_ENDPOINT=closed, HF_HUB_OFFLINE="0")
    with taking(answer) as url:
        assert not offline(HF_ENDPOINT=url)
        assert offline(HF_ENDPOINT=url, HF_HUB_OFFLINE="1")


def test_what_the_words_name_is_refused_before_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    tokens = {"_target_": "transformers.AutoTokenizer.from_pretrained", "pretrained_model_name_or_path": "org/words"}
    decided = replace(
        plan("model=gpt"),
        data={"_target_": "dtrain.data.dataset.build", "dataset": {"_target_": "mypkg.Rows", "parts": [tokens]}},
    )
    key = "data.dataset.parts.0.pretrained_model_name_or_path"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert [*preflight._hub(decided)] == [
        f"{key}=org/words: offline, and {tmp_path} has nothing of it. Type {key}=<a folder>, or fetch it where there is a network: hf download org/words"
    ]
    (tmp_path / "models--org--words").mkdir()
    assert not [*preflight._hub(decided)], "the cache may have it"
    (tmp_path / "models--org--words").rmdir()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert not [*preflight._hub(decided)], "the hub may have it"


class Hub(SimpleHTTPRequestHandler):
    """Files of one model, at /<its name>/resolve/main/, as the hub serves them."""

    def translate_path(self, path: str) -> str:
        return str(Path(self.directory, path.rpartition("/")[2]))

    def send_response(self, code: int, message: str | None = None) -> None:
        super().send_response(code, message)
        if code == 404:
            self.send_header("X-Error-Code", "EntryNotFound")

    def end_headers(self) -> None:
        self.send_header("ETag", f'"{self.path.rpartition("/")[2]}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_run_whose_samples_are_counted_tells_once_that_nothing_answers(closed: str, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    (tmp_path / "mine.py").write_text(
        "import huggingface_hub, torch\n\nclass Net(torch.nn.Linear): ...\n\nclass Rows(list): ...\n\n"
        "def rows():\n    try: huggingface_hub.hf_hub_download('org/x', 'y')\n    except Exception: pass\n"
        "    return Rows([(torch.ones(4), 1)] * 8)\n"
    )
    words = ["model._target_=mine.Net", "model.in_features=4", "model.out_features=2", "data=dataset", "trust=[mine]"]
    words += ["data.dataset._target_=mine.rows", "objective=classification", "epochs=1", "hook=[]", "logger=[]"]
    command, env = [sys.executable, "-m", "dtrain", *words, "out=run"], {**os.environ, "HF_ENDPOINT": closed}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("does not answer") == 1, done.stderr


@pytest.mark.campaign("network")
def test_a_plan_offline_and_with_a_hub(closed: str, tmp_path: Path) -> None:
    """Refused in one sentence without a second try; loaded where it is served; and from the cache when the hub is gone again."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "files")
    assert json.loads((tmp_path / "files/config.json").read_text())["vocab_size"] == 300

    def planned(endpoint: str) -> tuple[int, str]:
        (tmp_path / "text.txt").write_text("some words, and some more\n" * 100)
        words = ["data=text", "data.path=text.txt", "model._target_=transformers.AutoModelForCausalLM.from_pretrained"]
        words += ["model.pretrained_model_name_or_path=org/tiny", "trust=[transformers]"]
        env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home")}
        done = subprocess.run(
            [sys.executable, "-m", "dtrain", "plan", *words],
            env=env,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
            cwd=tmp_path,
        )
        return done.returncode, done.stdout + done.stderr

    code, printed = planned(closed)
    assert code == 2 and "couldn't find them in the cached files" in printed and "Retrying" not in printed, printed
    with serving(tmp_path / "files") as url:
        code, printed = planned(url)
        assert code == 0 and "does not answer" not in printed, printed
    code, printed = planned(url)
    assert code == 0 and "does not answer" not in printed, "the cache has it"


def test_a_folder_that_is_gone_is_told_with_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def client(url: str) -> Any:
        raise OSError("no network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "client", client)
    monkeypatch.setattr(hub, "absent", lambda name: "")
    (tmp_path / "models/vit-small").mkdir(parents=True)
    for name, near in (
        ("models/vit-smal", "; and there is no folder models/vit-smal, but models/vit-small."),
        ("model/vit-small", "; and there is no folder model/vit-small, but models/vit-small."),
        ("models/qwen", "; and there is no folder models/qwen."),
        ("google/vit-base", "no network."),
    ):
        with pytest.raises(PreflightError) as error:
            hub.read(hub.place(name), "config.json")
        assert str(error.value).endswith(near)


def test_a_link_to_nothing_is_no_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    for name, to in (("models/lost", "lost"), ("models/gone", "nowhere"), ("round", "round"), ("models/here", ".")):
        Path(name).symlink_to(to)
    for name, link in (("models/lost", "models/lost"), ("models/gone", "models/gone"), ("round/a", "round")):
        with pytest.raises(PreflightError, match=f"{name}: {link} is a link to .*, where nothing is"):
            hub.place(name)
        with pytest.raises(WordsError, match=f"model.name={name}: {link} is a link"):
            plan("model=hf", f"model.name={name}")
    assert hub.place("models/here") == "models/here" and hub.place("models/other") == "hf://models/other"
