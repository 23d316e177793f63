"""The objects of Kubernetes for every kind of job: valid by its schemas and by the models of Kubeflow, which give back
all they were given.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml
from launching import plan_of

from dtrain.build import build
from dtrain.integrations.kubernetes import manifest
from dtrain.planned import Plan

WORDS = ("launcher=kubernetes", "launcher.image=registry.example.org/train:1", "strategy=ddp", "batch=48", "devices=2")
SHAPES: Mapping[str, tuple[str, ...]] = {
    "one node": ("nodes=1",),
    "many nodes": ("nodes=4",),
    "GPUs": ("nodes=2", "devices=8", "cluster=h100x8"),
    "another GPU": ("nodes=2", "devices=8", "cluster=mi300x8", "launcher.gpu=amd.com/gpu"),
    "volumes": ("nodes=2", "launcher.volumes=[data:/data, models.v1:/models:ro]", "launcher.shm=8Gi"),
    "secrets": ("nodes=2", "launcher.env_from=[hf/token:HF_TOKEN, s3/access.key:AWS_SECRET_ACCESS_KEY]"),
    "variables": ("nodes=2", "launcher.env={NCCL_DEBUG: INFO, OMP_NUM_THREADS: 4, ODD: '$(HOME) yes'}"),
    "queue": ("nodes=2", "launcher.labels={kueue.x-k8s.io/queue-name: team}", "launcher.memory=64Gi"),
    "patch": (
        "nodes=2",
        "launcher.patch={spec: {nodeSelector: {pool: a100}, tolerations: [{operator: Exists}], serviceAccountName: train}}",
    ),
}
KINDS = tuple(manifest.KINDS)
OUT = "s3://bucket/run"


def plan(kind: str, *words: str) -> Plan:
    return plan_of(OUT, *WORDS, f"launcher.kind={kind}", *words)


def documents(plan: Plan) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(build(plan.launcher).describe(plan)))


def check(document: dict[str, Any]) -> None:
    """Raises an error for what the schemas or the models do not know."""
    validator = pytest.importorskip("kubernetes_validate", reason="Type: pip install kubernetes-validate")
    kind = document["kind"]
    if kind in ("Job", "Service", "Secret"):
        validator.validate(document, "1.33", strict=True)
        return
    if kind == "PyTorchJob":
        returned = _pytorchjob(document)
    else:
        models = pytest.importorskip("kubeflow_trainer_api.models", reason="Type: pip install kubeflow-trainer-api")
        name = {"JobSet": "JobsetV1alpha2JobSet", "TrainJob": "TrainerV1alpha1TrainJob"}[kind]
        returned = getattr(models, name).from_dict(document).to_dict()
    if returned != document:
        raise ValueError(f"of {json.dumps(document)} only {json.dumps(returned)} is known")
    for template in _templates(document):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "template": template}
        validator.validate(pod, "1.33", strict=True)


def _pytorchjob(document: dict[str, Any]) -> Any:
    models = pytest.importorskip("kubeflow.training.models", reason="Type: pip install kubeflow-training")
    client = pytest.importorskip("kubernetes.client", reason="Type: pip install kubernetes")
    for name in dir(models):
        if name.startswith("Kubeflow"):
            setattr(client.models, name, getattr(models, name))
    client = client.ApiClient()
    answer = type("Answer", (), {"data": json.dumps(document)})
    return client.sanitize_for_serialization(client.deserialize(answer, "KubeflowOrgV1PyTorchJob"))


def _templates(tree: Any) -> Iterator[dict[str, Any]]:
    """The pod templates in an object that are whole: the patch of a TrainJob has no image."""
    if isinstance(tree, dict):
        containers = tree.get("spec", {}).get("containers") if isinstance(tree.get("spec"), dict) else None
        if containers and "image" in containers[0]:
            yield tree
        for value in tree.values():
            yield from _templates(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _templates(value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_manifest_is_valid_and_the_models_give_back_all_of_it(kind: str, shape: str) -> None:
    made = documents(plan(kind, *SHAPES[shape]))
    for document in made:
        check(document)
    assert made[-1]["kind"] == manifest.KINDS[kind].name


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_a_range_of_nodes_asks_for_as_many_pods_as_it_allows(kind: str) -> None:
    (*_, job) = documents(plan(kind, "nodes=1:4"))
    check(job)
    if kind == "job":
        assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (4, 4)


POD, CONTAINER = "spec.template.spec", "spec.template.spec.containers.0"
IN_SET = "spec.replicatedJobs.0.template.spec"
IN_RUNTIME = "spec.runtimePatches.0.trainingRuntimeSpec.template.spec.replicatedJobs.0.template.spec.template.spec"
WRONG: tuple[tuple[str, str, Any], ...] = (
    ("job", "spec.completion", 2),
    ("job", "spec.completions", "two"),
    ("job", "spec.backoffLimit", "6"),
    ("job", "spec.podFailurePolicy.rules.0.onPodConditions.0.status", None),
    ("job", "spec.podFailurePolicy.rules.1.onExitCodes.operator", None),
    ("job", "spec.podFailurePolicy.rules.2.action", None),
    ("job", f"{POD}.subDomain", "run"),
    ("job", f"{POD}.terminationGracePeriodSeconds", "120"),
    ("job", f"{POD}.volumes.0.emptyDir.medum", "Memory"),
    ("job", f"{CONTAINER}.command", "python -m dtrain"),
    ("job", f"{CONTAINER}.env.0.value", 29500),
    ("job", f"{CONTAINER}.env.2.valueFrom.secretKeyRef.secret", "hf"),
    ("job", f"{CONTAINER}.volumeMounts.0.mountpath", "/dev/shm"),
    ("job", f"{CONTAINER}.name", None),
    ("jobset", "spec.network.subDomain", "run"),
    ("jobset", "spec.replicatedJobs.0.replicas", "1"),
    ("jobset", f"{IN_SET}.completionmode", "Indexed"),
    ("jobset", f"{IN_SET}.template.spec.containers.0.resources.request", {"cpu": "1"}),
    ("trainjob", "spec.trainer.nodes", 2),
    ("trainjob", "spec.trainer.numNodes", "2"),
    ("trainjob", "spec.runtimeRef.name", None),
    ("trainjob", f"{IN_RUNTIME}.hostNetwork", True),
    ("trainjob", f"{IN_RUNTIME}.containers.0.resources", {}),
    ("pytorchjob", "spec.nProcPerNode", "2"),
    ("pytorchjob", "spec.runPolicy.backOffLimit", 6),
    ("pytorchjob", "spec.pytorchReplicaSpecs.Master.template.spec.containers.0.images", "x"),
)


@pytest.mark.parametrize(("kind", "path", "value"), WRONG, ids=lambda value: str(value)[-40:])
def test_a_wrong_field_is_noticed(kind: str, path: str, value: Any) -> None:
    (*_, job) = documents(plan(kind, "nodes=2", "launcher.volumes=[data:/data]"))
    check(job)
    wrong = copy.deepcopy(job)
    *way, last = (int(name) if name.isdecimal() else name for name in path.split("."))
    place: Any = wrong
    for name in way:
        place = place[name]
    if value is None:
        del place[last]
    else:
        place[last] = value
    with pytest.raises(Exception, match=r".") as refused:
        check(wrong)
    assert not isinstance(refused.value, LookupError), refused.value


def test_a_disrupted_or_preempted_pod_comes_back_and_one_that_refuses_the_plan_ends_the_job() -> None:
    (*_, job) = documents(plan("job", "nodes=2"))
    disrupted, preempted, refused = job["spec"]["podFailurePolicy"]["rules"]
    assert (disrupted["action"], disrupted["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert (preempted["action"], preempted["onExitCodes"]["values"]) == ("Ignore", [75])
    assert (refused["action"], refused["onExitCodes"]["values"]) == ("FailJob", [2, 3, 4])


def test_kubernetes_expands_nothing_in_commands_and_variables() -> None:
    made = plan_of("s3://bucket/$(HOME)", *WORDS, "nodes=1", "launcher.env={ODD: '$(HOME) $$'}")
    container = documents(made)[-1]["spec"]["template"]["spec"]["containers"][0]
    assert container["command"][-1] == "s3://bucket/$$(HOME)"
    assert container["env"][0] == {"name": "ODD", "value": "$$(HOME) $$$$"}


def test_the_secret_is_in_no_manifest_and_belongs_to_the_job() -> None:
    check(manifest.secret("run", {"DTRAIN_SECRET": "x", "DTRAIN_HANDED": "y"}))
    owner = manifest.owned_by("jobset", "run", "1-2")["metadata"]["ownerReferences"][0]
    assert owner == {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": "run", "uid": "1-2"}


def test_a_patch_is_merged_by_names_and_null_removes() -> None:
    base = {"a": 1, "items": [{"name": "x", "v": 1}, {"name": "y"}], "mounts": [{"name": "x", "mountPath": "/a"}]}
    patch = {
        "a": None, "items": [{"name": "x", "w": 2}, {"name": "z"}],
        "mounts": [{"name": "x", "mountPath": "/b"}, {"name": "y", "mountPath": "/a"}], "list": [1],
    }  # fmt: skip
    assert manifest.merged(base, patch) == {
        "items": [{"name": "x", "v": 1, "w": 2}, {"name": "y"}, {"name": "z"}],
        "mounts": [{"name": "y", "mountPath": "/a"}, {"name": "x", "mountPath": "/b"}],
        "list": [1],
    }


def test_a_patch_reaches_the_pods_of_every_kind() -> None:
    for kind in KINDS:
        name = manifest.KINDS[kind].container
        patch = f"launcher.patch={{spec: {{containers: [{{name: {name}, securityContext: {{runAsUser: 7}}}}]}}}}"
        (*_, job) = documents(plan(kind, "nodes=2", patch))
        check(job)
        assert "runAsUser" in json.dumps(job)
