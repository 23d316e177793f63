"""Words of launcher=kubernetes that no pod could have, or with which it could not work, are refused before anything is
created.
"""

import re
from pathlib import Path

import commands
import pytest
import yaml
from launching import plan_of

from dtrain.build import build
from dtrain.errors import WordsError
from dtrain.integrations.kubernetes.pods import variable, volume
from dtrain.launcher import detached

WORDS = ("launcher=kubernetes", "launcher.image=train:1", "strategy=ddp", "batch=48", "devices=2", "nodes=2")
URL = "s3://bucket/run"


def refusal(out: str, *words: str) -> str:
    plan = plan_of(out, *WORDS, *words)
    with pytest.raises(WordsError) as error:
        build(plan.launcher).describe(plan)
    return str(error.value)


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("launcher.image='train 1'", "launcher.image='train 1' is no name of an image"),
        ("launcher.image=-rm", "launcher.image='-rm' is no name of an image"),
        ("launcher.namespace=Team_A", "launcher.namespace='Team_A' is no name in Kubernetes"),
        ("launcher.namespace='a\nb'", "is no name in Kubernetes"),
        ("launcher.context=''", "launcher.context='' is no context of a kubeconfig"),
        ("launcher.runtime=Torch", "launcher.runtime='Torch' is no name in Kubernetes"),
        ("launcher.memory=64GB", "launcher.memory='64GB' is no quantity, such as 64Gi"),
        ("launcher.memory=0", "launcher.memory='0' is no quantity"),
        ("launcher.shm=-1Gi", "launcher.shm='-1Gi' is no quantity"),
        ("launcher.gpu=gpu", "launcher.gpu='gpu' is no resource of a device plugin, such as nvidia.com/gpu"),
        ("launcher.folder=app", "launcher.folder='app' is no absolute path in the image"),
        ("launcher.volumes=[data]", "launcher.volumes: 'data' is no <claim>:/path"),
        ("launcher.volumes=['data:shared']", "launcher.volumes: 'data:shared' is no <claim>:/path"),
        ("launcher.volumes=['Data:/shared']", "launcher.volumes: 'Data:/shared' is no <claim>:/path"),
        ("launcher.volumes=['data:/a/../b']", "is no <claim>:/path"),
        ("launcher.volumes=['data:/a','more:/a/']", "launcher.volumes: nothing can be mounted at /a, or twice"),
        ("launcher.volumes=['data:/a','more:/a/.']", "launcher.volumes: nothing can be mounted at /a, or twice"),
        ("launcher.volumes=['data:/a','more://a']", "launcher.volumes: nothing can be mounted at /a, or twice"),
        ("launcher.volumes=['data:/dev/./shm']", "launcher.volumes: /dev/shm is the pod's memory. Type launcher.shm="),
        ("launcher.namespace=a.b", "launcher.namespace='a.b' is no name in Kubernetes"),
        ("launcher.volumes=['data:/']", "launcher.volumes: nothing can be mounted at /, or twice"),
        ("launcher.env_from=[hf]", "launcher.env_from: 'hf' is no <secret>/<key>:<variable>"),
        ("launcher.env_from=['hf/token:HF-TOKEN']", "is no <secret>/<key>:<variable>"),
        ("launcher.env_from=['hf/token:A','s3/key:A']", "launcher.env_from: A is there twice"),
        ("launcher.env_from=['hf/token:DTRAIN_SECRET']", "DTRAIN_SECRET tells a pod its place in the run"),
        ("launcher.env={A-B: c}", "launcher.env: 'A-B' is no name of a variable"),
        ("launcher.env={MASTER_ADDR: a}", "launcher.env: MASTER_ADDR tells a pod its place in the run"),
        ("launcher.env={PET_NNODES: 2}", "launcher.env: PET_NNODES tells a pod its place in the run"),
        ("launcher.env={A: true}", "launcher.env: A is true, and variables are text"),
        ("launcher.env={A: [b]}", "variables are text"),
        ("launcher.env={HF_TOKEN: hf_abcdefghijklmnopqrstuvwxyz012345}", "launcher.env: HF_TOKEN is a secret, and would stand in a manifest"),
        ("launcher.labels={app.kubernetes.io/instance: x}", "launcher.labels: by app.kubernetes.io/instance the pods are found"),
        ("launcher.queue=Team_A", "launcher.queue='Team_A' is no name of a queue: small letters"),
        ("launcher.image=registry.example.org/Team/Train:1", "small letters in its path. Type launcher.image=registry.example.org/team/train:1."),
        ("launcher.image=Team/train", "Type launcher.image=team/train."),
        ("launcher.queue='a b'", "launcher.queue='a b' is no name of a queue"),
        ("launcher.labels={queue: 'a b'}", "launcher.labels: 'queue: a b' is no label of Kubernetes"),
    ],
)  # fmt: skip
def test_what_no_pod_can_have(word: str, sentence: str) -> None:
    text = refusal(URL, word)
    assert sentence in text and "abcdefghij" not in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("launcher.kind=trainjob", "launcher.folder=/app"), "launcher.folder: a TrainJob has no field for it"),
        (("launcher.kind=trainjob", "launcher.backoff=1"), "launcher.backoff: a TrainJob has the failure policy of"),
        (("launcher.kind=trainjob", "nodes=1:2"), "nodes=1:2: launcher.kind=trainjob starts a fixed number of pods"),
        (("launcher.kind=pytorchjob", "nodes=1:2"), "Type launcher.kind=job, or nodes=2"),
    ],
)
def test_what_a_kind_of_job_lacks(words: tuple[str, ...], sentence: str) -> None:
    assert sentence in refusal(URL, *words)


