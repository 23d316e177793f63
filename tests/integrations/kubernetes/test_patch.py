"""launcher.patch: fields that Kubernetes does not have, and what the plan or other words state, are refused before
anything is created; the schemas of Kubernetes agree.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from launching import plan_of

from dtrain.build import build
from dtrain.errors import WordsError
from dtrain.integrations.kubernetes import patch as rules

WORDS = ("launcher=kubernetes", "launcher.image=train:1", "strategy=ddp", "batch=48", "devices=2", "nodes=2")
GPUS = ("cluster=h100x8", "devices=8", "batch=64")


def described(patch: Mapping[str, Any], *words: str) -> dict[str, Any]:
    """The job of a run with this patch."""
    plan = plan_of("s3://bucket/run", *WORDS, *words)
    launcher = {**plan.launcher, "patch": dict(patch)}
    (*_, job) = yaml.safe_load_all(build(launcher).describe(plan))
    return dict(job)


def refusal(patch: Mapping[str, Any], *words: str) -> str:
    with pytest.raises(WordsError) as error:
        described(patch, *words)
    return str(error.value)


def pod(**spec: Any) -> dict[str, Any]:
    return {"spec": spec}


def ours(**container: Any) -> dict[str, Any]:
    return pod(containers=[{"name": "dtrain", **container}])


UNKNOWN: tuple[tuple[dict[str, Any], str], ...] = (
    ({"template": {}}, "Kubernetes has no field template in a pod template. Allowed: metadata, spec."),
    ({"metadata": {"annotation": {"a": "b"}}}, "no field metadata.annotation in a pod template. Did you mean annotations?"),
    ({"metadata": {"annotations": {"a": 1}}}, "metadata.annotations.a is 1, and text is meant. Type '\"1\"'."),
    ({"metadata": {"labels": ["a"]}}, 'metadata.labels is ["a"], and a mapping is meant.'),
    ({"spec": ["a"]}, 'spec is ["a"], and a mapping is meant.'),
    (pod(nodeselector={"pool": "a"}), "no field spec.nodeselector in a pod template. Did you mean nodeSelector?"),
    (pod(nodeSelector={"gpu": True}), "spec.nodeSelector.gpu is true, and text is meant."),
    (pod(nodeSelector=["pool"]), "spec.nodeSelector is ["),
    (pod(toleration=[]), "no field spec.toleration in a pod template. Did you mean tolerations?"),
    (pod(tolerations={"operator": "Exists"}), "and a list is meant."),
    (pod(tolerations=[{"opertor": "Exists"}]), "no field spec.tolerations.0.opertor in a pod template. Did you mean operator?"),
    (pod(tolerations=[{"tolerationSeconds": "60"}]), 'spec.tolerations.0.tolerationSeconds is "60", and int is meant.'),
    (pod(hostNetwork="true"), 'spec.hostNetwork is "true", and bool is meant.'),
    (pod(priority=True), "spec.priority is true, and int is meant."),
    (pod(serviceAccount_name="a"), "no field spec.serviceAccount_name"),
    (pod(affinity={"nodeAffinity": {"required": {}}}), "no field spec.affinity.nodeAffinity.required"),
    (pod(topologySpreadConstraints=[{"maxskew": 1}]), "topologySpreadConstraints.0.maxskew in a pod template. Did you mean maxSkew?"),
    (pod(imagePullSecrets=["key"]), "spec.imagePullSecrets.0 is \"key\", and a mapping is meant."),
    (pod(securityContext={"privileged": True}), "no field spec.securityContext.privileged"),
    (pod(dnsConfig={"options": [{"key": "ndots"}]}), "no field spec.dnsConfig.options.0.key"),
    (pod(volumes=[{"name": "a", "hostpath": {"path": "/a"}}]), "no field spec.volumes.a.hostpath in a pod template. Did you mean hostPath?"),
    (pod(volumes=[{"name": "a", "emptyDir": {"size": "1Gi"}}]), "no field spec.volumes.a.emptyDir.size"),
    (pod(volumes=[{"name": "a", "configMap": {"defaultMode": "0644"}}]), "and int is meant."),
    (ours(securitycontext={}), "no field spec.containers.dtrain.securitycontext"),
    (ours(securityContext={"capabilities": ["IPC_LOCK"]}), "and a mapping is meant."),
    (ours(securityContext={"runAsUser": "0"}), "and int is meant."),
    (ours(resources={"limit": {"rdma/ib": 1}}), "no field spec.containers.dtrain.resources.limit in a pod template. Did you mean limits?"),
    (ours(resources={"limits": {"rdma/ib": [1]}}), "and number or text is meant."),
    (ours(env={"A": "b"}), "and a list is meant."),
    (ours(env=[{"name": "A", "value": 1}]), "spec.containers.dtrain.env.A.value is 1, and text is meant. Type '\"1\"'."),
    (ours(env=[{"name": "A", "valueFrom": {"field": "x"}}]), "no field spec.containers.dtrain.env.A.valueFrom.field"),
    (ours(volumeMounts=[{"name": "a", "path": "/a"}]), "no field spec.containers.dtrain.volumeMounts.a.path"),
    (ours(ports=[{"containerPort": "80"}]), "and int is meant."),
    (ours(lifecycle={"preStop": {"exec": {"command": "true"}}}), "and a list is meant."),
    (pod(completions=4), "spec.completions is a field of the job, not of its pods. Type nodes=<number>."),
    ({"parallelism": 4}, "parallelism is a field of the job, not of its pods. Type nodes=<number>."),
    (pod(replicas=4), "spec.replicas is a field of the job, not of its pods. Type nodes=<number>."),
    (pod(backoffLimit=4), "Type launcher.backoff=<number>."),
)  # fmt: skip
STATED: tuple[tuple[dict[str, Any], str], ...] = (
    (ours(command=["sleep"]), "spec.containers.dtrain.command is stated by other words. It is dtrain run <out>."),
    (ours(command=None), "spec.containers.dtrain.command is stated by other words"),
    (ours(args=["x"]), "spec.containers.dtrain.args is stated by other words"),
    (ours(image="other:1"), "Type launcher.image=<image>."),
    (ours(workingDir="/a"), "Type launcher.folder=<path>."),
    (ours(resources={"limits": {"nvidia.com/gpu": 4}}), "resources.limits.nvidia.com/gpu is stated by the plan. Type devices="),
    (ours(resources={"requests": {"memory": "1Gi"}}), "Type launcher.memory=<size>."),
    (ours(resources={"requests": {"rdma/ib": 1}}), "resources.requests.rdma/ib needs the same limit. Type limits: {rdma/ib: 1}."),
    (ours(resources={"requests": {"rdma/ib": 2}, "limits": {"rdma/ib": 1}}), "resources.requests.rdma/ib needs the same limit."),
    (ours(resources={"requests": {"hugepages-2Mi": "1Gi"}}), "resources.requests.hugepages-2Mi needs the same limit."),
    (ours(resources={"limits": {"rdma/ib": "one"}}), 'resources: rdma/ib is "one", and a number of devices is meant. Type rdma/ib: 1.'),
    (ours(securityContext={"capabilities": {"add": ["IPC_LOK"]}}), "there is no capability IPC_LOK. Did you mean IPC_LOCK?"),
    (ours(securityContext={"capabilities": {"drop": ["CAP_ALL"]}}), "there is no capability CAP_ALL. Did you mean ALL?"),
    (ours(env=[{"name": "MASTER_ADDR", "value": "a"}]), "env: MASTER_ADDR tells a pod its place in the run"),
    (ours(volumeMounts=[{"name": "shm", "mountPath": "/dev/shm"}]), "Type launcher.shm=<size>."),
    (ours(volumeMounts=[{"name": "lib", "mountPath": "/lib"}]), "there is no volume 'lib', which dtrain mounts."),
    (pod(volumes=[{"name": "shm", "emptyDir": {}}]), "the volume shm is that of /dev/shm. Type launcher.shm=<size>."),
    (pod(restartPolicy="OnFailure"), "spec.restartPolicy is stated by other words. It belongs to the failure policy"),
    (pod(terminationGracePeriodSeconds=5), "Type launcher.grace=<seconds>."),
    (pod(subdomain="a"), "The pods find the first one by it."),
    (pod(containers=[{"name": "train", "tty": True}]), "'train' has no image. The name of that of the run is dtrain."),
    (pod(initContainers=[{"name": "get"}]), "the container 'get' has no image"),
    (pod(containers=[{"image": "a"}]), "containers is no list of items with a name"),
    ({"metadata": {"labels": {"app.kubernetes.io/instance": "a"}}}, "by the label app.kubernetes.io/instance the pods are"),
    ({"metadata": {"annotations": {"api_key": "hf_abcdefghijklmnopqrstuvwxyz012345"}}}, "launcher.patch holds a secret"),
)  # fmt: skip


@pytest.mark.parametrize(("patch", "sentence"), UNKNOWN, ids=lambda value: json.dumps(value)[:60])
def test_a_field_that_no_pod_has_is_refused_here_and_by_the_schemas(patch: dict[str, Any], sentence: str) -> None:
    text = refusal(patch)
    assert text.startswith("launcher.patch: ") and sentence in text and len(text.splitlines()) == 1, text
    validator = pytest.importorskip("kubernetes_validate", reason="Type: pip install kubernetes-validate")
    template = {"apiVersion": "v1", "kind": "PodTemplate", "template": patch}
    with pytest.raises(validator.ValidationError):
        validator.validate(template, "1.37", strict=True)


@pytest.mark.parametrize(("patch", "sentence"), STATED, ids=lambda value: json.dumps(value)[:60])
def test_what_the_plan_or_another_word_states_is_refused(patch: dict[str, Any], sentence: str) -> None:
    text = refusal(patch, *GPUS)
    assert sentence in text and len(text.splitlines()) == 1 and "abcdefghij" not in text, text


def test_the_table_of_fields_is_that_of_the_schemas() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="Type: pip install kubernetes-validate")
    folder = Path(validator.__file__).parent / "kubernetes-json-schema" / "v1.37.0-local-strict"
    if not folder.is_dir():
        pytest.skip("its schemas are older. Type: pip install --upgrade kubernetes-validate")
    schemas = json.loads((folder / "_definitions.json").read_text())["$defs"]
    there: dict[str, set[str]] = {}
    for name, schema in schemas.items():
        if ".meta.v1." in name or ".core.v1." in name:
            there[name.rpartition(".")[2]] = {*schema.get("properties", ())}
    assert {name: {*fields} for name, fields in rules.fields().items()} == {
        name: there[name] for name in rules.fields()
    }


def examples() -> dict[str, str]:
    """The recipes of the page, by the network that each is for."""
    page = (Path(__file__).parents[3] / "docs" / "engines" / "kubernetes.md").read_text()
    blocks = page.partition("## Fast networks")[2].split("```yaml\n")[1:]
    return {block.removeprefix("# ").partition(":")[0]: block.partition("```")[0] for block in blocks}


@pytest.mark.parametrize("network", ["InfiniBand", "RoCE", "EFA", "GKE"])
def test_the_networks_of_the_page_are_recipes_with_valid_patches(network: str, tmp_path: Path) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="Type: pip install kubernetes-validate")
    (tmp_path / "net.yaml").write_text(examples()[network])
    env = yaml.safe_load(examples()[network])["launcher"]["env"]
    without = [word for word in WORDS if word != "launcher=kubernetes"]
    plans = [plan_of("s3://bucket/run", f"recipe={tmp_path}/net.yaml", *each, *GPUS) for each in (without, WORDS)]
    job, same = ([*yaml.safe_load_all(build(plan.launcher).describe(plan))][-1] for plan in plans)
    assert job == same, "the launcher may be typed too"
    validator.validate(job, "1.33", strict=True)
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert {each["name"]: each.get("value") for each in container["env"]}.items() >= {
        name: str(value) for name, value in env.items()
    }.items()
    assert (
        container["resources"]["limits"]["nvidia.com/gpu"] == "8" and len(container["resources"]["limits"]) > 1
    ) or network == "GKE"
