"""Accelerate's YAML, as `accelerate config` writes it: https://huggingface.co/docs/accelerate/package_reference/cli and
the fields of 1.15.

    dtrain import fsdp.yaml to=mine.yaml

The file describes the launch and the sharding; the training itself is in the user's script.
"""

import re
from collections.abc import Mapping
from typing import Any

from dtrain.integrations.importers import nested
from dtrain.integrations.importers.deepspeed_zero import stage
from dtrain.integrations.importers.ledger import Ledger, Rule, count, names, switch, text
from dtrain.integrations.importers.rules import (
    ODD,
    OFF,
    chosen,
    lacking,
    refused,
    says,
    switched,
    table,
    to,
    turns_on,
    unneeded,
)
from dtrain.integrations.importers.terms import (
    CHECKPOINTS,
    DISK,
    GPUS,
    NO_ACTIVATION_OFFLOAD,
    NO_TPU,
    OFFLOAD,
    REMAT,
    degree,
)

TITLE = "Accelerate"
MARKS = names(
    "compute_environment distributed_type num_processes num_machines machine_rank main_process_ip main_process_port "
    "main_training_function rdzv_backend same_network use_cpu downcast_bf16 dynamo_config megatron_lm_config "
    "deepspeed_config parallelism_config mixed_precision tpu_use_cluster"
)
SILENT = ("model", "data", "objective", "optim", "schedule", "steps", "batch", "clip")
TYPES: Mapping[str, Mapping[str, str]] = {
    "no": {"strategy": "single"},
    "multi_gpu": {"strategy": "ddp"},
    "multi_cpu": {"strategy": "ddp", "backend": "gloo"},
    "megatron_lm": {"strategy": "ddp"},
}
SECTIONS = {
    "fsdp_config": ("fsdp", "an FSDP option"),
    "deepspeed_config": ("deepspeed", "a DeepSpeed option"),
    "megatron_lm_config": ("megatron_lm", "a Megatron-LM option"),
}
"""section -> the distributed_type that uses it, and what its keys are."""
SHARDING: dict[Any, dict[str, Any]] = {
    "full_shard": {"strategy": "fsdp", "strategy.reshard": "forward"},
    "shard_grad_op": {"strategy": "fsdp", "strategy.reshard": "never"},
    "no_shard": {"strategy": "ddp"},
    "hybrid_shard": {"strategy": "hsdp", "strategy.reshard": "forward"},
    "hybrid_shard_zero2": {"strategy": "hsdp", "strategy.reshard": "never"},
}
NAMES = dict(zip("12345", SHARDING, strict=True)) | {"true": "full_shard", "false": "shard_grad_op"}
"""Value of torch's ShardingStrategy enum, which older files contain, or of reshard_after_forward -> key of SHARDING."""


def translate(ledger: Ledger) -> None:
    if ledger.get("compute_environment", "LOCAL_MACHINE") not in ("LOCAL_MACHINE", "local_machine"):
        sagemaker = refused("dtrain does not start SageMaker jobs. Start dtrain inside the container instead.")
        ledger.settle(sagemaker, "**")
        return
    _world(ledger)
    _kind(ledger)
    kind = str(ledger.get("distributed_type", "")).lower()
    for section, (user, title) in SECTIONS.items():
        if kind != user:
            other = unneeded(f"{title}, but distributed_type is {ledger.get('distributed_type')}")
            ledger.settle(other, f"{section}.**")
    for name in ("sharding_strategy", "reshard_after_forward"):
        ledger.settle(sharding, f"fsdp_config.fsdp_{name}", f"fsdp_config.{name}")
    if kind == "deepspeed":
        _deepspeed(ledger)
    _axes(ledger)
    _dynamo(ledger)
    ledger.apply(RULES)


