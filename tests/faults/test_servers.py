"""Two ranks, killed now and then, whose checkpoints lie on a server that fails now and then: they end as those that nobody touched."""

from pathlib import Path

import pytest
from killing import leavings, survive
from pool import ranks
from servers import Server

pytestmark = pytest.mark.campaign("kills")

WORDS = (
    "model=mlp",
    "steps=60",
    "checkpoint.every=20",
    "strategy=ddp",
    "devices=2",
    "launcher=local",
    "launcher.restarts=100",
)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    out = tmp_path_factory.mktemp("untouched") / "run"
    survive(WORDS, out, kills=0, seed=0)
    return leavings(out)


@pytest.mark.often("s3")
def test_a_run_on_a_server_that_fails_equals_the_untouched_one(
    server: Server, tmp_path: Path, untouched: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{server.url}/{tmp_path.name}"
    with server.failing(share=0.1) as port, monkeypatch.context() as patch:
        for name, value in server.environment(port).items():
            patch.setenv(name, value)
        done = survive(WORDS, tmp_path / "run", url=url, kills=2, seed=1, targets={"rank": 1})
    assert done == {"rank": 2}
    assert ranks(1, leavings, url) == [untouched]


@pytest.mark.parametrize("trouble", ["30% of 500s", "listings 8 s old"])
def test_a_run_whose_server_is_in_trouble_from_the_first_request_equals_the_untouched_one(
    trouble: str, s3_server: Server, tmp_path: Path, untouched: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{s3_server.url}/{tmp_path.name}"
    proxy = s3_server.failing(share=0.3, kinds=["500"]) if "500" in trouble else s3_server.listing_late(8)
    with proxy as port, monkeypatch.context() as patch:
        for name, value in s3_server.environment(port).items():
            patch.setenv(name, value)
        for steps in (
            "stop_after=40",
            "stop_after=null",
        ):  # the second start must see what the first has saved a moment before
            survive([*WORDS, steps], tmp_path / "run", url=url, kills=0, seed=1)
    assert ranks(1, leavings, url) == [untouched]
