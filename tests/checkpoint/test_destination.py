"""Where an export goes: a repository of the hub gets one commit, and a bucket what makes a folder whole last."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
from checkpoint.test_leaving import made, saved
from fake_hub import Hub, serving
from safetensors.torch import load

from dtrain.__main__ import main
from dtrain.errors import StoreError
from dtrain.storage import store

SMALL = """import sys
from dtrain.checkpoint import destination
from dtrain.__main__ import main
destination.SMALL = 8000
sys.exit(main(sys.argv[1:]))
"""
"""A command for which a file of 8,000 bytes is a large one."""


def export(hub: Hub, folder: Path, *more: str, name: str = "me/mine") -> subprocess.CompletedProcess[str]:
    """In a process of its own: the client reads its variables when it is imported, and starts threads."""
    words = ("checkpoint", "export", f"out={folder}/run", f"to=hf://{name}", "as=transformers", *more)
    own = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_x", "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1"}
    return python(SMALL, *words, **own)


def python(program: str, *words: str, **own: str) -> subprocess.CompletedProcess[str]:
    """Not forked from this process, in which the hub is a thread."""
    env = {**os.environ, **own}
    return subprocess.run([sys.executable, "-c", program, *words], env=env, capture_output=True, text=True, timeout=120)


READ = "import sys, transformers; print(type(transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)"


@pytest.mark.campaign("network")
def test_a_repository_of_the_hub_gets_one_commit(tmp_path: Path) -> None:
    saved(made("gpt"), tmp_path / "run")
    with serving() as hub:
        done = export(hub, tmp_path, "shard=20KB")
        assert done.returncode == 0, done.stderr
        assert "hf://me/mine/model.safetensors.index.json" in done.stdout
        assert hub.commits == 1
        files = hub.repositories["me/mine"]
        assert {"config.json", "model-00001-of-00011.safetensors"} <= {*files}
        assert len(hub.blobs) == 11
        assert "model.embed_tokens.weight" in load(files["model-00001-of-00011.safetensors"])
        read = python(READ, "me/mine", HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "home"))
        assert "Qwen3ForCausalLM" in read.stdout, read.stderr
        again = export(hub, tmp_path)
        assert (
            again.returncode == 3 and "it is there already. Type to=<another repository>, or remove it" in again.stderr
        )
        hub.refuses = True
        refused = export(hub, tmp_path, name="others/theirs")
        assert refused.returncode == 3 and len(refused.stderr.splitlines()) == 1, refused.stderr
        assert "Type hf auth login, or set HF_TOKEN to a token that may write there" in refused.stderr
        assert hub.commits == 1


def test_a_bucket_gets_what_makes_it_whole_last_and_a_broken_export_never_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(made("gpt"), tmp_path / "run")
    written, upload, publish = list[str](), store.upload, store.publish
    monkeypatch.setattr(store, "upload", lambda path, url: (written.append(url), upload(path, url)))
    monkeypatch.setattr(store, "publish", lambda url, data: (written.append(url), publish(url, data)))
    words = ["checkpoint", "export", f"out={tmp_path}/run", "as=transformers", "shard=20KB"]
    assert main([*words, "to=memory://whole"]) == 0
    names = [url.rsplit("/", 1)[-1] for url in written]
    assert names[-2:] == ["model.safetensors.index.json", "config.json"] and len(names) == 13
    for stop in (0, 1, 10, 11, 12):
        seen = list[str]()

        def broken(*args: Any, seen: list[str] = seen, stop: int = stop) -> None:
            seen.append("")
            if len(seen) > stop:
                raise StoreError("gone")
            (upload if isinstance(args[0], Path) else publish)(*args)

        monkeypatch.setattr(store, "upload", broken)
        monkeypatch.setattr(store, "publish", broken)
        assert main([*words, f"to=memory://broken{stop}"]) == 3
        assert not fsspec.filesystem("memory").exists(f"/broken{stop}/config.json")
    capsys.readouterr()