@pytest.mark.parametrize(
    ("out", "volumes", "sentence"),
    [
        ("memory://run", "[]", "out=memory://run is the memory of one process"),
        ("/shared/run", "[]", "out=/shared/run is not on any of launcher.volumes"),
        ("runs/a", "['data:/shared']", "out=runs/a is not on any of launcher.volumes"),
        ("/shared2/run", "['data:/shared']", "out=/shared2/run is not on any of launcher.volumes"),
        ("/shared/../etc/run", "['data:/shared']", "out=/shared/../etc/run is not on any of launcher.volumes"),
        ("/shared/run", "['data:/shared:ro']", "out=/shared/run is on a volume that is only read"),
    ],
)
def test_out_is_where_pods_and_this_host_see_it(out: str, volumes: str, sentence: str) -> None:
    assert sentence in refusal(out, f"launcher.volumes={volumes}", "nodes=1", "devices=1")


def test_out_is_the_same_place_however_it_is_spelt() -> None:
    for out in ("/shared/./run", "file:///shared/run", "/shared//a/../run"):
        plan = plan_of(out, *WORDS, "launcher.volumes=['data:/shared/.']")
        assert "mountPath: /shared\n" in build(plan.launcher).describe(plan)
    assert detached.name_of("file:///shared/run") == detached.name_of("/shared/run")
    assert detached.log_file("file:///shared/run", "a") == Path("/shared/run/logs/a.log")


def test_shared_memory_is_a_part_of_the_memory() -> None:
    text = refusal(URL, "launcher.memory=1Gi", "launcher.shm=1025Mi")
    assert "launcher.shm=1025Mi is more than launcher.memory=1Gi" in text
    plan = plan_of(URL, *WORDS, "launcher.memory=1Gi", "launcher.shm=1024Mi")
    assert "sizeLimit: 1024Mi" in build(plan.launcher).describe(plan)


def test_a_pod_leaves_some_of_the_cores_to_its_node_and_gets_no_token() -> None:
    text = build((plan := plan_of(URL, *WORDS)).launcher).describe(plan)
    assert plan.threads == 1 and "cpu: 1800m" in text and "automountServiceAccountToken: false" in text


