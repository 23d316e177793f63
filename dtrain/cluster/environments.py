"""The table of environments: by which variables each launcher or platform tells a process its place.

A row of `ranks` starts every rank; a row of `nodes` starts one process for each node, which starts the ranks there. The
first rows are the innermost: mpirun starts its daemons by srun, and torchrun may be started by anything.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from dtrain.errors import EnvironError

Kind = Literal["ranks", "nodes"]


@dataclass(frozen=True)
class Row:
    """Names of variables. `rank` and `world`: of the ranks, or of the nodes. `node`: of the node of a rank. `least`:
    the fewest nodes. `job`: what tells this start from others. `needs`: the row applies only if one of them is set,
    `without`: only if none is.

    `local_world` may be missing where `alone`: then all ranks are of one node. `parse` reads structured variables; its
    names count as variables, too.
    """

    name: str
    kind: Kind
    rank: str
    world: str
    local_rank: str = ""
    local_world: str = ""
    node: str = ""
    nodes: str = ""
    least: str = ""
    devices: str = ""
    address: str = "MASTER_ADDR"
    port: str = "MASTER_PORT"
    job: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    alone: bool = False
    parse: Callable[[Mapping[str, str]], Mapping[str, str]] = lambda environ: {}

    def applies(self, environ: Mapping[str, str]) -> bool:
        needed = not self.needs or any(environ.get(name) for name in self.needs)
        return needed and not any(environ.get(name) for name in self.without)


def _slurm(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The tasks of this node: SLURM_STEP_TASKS_PER_NODE lists those of each, such as 4(x2)."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    value = environ.get(name, "")
    if value and not re.fullmatch(r"[0-9]{1,6}(\(x[0-9]{1,6}\))?(,[0-9]{1,6}(\(x[0-9]{1,6}\))?)*", value):
        raise EnvironError(f"{name}={value[:80]} is not a list of tasks, such as 4(x2).")
    counts = sorted(set(re.findall(r"(?<!x)\b[0-9]+", value)), key=int)
    if len(counts) > 1:
        raise EnvironError(
            f"{name}={value[:80]}: the nodes have different numbers of ranks. Type srun --ntasks-per-node="
            f"{counts[0]}, or another number of tasks than SLURM_STEP_NUM_TASKS={environ.get('SLURM_STEP_NUM_TASKS')}."
        )
    return {name: counts[0]} if counts else {}


def _sagemaker(environ: Mapping[str, str]) -> Mapping[str, str]:
    hosts, here = _json("SM_HOSTS", environ), environ.get("SM_CURRENT_HOST", "")
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) and host for host in hosts):
        raise EnvironError(f"SM_HOSTS={environ['SM_HOSTS'][:80]} is not a list of hosts, such as " + '["algo-1"].')
    if here not in hosts:
        raise EnvironError(f"SM_CURRENT_HOST={here or 'not set'} is none of SM_HOSTS={environ['SM_HOSTS'][:80]}.")
    return {"SM_CURRENT_HOST": str(hosts.index(here)), "SM_HOSTS": str(len(hosts)), "SM_HOSTS[0]": hosts[0]}


FIRST, WORKERS = ("chief", "master", "workerpool0"), ("worker", "workerpool1")
"""The tasks of TF_CONFIG and CLUSTER_SPEC that train, in the order of their nodes."""


def _cluster(name: str) -> Callable[[Mapping[str, str]], Mapping[str, str]]:
    """Reads TF_CONFIG, or what has its form."""

    def parse(environ: Mapping[str, str]) -> Mapping[str, str]:
        config: Any = _json(name, environ)
        config = config if isinstance(config, dict) else {}
        cluster, task = config.get("cluster") or {}, config.get("task") or {}
        lists = isinstance(cluster, dict) and all(
            isinstance(hosts, list) and all(isinstance(host, str) for host in hosts) for hosts in cluster.values()
        )
        if not config or not lists or not isinstance(task, dict):
            raise EnvironError(f"{name}={environ[name][:80]} has no `cluster` of lists of hosts and no `task`.")
        tasks = [(kind, index) for kind in (*FIRST, *WORKERS) for index in range(len(cluster.get(kind, ())))]
        kind, index = task.get("type"), str(task.get("index", 0))
        if not tasks or not kind:
            return {}
        mine = next(
            (place for place, one in enumerate(tasks) if one == (kind, int(index) if index.isdecimal() else "")), None
        )
        if mine is None and kind in cluster and kind not in (*FIRST, *WORKERS):
            raise EnvironError(
                f"{name}: the task {str(kind)[:40]} has no part in this training. Leave its hosts out of the job."
            )
        if mine is None:
            raise EnvironError(f"{name}: its task {str(kind)[:40]} {index[:40]} is none of its cluster's.")
        host, _, port = cluster[tasks[0][0]][0].rpartition(":")
        ends = {f"{name}.host": host or port, f"{name}.port": port if host else ""}
        return {f"{name}.task": str(mine), f"{name}.cluster": str(len(tasks)), **ends}

    return parse


def _json(name: str, environ: Mapping[str, str]) -> Any:
    try:
        return json.loads(environ[name])
    except (ValueError, RecursionError) as error:
        raise EnvironError(f"{name}={environ[name][:80]} is not JSON.") from error


def _pet(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The nodes of PET_NNODES, which may be a range, and PET_NPROC_PER_NODE if it is a number."""
    name = "PET_NNODES"
    if environ.get(name) and not environ.get("PET_NODE_RANK"):
        raise EnvironError(
            f"{name}={environ[name][:40]}, but PET_NODE_RANK is not set: an elastic PyTorchJob does not number its "
            "pods. Leave elasticPolicy out, dtrain restarts by itself; or execute torchrun -m dtrain <words>."
        )
    words = ("auto", "cpu", "gpu", "xpu")
    count = {"PET_NPROC_PER_NODE": ""} if environ.get("PET_NPROC_PER_NODE") in words else {}
    least, _, most = environ.get(name, "").partition(":")
    return {name: most or least, f"{name}.least": least, **count} if least else count


