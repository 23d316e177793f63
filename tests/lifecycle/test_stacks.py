"""What a stack says about where it is."""

import faulthandler
import sys
import threading
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from pool import ranks
from small import mesh_of

from dtrain.lifecycle import stacks
from dtrain.loop.step import make_step


def raised(act: object) -> stacks.Frames:
    try:
        act()  # type: ignore[operator]
    except Exception as error:
        return list(traceback.walk_tb(error.__traceback__))
    raise AssertionError


def test_the_users_line_is_told_not_that_of_the_library() -> None:
    where = stacks.own(raised(lambda: torch.nn.Linear(2, 2)(torch.zeros(3))))
    assert where is not None
    assert where.startswith("lifecycle/test_stacks.py:")
    assert where.endswith("in <lambda>")


def test_a_collective_is_told_with_the_line_that_called_it() -> None:
    def work() -> str | None:
        with mesh_of():
            return stacks.collective(raised(lambda: dist.all_reduce(torch.zeros(1), op="no such")))

    (place,) = ranks(1, work)
    assert place.startswith("all_reduce (lifecycle/test_stacks.py:")
    assert stacks.collective(raised(lambda: [][1])) is None


class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise ValueError("in user code")


def test_a_backward_may_wait_for_others_but_not_in_code_of_the_users() -> None:
    x = torch.ones(1, requires_grad=True)
    assert stacks.collective(raised(lambda: (x * 2).backward(torch.ones(5)))) is None  # raised before the engine runs
    assert stacks.collective(raised(Late.apply(x).backward)) is None  # type: ignore[no-untyped-call]
    assert (stacks.own(raised(Late.apply(x).backward)) or "").endswith("in backward")  # type: ignore[no-untyped-call]


def test_the_microbatch_is_read_from_the_step() -> None:
    source = Path(make_step.__code__.co_filename)
    code = compile("def step():\n for index in range(5):\n  1 // (index - 3)\n", str(source), "exec")
    scope: dict[str, object] = {}
    exec(code, scope)
    assert stacks.microbatch(raised(scope["step"])) == 3
    assert stacks.microbatch(raised(lambda: 1 // 0)) is None


def test_a_dump_of_faulthandler_is_read(tmp_path: Path) -> None:
    with (tmp_path / "stack").open("w") as file:
        faulthandler.dump_traceback(file)
    place = stacks.dumped((tmp_path / "stack").read_text())
    assert place is not None
    assert place.startswith("lifecycle/test_stacks.py:")
    assert place.endswith("in test_a_dump_of_faulthandler_is_read")


def test_other_threads_are_seen_where_they_run_somebodys_code() -> None:
    go, there = threading.Event(), threading.Event()

    def wait() -> None:
        there.set()
        go.wait()

    thread = threading.Thread(target=wait, name="loader")
    thread.start()
    there.wait()
    stacks_of = stacks.others(threading.get_ident(), leave_out=[])
    go.set()
    thread.join()
    assert stacks_of["loader"].endswith("in wait")
    assert stacks.own(stacks.of_thread(threading.get_ident())) is not None


def test_a_place_is_told_as_it_is_imported(tmp_path: Path, monkeypatch: object) -> None:
    sys.path.insert(0, str(tmp_path))
    try:
        assert stacks.place(str(tmp_path / "mypkg" / "model.py"), 12, "forward") == "mypkg/model.py:12 in forward"
    finally:
        sys.path.remove(str(tmp_path))
