"""Limits of the system and variables of the environment, each verdict both ways; a small limit is a real one."""

import resource

import pytest
from pool import ranks
from small import plan

from dtrain.doctor import Case, Finding, limits

MANY = 1 << 20


def case(*words: str, **environ: str) -> Case:
    return Case(plan(*words), environ, dict)


@pytest.mark.parametrize(
    ("soft", "hard", "world", "verdict"),
    [
        (1024, MANY, 2, "ok"),
        (-1, -1, 10_000, "ok"),
        (1024, MANY, 512, "note"),
        (64, MANY, 2, "note"),
        (24, MANY, 2, "stop"),
        (512, MANY, 1024, "stop"),
    ],
)
def test_open_files_must_do_for_the_sockets_of_a_rank(soft: int, hard: int, world: int, verdict: str) -> None:
    assert limits.enough_files(soft, hard, world).verdict == verdict


def test_what_a_user_may_raise_is_told_as_a_command() -> None:
    assert limits.enough_files(64, MANY, 2).advice == "ulimit -n 264"
    assert "limits.conf" in limits.enough_files(64, 64, 2).advice


def test_a_small_limit_of_open_files_is_seen() -> None:
    def work() -> Finding:
        resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))
        (finding,) = limits.files(case("devices=2"))
        return finding

    (finding,) = ranks(1, work)
    assert finding.verdict == "stop"
    assert finding.text.startswith("30 open files")


@pytest.mark.parametrize(
    ("limit", "need", "verdict"), [(-1, 50, "ok"), (4096, 50, "ok"), (512, 50, "note"), (20, 50, "stop")]
)
def test_processes_must_do_for_the_threads_of_the_ranks(limit: int, need: int, verdict: str) -> None:
    assert limits.enough_tasks(limit, need).verdict == verdict


@pytest.mark.parametrize(
    ("soft", "fast", "verdict"), [(8 << 20, False, "ok"), (-1, True, "ok"), (8 << 20, True, "note")]
)
def test_infiniband_needs_locked_memory(soft: int, fast: bool, verdict: str) -> None:
    assert limits.enough_locked(soft, fast_network=fast).verdict == verdict


@pytest.mark.parametrize(("soft", "verdict"), [(0, "ok"), (1 << 20, "ok"), (-1, "note"), (64 << 30, "note")])
def test_core_files_as_large_as_memory_are_told(soft: int, verdict: str) -> None:
    assert limits.size_of_dumps(soft).verdict == verdict


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "note"),
        ("CUDA_LAUNCH_BLOCKING", "0", None),
        ("NCCL_DEBUG", "info", "note"),
        ("NCCL_DEBUG", "WARN", "ok"),
        ("NCCL_P2P_DISABLE", "1", "note"),
        ("TORCH_LOGS", "dynamo", "ok"),
        ("HOME", "/", None),
    ],
)
def test_variables_that_change_a_run_are_told(name: str, value: str, verdict: str | None) -> None:
    findings = list(limits.variables(case(**{name: value})))
    assert [one.verdict for one in findings] == [verdict] * bool(verdict)
    assert all(one.text.startswith(f"{name}={value}: ") for one in findings)


@pytest.mark.parametrize(
    ("value", "bad"), [("lo", False), ("=lo", False), ("^docker", False), ("nosuch0", True), ("nosuch0,lo", False)]
)
def test_an_interface_that_is_not_there_stops_a_run(value: str, bad: bool) -> None:
    verdicts = [finding.verdict for finding in limits.variables(case(GLOO_SOCKET_IFNAME=value))]
    assert ("stop" in verdicts) == bad


@pytest.mark.parametrize(
    ("environ", "verdicts"),
    [
        ({}, []),
        ({"HTTPS_PROXY": "http://proxy:3128"}, ["note"]),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "localhost, 127.0.0.1"}, ["ok"]),
        ({"no_proxy": "localhost"}, []),
    ],
)
def test_a_proxy_must_leave_this_machine_alone(environ: dict[str, str], verdicts: list[str]) -> None:
    assert [finding.verdict for finding in limits.proxied(environ)] == verdicts