POD = ("KUBERNETES_SERVICE_HOST", "CLUSTER_SPEC", "PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE")
RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

TORCH = Row(
    "torch",
    "ranks",
    rank="RANK",
    world="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_world="LOCAL_WORLD_SIZE",
    node="GROUP_RANK",
    nodes="GROUP_WORLD_SIZE",
    alone=True,
)
TABLE = (
    # https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    replace(TORCH, name="torchrun", needs=("TORCHELASTIC_RUN_ID",)),
    # https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu
    Row(
        "Azure ML",
        "ranks",
        rank="RANK",
        world="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        node="NODE_RANK",
        job=("AZUREML_RUN_ID",),
        needs=("NODE_RANK",),
        without=RANK[3:],
    ),
    # https://www.kubeflow.org/docs/components/trainer: TrainJob, PyTorchJob
    Row(
        "Kubeflow",
        "nodes",
        rank="PET_NODE_RANK",
        world="PET_NNODES",
        least="PET_NNODES.least",
        devices="PET_NPROC_PER_NODE",
        address="PET_MASTER_ADDR",
        port="PET_MASTER_PORT",
        parse=_pet,
    ),
    # of versions of the training operator that set no PET_*, and of Vertex AI's containers for PyTorch
    Row(
        "PyTorchJob",
        "nodes",
        rank="RANK",
        world="WORLD_SIZE",
        devices="PET_NPROC_PER_NODE",
        needs=POD,
        without=RANK[2:],
        parse=_pet,
    ),
    TORCH,
    # https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html
    Row(
        "Open MPI",
        "ranks",
        rank="OMPI_COMM_WORLD_RANK",
        world="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world="OMPI_COMM_WORLD_LOCAL_SIZE",
        job=("PMIX_NAMESPACE", "LSB_JOBID"),
    ),
    # https://www.ibm.com/docs/en/spectrum-lsf: jsrun
    Row(
        "jsrun",
        "ranks",
        rank="JSM_NAMESPACE_RANK",
        world="JSM_NAMESPACE_SIZE",
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        local_world="JSM_NAMESPACE_LOCAL_SIZE",
        job=("LSB_JOBID", "PMIX_NAMESPACE"),
    ),
    # Hydra, the process manager of MPICH and of Intel MPI
    Row(
        "MPICH",
        "ranks",
        rank="PMI_RANK",
        world="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_world="MPI_LOCALNRANKS",
        job=("SLURM_JOB_ID", "LSB_JOBID"),
    ),
    Row(
        "PMIx",
        "ranks",
        rank="PMIX_RANK",
        world="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world="LOCAL_WORLD_SIZE",
        job=("PMIX_NAMESPACE",),
        alone=True,
        needs=("PMIX_RANK",),
        without=("RANK", "OMPI_COMM_WORLD_RANK"),
    ),
    # https://slurm.schedmd.com/srun.html: a batch script has SLURM_PROCID and SLURM_NTASKS too, and is no step
    Row(
        "srun",
        "ranks",
        rank="SLURM_PROCID",
        world="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        local_world="SLURM_STEP_TASKS_PER_NODE",
        node="SLURM_NODEID",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        needs=("SLURM_STEP_ID",),
        parse=_slurm,
    ),
    # https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md
    Row(
        "SageMaker",
        "nodes",
        rank="SM_CURRENT_HOST",
        world="SM_HOSTS",
        address="SM_HOSTS[0]",
        job=("TRAINING_JOB_NAME",),
        needs=("SM_HOSTS",),
        parse=_sagemaker,
    ),
    # https://docs.cloud.google.com/vertex-ai/docs/training/distributed-training
    *(
        Row(
            name,
            "nodes",
            rank=f"{name}.task",
            world=f"{name}.cluster",
            address=f"{name}.host",
            port=f"{name}.port",
            job=("CLOUD_ML_JOB_ID",),
            needs=(name,),
            parse=_cluster(name),
        )
        for name in ("TF_CONFIG", "CLUSTER_SPEC")
    ),
    # https://kubernetes.io/docs/concepts/workloads/controllers/job: how many pods there are is in the word `nodes`
    Row("Indexed Job", "nodes", rank="JOB_COMPLETION_INDEX", world="", needs=("JOB_COMPLETION_INDEX",)),
)