def _world(ledger: Ledger) -> None:
    """Accelerate's num_processes counts all machines; dtrain's devices counts one node."""
    sizes: dict[str, int] = {}
    for key, word, hint in (("num_machines", "nodes", "number"), ("num_processes", "devices", "processes per node")):
        value = ledger.leaves.get(key, -1)
        if value in (None, -1):
            ledger.settle(unneeded("all available: devices=auto"), key)
            continue
        try:
            sizes[key] = count(value)
        except ValueError as error:
            ledger.refuse(key, f"Accelerate takes {error} here, not {value!r}. Type nodes=1 devices=2.")
            ledger.ask(word, hint)
    machines, processes = sizes.get("num_machines", 1), sizes.get("num_processes", 0)
    if processes % machines:
        ledger.ask("devices", "processes per node")
        why = f"{processes} processes cannot be split evenly over {machines} machines. Type devices="
        ledger.settle(refused(f"{why}<processes per node>."), "num_processes")
    note = f"{processes} on {machines} machines" if machines > 1 else ""
    ledger.settle(says({"nodes": machines}), "num_machines")
    ledger.settle(says({"devices": processes // machines}, note), "num_processes")
    _meeting(ledger, machines)


def _seen(ledger: Ledger, key: str, value: Any) -> None:
    """Refuse gpu_ids, a comma-separated list of numbers, and suggest CUDA_VISIBLE_DEVICES."""
    numbers = str(value) if re.fullmatch(r"[0-9][0-9, ]*", str(value)) else "<numbers>"
    numbers = numbers.replace(" ", "")
    ledger.refuse(key, f"the environment selects the GPUs. Type CUDA_VISIBLE_DEVICES={numbers} dtrain ...")


def _meeting(ledger: Ledger, machines: int) -> None:
    """Put the rendezvous address on the first machine's command line: it is valid at this site only."""
    if machines == 1:
        ledger.settle(unneeded("one machine"), "main_process_ip", "main_process_port", "machine_rank")
        return
    ledger.settle(unneeded("machines are numbered in order of arrival"), "machine_rank")
    host, port = ledger.get("main_process_ip"), ledger.get("main_process_port")
    for key in ledger.under("main_process_ip", "main_process_port"):
        if ledger.leaves[key] is None:
            ledger.skip(key, "empty")
        elif host and port:
            words = {"launcher": "local", "launcher.address": f"{host}:{port}", "launcher.here": 1}
            ledger.carry(
                key,
                words,
                f"on the first; on the others: python -m dtrain.launcher.local.agent {host}:{port}, with the same "
                "DTRAIN_SECRET in the environment of all",
                command=True,
            )
        else:
            ledger.refuse(
                key,
                "a rendezvous needs a host and a port. Type launcher=local launcher.here=1 "
                "launcher.address=<host>:<port>.",
            )


def _kind(ledger: Ledger) -> None:
    """Choose the strategy; fsdp_config and deepspeed_config refine it."""
    key = "distributed_type"
    if key not in ledger.leaves:
        return
    name = str(ledger.leaves[key]).lower()
    ranks = (ledger.words.get("nodes") or 1) * (ledger.words.get("devices") or 1)
    if name == "deepspeed":
        ledger.skip(key, "covered by deepspeed_config")
    elif name == "fsdp":
        ledger.skip(key, "covered by fsdp_config")
        ledger.imply(SHARDING["full_shard"], "default of fsdp")
    elif name == "megatron_lm" and _is_on(ledger, "megatron_lm_config.megatron_lm_use_distributed_optimizer"):
        ledger.skip(key, "covered by megatron_lm_use_distributed_optimizer")
        ledger.imply({"strategy": "zero1"}, "default of megatron_lm")
    elif name == "no" and ranks > 1:
        ledger.refuse(key, f"this means one process, but the file has {ranks}. Type strategy=ddp, or devices=1.")
        ledger.withdraw("devices", f"{name} starts one of them. Type devices=<number>.")
        ledger.ask("devices", f"1 with strategy=single, or {ranks}")
        ledger.ask("strategy", "single or ddp")
    elif name in TYPES:
        ledger.carry(key, TYPES[name])
    else:
        ledger.refuse(
            key,
            f"{ledger.leaves[key]} is not supported: dtrain runs on GPUs with nccl and on CPUs with gloo. Type "
            f"strategy=ddp.",
        )


def _is_on(ledger: Ledger, key: str) -> bool:
    try:
        return switch(ledger.get(key, False))
    except ValueError:
        return False


def sharding(ledger: Ledger, key: str, value: Any) -> None:
    """Translate the sharding: FSDP1 names a sharding strategy, FSDP2 has a flag reshard_after_forward."""
    plain = str(value).lower()
    reshard = NAMES.get(plain, plain)
    if reshard in SHARDING:
        ledger.carry(key, SHARDING[reshard])
    else:
        ledger.refuse(key, f"unknown sharding {value}. Type strategy=fsdp, or strategy=hsdp with nodes and devices.")


def _deepspeed(ledger: Ledger) -> None:
    """Translate DeepSpeed's fields, or the DeepSpeed file that is named instead of them."""
    section = "deepspeed_config"
    file, key = ledger.get(f"{section}.deepspeed_config_file"), f"{section}.zero_stage"
    if file:
        nested(ledger, f"{section}.deepspeed_config_file", "deepspeed")
    if ledger.get(key) is not None:
        ledger.settle(stage, key)
    if not file:
        ledger.imply({"strategy": "zero2"}, "default of Accelerate's DeepSpeed")
        ledger.imply({"clip": 1.0}, "Accelerate fills it in")
    offload = says({"strategy.offload": "cpu"}, "offloads the weights and the optimizer state")
    if ledger.get(key) == 0:
        offload = refused("stage 0 shards nothing. Type strategy=zero2 strategy.offload=cpu.")
    devices = [f"{section}.offload_{part}_device" for part in ("optimizer", "param")]
    ledger.settle(chosen({"none": OFF, "cpu": offload}, DISK), *devices)


def _axes(ledger: Ledger) -> None:
    """Translate parallelism_config, the mesh degrees. Ulysses (sp) and ring attention (cp) are both mesh.cp here."""
    for name, (axis, further) in DEGREES.items():
        keys = [f"parallelism_config.{name}", f"parallelism_config.parallelism_config_{name}"]
        ledger.settle(degree(axis, further), *keys)
    replicas, shards = ledger.words.get("mesh.dp_replicate", 1), ledger.words.get("mesh.dp_shard", 1)
    if (replicas > 1 or shards > 1) and ledger.words.get("strategy") in ("ddp", "fsdp", None):
        ledger.words["strategy"] = {(True, True): "hsdp", (False, True): "fsdp"}.get((replicas > 1, shards > 1), "ddp")


def _dynamo(ledger: Ledger) -> None:
    backends = {"no": says({"compile": "none"}), "inductor": says({"compile": "blocks"})}
    other = refused("inductor compiles the blocks. Type compile=blocks.")
    ledger.settle(chosen(backends, other), "dynamo_backend", "dynamo_config.dynamo_backend")
    mode = to("compile.mode", text) if ledger.words.get("compile") == "blocks" else unneeded("compilation is off")
    ledger.settle(mode, "dynamo_config.dynamo_mode")


def _sequence(ledger: Ledger, key: str, value: Any) -> None:
    if ledger.get("megatron_lm_config.megatron_lm_tp_degree", 1) == 1:
        ledger.skip(key, "tensor parallelism is off")
    else:
        turns_on({"tensor.sequence": "split"})(ledger, key, value)


DEGREES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "dp_replicate_size": ("dp_replicate", {}),
    "dp_shard_size": ("dp_shard", {}),
    "tp_size": ("tp", {}),
    "cp_size": ("cp", {"context.attention": "ring"}),
    "sp_size": ("cp", {"context.attention": "ulysses"}),
}
"""Field -> mesh axis, and further words."""
FSDP = table(
    {
        "version": unneeded("dtrain uses FSDP2"),
        "offload_params": OFFLOAD,
        "activation_checkpointing": REMAT,
        "activation_checkpointing_offload": NO_ACTIVATION_OFFLOAD,
        "auto_wrap_policy transformer_layer_cls_to_wrap min_num_params": unneeded(
            "dtrain shards every element of the model's ModuleLists and Sequentials"
        ),
        "backward_prefetch forward_prefetch limit_all_gathers": unneeded(
            "the next block is prefetched while one computes"
        ),
        "state_dict_type": CHECKPOINTS,
        "use_orig_params": unneeded("FSDP2 always does"),
        "sync_module_states cpu_ram_efficient_loading param_init_fn": unneeded(
            "each shard is initialised in place, with the same values on every mesh"
        ),
        "ignored_modules": lacking("every module is sharded. Leave it out."),
    }
)
MEGATRON: Mapping[str, Rule] = {
    "tp_degree": to("mesh.tp", count),
    "pp_degree": to("mesh.pp", count),
    "context_parallel_size": to("mesh.cp", count),
    "expert_model_parallel_size": to("mesh.ep", count),
    "num_micro_batches": to("accumulate", count, "microbatches per step"),
    "sequence_parallelism": _sequence,
    "recompute_activations": turns_on({"remat": "selective"}),
    "recompute_granularity": chosen(
        {"full": says({"remat": "full"}), "selective": says({"remat": "selective"})},
        refused("type remat=full or remat=selective."),
    ),
    "use_distributed_optimizer": switched(says({"strategy": "zero1"}), says({"strategy": "ddp"})),
    "gradient_clipping": to("clip"),
    "optimizer_cpu_offload": OFFLOAD,
    "**": refused("an option of Megatron-LM only. Leave it out, or look for an equivalent in dtrain --help."),
}


def _with_prefix(prefix: str, rules: Mapping[str, Rule]) -> Mapping[str, Rule]:
    """Rules for names with the prefix that `accelerate config` writes, and without it."""
    return {f"{prefix}{name} {name}": rule for name, rule in rules.items()}


KEYS: Mapping[str, Any] = {
    "distributed_type num_processes num_machines machine_rank main_process_ip main_process_port": refused(ODD),
    "compute_environment": unneeded("this machine"),
    "mixed_precision": chosen(
        {
            "no": says({"precision": "fp32"}),
            False: says({"precision": "fp32"}),
            "fp32": says({"precision": "fp32"}),
            "fp16": says({"precision": "fp16"}),
            "bf16": says({"precision": "bf16"}),
            "fp8": says({"precision": "fp8"}, "needs torchao and a GPU with fp8"),
        },
        refused("allowed: no, fp16, bf16 and fp8. Type precision=bf16.", "precision"),
    ),
    "fp16": turns_on({"precision": "fp16"}),
    "use_cpu": switched(says({"backend": "gloo"}), GPUS),
    "gpu_ids": chosen({"all": unneeded("all visible GPUs, as here")}, _seen),
    "debug": unneeded("dtrain always reports the rank that hangs or fails"),
    "enable_cpu_affinity": lacking(
        "dtrain does not bind processes to cores. Type numactl --cpunodebind=0 dtrain ... if you need it."
    ),
    "rdzv_backend rdzv_conf.**": unneeded("the launcher runs its own rendezvous store, a new one per round"),
    "max_restarts": to("launcher.restarts", int),
    "monitor_interval": unneeded("the launcher notices the end of a process immediately"),
    "same_network": unneeded("nodes need one rendezvous address"),
    "main_training_function": unneeded("dtrain starts dtrain.train.train, or your loop with loop=<yours>"),
    "dynamo_config": {
        "dynamo_use_fullgraph": lacking("graph breaks are allowed. Leave it out."),
        "dynamo_use_dynamic": lacking("dtrain compiles for static shapes. Leave it out."),
        "dynamo_use_regional_compilation": unneeded("block by block, as here"),
    },
    "deepspeed_config": {
        "deepspeed_config_file zero_stage offload_optimizer_device offload_param_device": refused(ODD),
        "gradient_accumulation_steps": to("accumulate", count),
        "gradient_clipping": to("clip"),
        "zero3_init_flag": unneeded("each shard is initialised in place"),
        "zero3_save_16bit_model": CHECKPOINTS,
        "offload_optimizer_nvme_path offload_param_nvme_path": DISK,
        "deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter": refused(
            "dtrain has no hostfile. On each other node type python -m dtrain.launcher.local.agent <host>:<port>."
        ),
        "deepspeed_multinode_launcher": unneeded("nodes join by python -m dtrain.launcher.local.agent <host>:<port>"),
        "deepspeed_moe_layer_cls_names": unneeded("dtrain shards every element of the model's ModuleLists"),
    },
    "fp8_config.backend": chosen(
        {"ao": says({"precision": "fp8"}), "torchao": says({"precision": "fp8"})},
        refused("fp8 uses torchao. Type precision=fp8."),
    ),
    "fp8_config.**": refused(
        "fp8 uses torchao's kernels only. Type precision=fp8 precision.recipe=tensorwise or rowwise."
    ),
    "downcast_bf16 tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env command_file commands": NO_TPU,
    "mpirun_config.**": refused("start the ranks with mpirun: mpirun -n 2 python -m dtrain <words>."),
    "ipex_config.**": lacking("ipex is not supported. Leave it out."),
    "fsdp_config deepspeed_config megatron_lm_config parallelism_config": unneeded("empty"),
    "parallelism_config.*": unneeded("an implementation detail of ring attention or Ulysses"),
    "fsdp_config": _with_prefix("fsdp_", FSDP),
    "megatron_lm_config": _with_prefix("megatron_lm_", MEGATRON),
}
RULES = table(KEYS)
