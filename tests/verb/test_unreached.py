"""Whoever looks at a place that nothing answers at, such as a mistyped address, is not kept waiting as a run would be."""

import socket

import pytest
from pool import ranks

from dtrain.__main__ import main
from dtrain.storage import patience

WORDS = (
    ["runs", "{}"],
    ["report", "{}"],
    ["stop", "{}"],
    ["why", "{}"],
    ["diff", "{}/a", "{}/b"],
    ["checkpoint", "ls", "out={}"],
    ["sweep", "ls", "{}"],
    ["sweep", "best", "{}"],
    ["sweep", "stop", "{}"],
    ["evaluate", "out={}"],
    ["generate", "out={}"],
    ["model=mlp", "data=synthetic", "objective=classification", "out={}"],
)


def codes(url: str) -> list[int]:
    """The exit codes of all; a run would be as patient as this process lives."""
    patience.PATIENCE = patience.UNREACHED = 600.0
    patience.ANSWER_SECONDS = 0.1
    return [main([word.replace("{}", url) for word in words]) for words in WORDS]


def test_no_verb_waits_for_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        for name, value in (
            ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed.getsockname()[1]}"),
            ("AWS_ACCESS_KEY_ID", "a"),
            ("AWS_SECRET_ACCESS_KEY", "b"),
        ):
            monkeypatch.setenv(name, value)
        (done,) = ranks(1, codes, "s3://bucket/x")
    assert done == [3] * len(WORDS)
