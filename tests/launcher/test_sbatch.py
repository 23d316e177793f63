"""Options of sbatch that a user adds: what sbatch takes is taken, and what states something else than the plan is not."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from launching import plan_of

from dtrain.build import build
from dtrain.config.word import quote
from dtrain.errors import PreflightError, WordsError
from dtrain.launcher import slurm

WORDS = ("launcher=slurm", "strategy=ddp", "batch=48", "devices=2", "nodes=1", "threads=1")
GPUS = ("cluster=h100x8", "devices=8", "nodes=2", "batch=64")


def script(*words: str, more: list[str] | None = None) -> str:
    """The script of a run with these items of launcher.more."""
    items = [f"launcher.more=[{','.join(quote(each) for each in more)}]"] if more else []
    plan = plan_of("/shared/run", *WORDS, *words, *items)
    return str(build(plan.launcher).describe(plan))


@pytest.mark.parametrize(
    ("item", "line"),
    [
        ("--container-image=nvcr.io#nvidia/pytorch:25.01", '--container-image="nvcr.io#nvidia/pytorch:25.01"'),
        ("--container-mounts=/data:/data,/a b:/c", '--container-mounts="/data:/data,/a b:/c"'),
        ("-C a100", "-C a100"),
        ("-Ca100", "-C a100"),
        ("-C 'a100&ib'", "-C a100&ib"),
        ("--constraint a100|h100", "--constraint=a100|h100"),
        ('--comment=say "hi" \\ there', '--comment="say \\"hi\\" \\\\ there"'),
        ("#SBATCH --mem=0", "--mem=0"),
        ("--nodes=1", "--nodes=1"),
        ("-N1", "--nodes=1"),
        ("-c 4", "--cpus-per-task=4"),
        ("--gres=lscratch:200", "--gres=lscratch:200"),
        ("--gres=gpu:0", "--gres=gpu:0"),
        ("-w n[1-2]", "-w n[1-2]"),
        ("--nodelist=n1", "--nodelist=n1"),
        ("-H", "-H"),
        ("-p gpu", "--partition=gpu"),
        ("--dependency=afterok:7", "--dependency=afterok:7"),
    ],
)
def test_what_sbatch_takes_is_taken_as_it_is_meant(item: str, line: str) -> None:
    assert script(more=[item]).splitlines().count(f"#SBATCH {line}") == 1


@pytest.mark.parametrize("item", ["--gpus-per-node=h100:8", "--gres=gpu:h100:8,lscratch:1", "-G16", "--gpus=h100:16"])
def test_gpus_may_be_asked_for_in_the_clusters_own_words(item: str) -> None:
    text = script(*GPUS, more=[item])
    assert text.count("--g") == 1


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        ("--nodes=2", "is stated by the plan, and the plan has 1. Type nodes=2."),
        ("-N2", "Type nodes=2."),
        ("-N 2", "Type nodes=2."),
        ("--nod 2", "Type nodes=2."),
        ("-N 1-4", "Type nodes=<number>."),
        ("--ntasks=8", "type devices=<ranks of a node>"),
        ("-n8", "type devices=<ranks of a node>"),
        ("--ntasks-per-node=8", "type devices=<ranks of a node>"),
        ("-c 1", "and the plan has 2. Type threads="),
        ("--output=foo", "goes to the log that the command shows"),
        ("--out=foo", "goes to the log that the command shows"),
        ("-o foo", "goes to the log that the command shows"),
        ("-e /dev/null", "goes to the log that the command shows"),
        ("--open-mode=truncate", "goes to the log"),
        ("--job-name=mine", "finds the job by its name"),
        ("-J mine", "finds the job by its name"),
        ("--export=NONE", "has the environment of the command"),
        ("--array=0-3", "sweep.workers="),
        ("-a 0-3", "sweep.workers="),
        ("--signal=TERM@60", "launcher.save_before="),
        ("-D /tmp", "runs in the folder where the words are typed"),
        ("-M other", "Set SLURM_CLUSTERS=<name>"),
        ("--wait", "launcher.detach=true"),
        ("--test-only", "dtrain plan <the words> shows the script"),
        ("--wrap=touch x", "dtrain plan <the words> shows the script"),
        ("--gres=gpu:8", "the plan is for CPUs. Say what the nodes are: type cluster=h100x8"),
        ("-G 1", "the plan is for CPUs"),
        ("touch", "is no option of sbatch"),
        ("--mem=0 --exclusive", "Type one in each item"),
        ("-C a100 -x n1", "Type one in each item"),
        ("-C a100\n touch x", "is no option of sbatch"),
    ],
)
def test_what_states_something_else_than_the_plan_is_refused(item: str, sentence: str) -> None:
    with pytest.raises(WordsError) as error:
        script(more=[item])
    assert len(error.value.problems) == 1 and "launcher.more: " in str(error.value)
    assert sentence in str(error.value), str(error.value)


@pytest.mark.parametrize(
    ("time", "limit"),
    [("90", "90"), ("4h", "4:00:00"), ("1.5d", "1-12:00:00"), ("30min", "0:30:00"), ("2 days", "2-0:00:00"), ("1-2", "1-2"), ("4:00", "4:00")],
)  # fmt: skip
def test_a_time_limit_with_a_unit_is_written_as_sbatch_reads_it(time: str, limit: str) -> None:
    assert f"#SBATCH --time={limit}\n" in script(f"launcher.time='{time}'")
    assert f"#SBATCH --time={limit}\n" in script(more=[f"-t {time}"])


def test_what_is_no_time_limit_is_refused() -> None:
    for time in ("soon", "4x", "1h30", "5 months", "1:2:3:4", "4:77"):
        with pytest.raises(WordsError, match=r"is no time limit: minutes, .*, or 4h. Type launcher.time=4:00:00."):
            script(f"launcher.time='{time}'")
        with pytest.raises(WordsError, match=r"launcher.more: .* is no time limit"):
            script(more=[f"--time={time}"])


def test_items_of_a_list_of_texts_need_no_quotes() -> None:
    plan = plan_of("/shared/run", *WORDS, "launcher.more=[--constraint=a100,-d singleton]")
    lines = build(plan.launcher).describe(plan).splitlines()
    assert "#SBATCH --constraint=a100" in lines and "#SBATCH -d singleton" in lines
    plan = plan_of("/shared/run", *WORDS, "launcher.setup=[export A=1 B='x y',x=$(hostname),'a,b']")
    assert plan.launcher["setup"] == ["export A=1 B='x y'", "x=$(hostname)", "a,b"]


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("launcher.setup=export A=1 B='x y'", """Type "launcher.setup=[export A=1 B='x y']"."""),
        ("launcher.container='nvcr.io#a/b'", """Type "launcher.more=['--container-image=nvcr.io#a/b']"."""),
        ("launcher.image=foo", """Type "launcher.more=['--container-image=foo']"."""),
        ("launcher.mail_user=me", """Type "launcher.more=['--mail-user=me']"."""),
        ("launcher.mem=10G", "Type launcher.more=[--mem=10G]."),
        ("launcher.nodes=2", "Type nodes=2."),
        ("launcher.time_limit=4h", "Type time_limit="),
    ],
)
def test_words_of_others_are_answered_with_what_slurm_has(word: str, answer: str) -> None:
    with pytest.raises(WordsError) as error:
        plan_of("/shared/run", *WORDS, word)
    assert answer in str(error.value)


def test_what_may_stand_and_is_most_often_a_mistake_is_noted() -> None:
    def notes(out: str, *words: str) -> list[str]:
        plan = plan_of(out, *WORDS, "nodes=2", "devices=1", *words)
        return [*build(plan.launcher).notes(plan)]

    image = "launcher.more=[--container-image=foo]"
    assert not notes("/shared/run") and not notes("s3://b/tmp/run") and not notes("/tmp/run", "nodes=1")
    assert "out=/tmp/run: /tmp is most often a folder of each node alone." in notes("/tmp/run")[0]
    assert "Type launcher.python=python" in notes("/shared/run", image)[0]
    assert not notes("/shared/run", image, "launcher.python=python")


def test_a_slurm_that_is_not_reached_is_answered_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "squeue: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host"
    (tmp_path / "squeue").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    (tmp_path / "squeue").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    plan = plan_of("/shared/run", *WORDS)
    with pytest.raises(
        PreflightError, match=r"Unknown host. Slurm's controller is not reached from here. Type the words"
    ):
        build(plan.launcher).jobs(plan.out)


def test_other_numbers_of_gpus_and_two_words_for_one_thing_are_refused() -> None:
    with pytest.raises(WordsError, match=r"'--gres=gpu:4' asks for 4 GPU\(s\), and the plan has 8. Type devices="):
        script(*GPUS, more=["--gres=gpu:4"])
    with pytest.raises(WordsError, match=r"'-p slow' contradicts launcher.partition=gpu. Leave one out"):
        script("launcher.partition=gpu", more=["-p slow"])


def test_variables_of_sbatch_do_not_override_the_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = dict[str, str]()

    def answer(command: object, *, environment: Mapping[str, str], without: list[str], **_: object) -> str:
        seen.update(dict.fromkeys(without, ""))
        return "7"

    monkeypatch.setattr(slurm, "answer", answer)
    plan = plan_of(str(tmp_path / "run"), *WORDS, "launcher.partition=gpu", "launcher.time=60")
    build(plan.launcher).submit(plan, {})
    assert {"SBATCH_OUTPUT", "SBATCH_ERROR", "SBATCH_EXPORT", "SBATCH_PARTITION", "SBATCH_TIMELIMIT"} <= {*seen}
    assert "SBATCH_QOS" not in seen


ACTIVATE = "false\necho $UNSET\n[ -z '' ]\n"
MODULE = "module() { false; [ $2 = there ]; }"


@pytest.mark.parametrize(
    ("lines", "failed"),
    [
        ([], ""),
        (["source activate", MODULE, "module load there # the newest"], ""),
        (["false || true", "if false; then", "exit 9", "fi"], ""),
        (["set -eu", "true"], ""),
        ([MODULE, "module load nowhere", "touch further"], "module load nowhere"),
        (["source nowhere/activate", "touch further"], "source nowhere/activate"),
        (["cd nowhere", "touch further"], "cd nowhere"),
        (["x=$(false)", "touch further"], "x=$(false)"),
    ],
)
def test_the_first_line_of_setup_that_fails_ends_the_job(
    lines: list[str], failed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "activate").write_text(ACTIVATE)
    (tmp_path / "python").write_text("#!/bin/sh\necho began $@\n")
    (tmp_path / "python").chmod(0o700)
    setup = f"launcher.setup=[{','.join(quote(line) for line in lines)}]"
    (tmp_path / "job").write_text(script(setup, f"launcher.python={tmp_path}/python"))
    done = subprocess.run(["bash", "job"], capture_output=True, text=True, timeout=60)
    assert done.returncode == (3 if failed else 0), done.stderr
    assert ("began -m dtrain run /shared/run\n" in done.stdout) != bool(failed)
    assert not failed or f"dtrain: launcher.setup: '{failed}' failed, exit code 1" in done.stderr
    assert not (tmp_path / "further").exists()