def requested(*words: str) -> dict[str, str]:
    (*_, job) = yaml.safe_load_all(build((plan := plan_of(URL, *WORDS, *words)).launcher).describe(plan))
    requests: dict[str, str] = job["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]
    return requests


def test_a_pod_asks_for_its_share_of_a_nodes_cores_and_for_the_memory_that_is_predicted() -> None:
    whole, quarter = (requested("cluster=h100x8", f"devices={devices}", "batch=64") for devices in (8, 2))
    assert whole["cpu"] == "100800m" and quarter["cpu"] == "25200m"
    assert requested("launcher.memory=3Gi")["memory"] == "3Gi"
    small, large = (int(requested(f"model.width={width}")["memory"].removesuffix("Mi")) for width in (128, 8192))
    assert 10_000 < small < large, "four GiB of a rank are those of Python and torch"
    assert "memory" not in requested("model.freeze=['*']"), "nothing is built to know it"


def test_each_job_has_a_port_of_its_own_and_the_queue_of_a_word() -> None:
    def described(out: str, *words: str) -> str:
        plan = plan_of(out, *WORDS, *words)
        return build(plan.launcher).describe(plan)

    ports = {re.search(r"MASTER_PORT\n *value: '(\d+)'", described(f"s3://bucket/{run}"))[1] for run in range(20)}  # type: ignore[index]
    assert len(ports) > 15 and all(20000 <= int(port) < 30000 for port in ports)
    assert "kueue.x-k8s.io/queue-name: team" in described(URL, "launcher.queue=team")
    both = "launcher.labels={kueue.x-k8s.io/queue-name: a}"
    assert "both name a queue. Leave one out." in refusal(URL, "launcher.queue=team", both)


def test_all_problems_are_named_at_once() -> None:
    text = refusal("/nowhere/run", "launcher.memory=much", "launcher.env={1: a}", "launcher.gpu=x")
    assert len(text.splitlines()) == 4


def test_images_of_all_kinds_are_taken() -> None:
    digest = f"sha256:{'ab' * 32}"
    for image in (
        "train",
        "localhost:5000/a/b__c-d.e:V1_2",
        "Reg.Example.org:443/x/y",
        f"a/b:1@{digest}",
        f"gcr.io/p/i@{digest}",
    ):
        assert f"image: {image}" in build((plan := plan_of(URL, *WORDS, f"launcher.image={image}")).launcher).describe(
            plan
        )


def test_less_memory_than_is_predicted_is_noted() -> None:
    for memory, count in (("1Gi", 1), ("500Gi", 0), ("null", 0)):
        plan = plan_of(URL, *WORDS, f"launcher.memory={memory}")
        notes = [*build(plan.launcher).notes(plan)]
        assert len(notes) == count and all("GiB would be requested by themselves" in note for note in notes)


def test_parts_of_words() -> None:
    assert volume("data.v1:/data/:ro") == ("data.v1", "/data", True)
    assert variable("s3.main/access.key:KEY") == ("s3.main", "access.key", "KEY")


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("launcher.kind=pod",), 2, "job, jobset, trainjob"),
        (("launcher.image=",), 2, "launcher.image"),
        (("launcher.backoff=-1",), 2, "launcher.backoff=-1"),
        (("launcher.backoff=3000000000",), 2, "launcher.backoff=3000000000"),
        (("launcher.env=[A]",), 2, "launcher.env"),
        (("launcher.env=[NCCL_DEBUG=INFO,A=1]",), 2, "Type 'launcher.env={NCCL_DEBUG:INFO,A:1}'."),
    ],
)
def test_the_command_refuses_other_values(words: tuple[str, ...], code: int, sentence: str, tmp_path: Path) -> None:
    made = ("model=mlp", "data=synthetic", "objective=regression", f"out={URL}", "steps=6")
    done = commands.run(*made, *WORDS, *words, cwd=tmp_path)
    assert done.returncode == code and sentence in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not [*tmp_path.iterdir()]


def test_an_image_must_be_named(tmp_path: Path) -> None:
    words = [word for word in WORDS if "image" not in word]
    made = ("model=mlp", "data=synthetic", "objective=regression", f"out={URL}", "steps=6")
    done = commands.run(*made, *words, cwd=tmp_path)
    assert done.returncode == 2 and "launcher.image" in done.stderr, done.stderr
