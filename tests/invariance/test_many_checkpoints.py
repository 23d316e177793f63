"""A save costs the same beside ten checkpoints and beside sixty: what is known is not listed again."""

import json
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from checkpoint.test_commit import SHARD, body
from checkpoint.test_sharded import alone, commit, sharded, state_on

from dtrain.checkpoint import commit as commits
from dtrain.mesh import Mesh
from dtrain.storage import lease, store
from dtrain.storage.attempts import folder

NAMES = 50
"""In an answer of the server, which would say a thousand."""


def plant(out: str, count: int) -> None:
    """Checkpoints of `count` steps by an earlier run."""

    def one(step: int) -> None:
        url = store.join(folder(out, step), f"00000001-20260101T000000-{step:08x}-0001")
        store.write(store.join(url, SHARD["name"]), b"1234")
        commit = {"format": commits.FORMAT, **body(step)}
        store.write(store.join(url, commits.NAME), json.dumps({**commit, "digest": commits.digest(commit)}).encode())

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(1, count + 1)))


def requests_of_saves(mesh: Mesh, out: str, count: int) -> list[dict[str, int]]:
    """What each of three saves asks of the server, by the names of the requests, after `count` checkpoints of an earlier run."""
    from s3fs import S3FileSystem

    plant(out, count)
    asked, call = Counter[str](), S3FileSystem._call_s3

    def counted(self: S3FileSystem, method: str, *arguments: object, **more: object) -> object:
        asked[method] += 1
        if method == "list_objects_v2":
            more.setdefault("MaxKeys", NAMES)
        return call(self, method, *arguments, **more)

    S3FileSystem._call_s3 = counted
    found = []
    with lease.hold(out):
        state, checkpoint = state_on(mesh), sharded(mesh, out)
        for state.step in (2001, 2002, 2003):
            before = Counter(asked)
            commit(checkpoint, state)
            found.append(dict(asked - before))
    return found


@pytest.mark.campaign("network")
def test_requests_of_a_save_do_not_grow_with_the_checkpoints(s3: str) -> None:
    few, many = (
        alone(lambda mesh, count=count: requests_of_saves(mesh, f"{s3}/{uuid.uuid4().hex}", count))
        for count in (10, 60)
    )
    assert many[1:] == few[1:]
    assert many[0].pop("list_objects_v2") - few[0].pop("list_objects_v2") == 2, (
        "what is there is listed once: 122 names, fifty in each answer"
    )
    assert many[0] == few[0]
    assert sum(few[1].values()) < 40
