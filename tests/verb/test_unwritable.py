"""A place that only gives files is refused before anything is computed for it."""

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dtrain.__main__ import main
from dtrain.verb import evaluate

SMALL = [
    "train", "steps=2", "model.layers=1", "model.width=16", "model.heads=2", "data.sequence=16", "hook=[]", "logger=[]",
    "evaluate.samples=8",
]  # fmt: skip


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def test_figures_rows_and_text_are_not_made_for_a_web_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, asks = tmp_path / "corpus.txt", tmp_path / "asks.txt"
    corpus.write_text("".join(f"line {number} says {number * number}\n" for number in range(500)))
    asks.write_text("line\n")
    assert main([*SMALL, f"data.path={corpus}", f"out={tmp_path / 'out'}"]) == 0
    monkeypatch.setattr(evaluate, "build", None)  # nothing is launched
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/out"
        to = f"generate.to={url}/a.txt"
        for verb, place, more in (
            ("evaluate", f"out={url}", []),
            ("predict", f"predict.to={url}/predictions.jsonl", []),
            ("generate", to, [f"generate.prompts={asks}", to]),
        ):
            code, said = main([verb, f"out={url}", f"data.path={corpus}", *more]), capsys.readouterr().err
            assert code == 3 and f"{place}: cannot write" in said and "takes no files: it can only be read" in said, (
                said
            )
        server.shutdown()
