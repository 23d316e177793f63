"""The verdict on GPUs, cores and memory, both ways: this machine shows one of them, made-up facts the other."""

import os
import stat
from pathlib import Path

import pytest
from small import plan

from dtrain.doctor import Case, devices

GPU = {
    "index": "0", "uuid": "GPU-1", "name": "NVIDIA H200", "memory.total": "143771", "memory.used": "4", "mig.mode.current": "Disabled",
    "ecc.errors.uncorrected.volatile.total": "0", "driver_version": "580.1",
}  # fmt: skip
USER = {"gpu_uuid": "GPU-1", "pid": "77", "process_name": "/usr/bin/python3", "used_memory": "40000"}


def case(**environ: str) -> Case:
    return Case(plan("devices=2"), environ, dict)


@pytest.mark.parametrize(
    ("changed", "verdict", "message"),
    [
        ({}, "ok", "NVIDIA H200, 140 GiB, driver 580.1, free"),
        ({"memory.used": "40000"}, "note", "39.1 GiB are used by pid 77 (python3)"),
        ({"mig.mode.current": "Enabled"}, "note", "MIG"),
        ({"mig.mode.current": "[N/A]", "ecc.errors.uncorrected.volatile.total": "[N/A]"}, "ok", "free"),
        ({"ecc.errors.uncorrected.volatile.total": "3"}, "stop", "3 uncorrected memory errors"),
    ],
)
def test_a_gpu_is_judged_by_what_its_driver_tells(changed: dict[str, str], verdict: str, message: str) -> None:
    finding = devices.judged({**GPU, **changed}, [USER] if "memory.used" in changed else [])
    assert (finding.verdict, message in finding.text) == (verdict, True), finding
    assert bool(finding.advice) == (verdict != "ok")


def pretend(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


TWO = """case "$1" in
*compute-apps*) echo "GPU-2, 77, python, 40000";;
*driver_version*) echo "0, GPU-1, A, 81559, 0, Disabled, 0, 580.1"; echo "1, GPU-2, A, 81559, 40000, Disabled, 0, 580.1";;
*) echo "0, GPU-1, 81559, A, Disabled, 9.0"; echo "1, GPU-2, 81559, A, Disabled, 9.0";;
esac"""


@pytest.mark.parametrize(
    ("shown", "findings"),
    [
        ("0,1", [("ok", False), ("note", True)]),
        ("0", [("ok", False)]),  # what others do on the second is no matter of this run
        ("GPU-2", [("note", True)]),
    ],
)
def test_what_nvidia_smi_prints_of_visible_gpus_is_read(
    shown: str, findings: list[tuple[str, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(tmp_path, monkeypatch, TWO)
    assert [
        (each.verdict, "pid 77" in each.text) for each in devices.gpus(case(CUDA_VISIBLE_DEVICES=shown))
    ] == findings


def test_gpus_that_are_all_hidden_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(tmp_path, monkeypatch, TWO)
    (finding,) = devices.gpus(case(CUDA_VISIBLE_DEVICES="7"))
    assert (finding.verdict, finding.text) == (
        "note",
        "this host has 2, but CUDA_VISIBLE_DEVICES=7 names none of them: ranks compute on the CPU",
    )


def test_gpus_without_a_driver_stop_a_run_and_no_gpus_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(tmp_path, monkeypatch, 'echo "NVIDIA-SMI has failed"; exit 9')
    (finding,) = devices.gpus(case(CUDA_VISIBLE_DEVICES="0,1"))
    assert (finding.verdict, "has failed" in finding.text) == ("note", True), "a variable alone makes no GPU"
    files = tmp_path / "dev"
    files.mkdir()
    for number in range(2):
        (files / f"nvidia{number}").touch()
    monkeypatch.setattr("dtrain.cluster.FILES", files)
    (finding,) = devices.gpus(case(CUDA_VISIBLE_DEVICES="0,1"))
    assert (finding.verdict, "this host has 2" in finding.text, "has failed" in finding.text) == ("stop", True, True)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    monkeypatch.setattr("dtrain.cluster.FILES", tmp_path / "nowhere")
    (finding,) = devices.gpus(case(CUDA_VISIBLE_DEVICES=""))
    assert finding.verdict == "ok"


@pytest.mark.parametrize("answer", ["exit 1", "head -c 3000 /dev/urandom", "echo '-5, N/A'"])
def test_an_answer_of_nvidia_smi_that_cannot_be_read_is_told(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(tmp_path, monkeypatch, answer)
    (finding,) = devices.gpus(case())
    assert finding.verdict == "note" and finding.text.startswith("nvidia-smi ")


@pytest.mark.parametrize(
    ("ranks", "threads", "cores", "load", "verdict", "advice"),
    [
        (4, 1, 8.0, 1.0, "ok", ""),
        (4, 8, 8.0, 1.0, "note", "threads=2"),
        (4, 1, 1.0, 1.0, "note", "devices=1"),
        (1, 1, 2.0, 9.0, "note", "see them with top"),
    ],
)
def test_more_threads_than_cores_are_told(
    ranks: int, threads: int, cores: float, load: float, verdict: str, advice: str
) -> None:
    finding = devices.threads(ranks, threads, cores=cores, load=load)
    assert (finding.verdict, finding.advice) == (verdict, advice)


def test_memory_must_hold_the_ranks() -> None:
    assert devices.room_for(2, 8 << 30, 16 << 30).verdict == "ok"
    assert devices.room_for(2, 1 << 29, 16 << 30).verdict == "stop"


def test_shared_memory_of_a_container_is_small() -> None:
    assert devices.shared_room(8 << 30, 8 << 30).verdict == "ok"
    assert devices.shared_room(64 << 20, 64 << 20).advice == "docker run --shm-size=8g"
    assert "remove" in devices.shared_room(8 << 30, 1 << 20).advice


def test_this_machine_is_told() -> None:
    (cores,), (memory,), (shared,) = devices.cores(case()), devices.memory(case()), devices.shared(case())
    assert f"{len(os.sched_getaffinity(0))} core(s)" in cores.text
    assert " GiB free of " in memory.text
    assert shared.check == "shm"
