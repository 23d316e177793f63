"""Accelerate's YAML, as `accelerate config` writes it: https://huggingface.co/docs/accelerate/package_reference/cli and
the fields of 1.15.

    dtrain import fsdp.yaml to=mine.yaml

The file describes the launch and the sharding; the training itself is in the user's script.
"""

import re
from typing import Any

from dtrain.dialect import nested
from dtrain.dialect.deepspeed_zero import SHARDS, STAGES
from dtrain.dialect.ledger import Ledger, Rule, count, names, switch, text
from dtrain.dialect.rules import ODD, chosen, every, lacking, refused, says, switched, to, unneeded, unread

TITLE = "Accelerate"
MARKS = names(
    "compute_environment distributed_type num_processes num_machines machine_rank main_process_ip main_process_port "
    "main_training_function rdzv_backend "
    "same_network use_cpu downcast_bf16 dynamo_config megatron_lm_config deepspeed_config parallelism_config "
    "mixed_precision tpu_use_cluster"
)
SILENT = ("model", "data", "objective", "optim", "schedule", "steps", "batch")
TYPES: dict[str, dict[str, Any]] = {
    "no": {"strategy": "single"}, "multi_gpu": {"strategy": "ddp"}, "multi_cpu": {"strategy": "ddp", "backend": "gloo"},
    "fsdp": {"strategy": "fsdp"},
    "megatron_lm": {"strategy": "ddp"}, "deepspeed": {},
}  # fmt: skip
SHARDING: dict[Any, dict[str, Any]] = {
    "full_shard": {"strategy": "fsdp", "strategy.reshard": "forward"},
    "shard_grad_op": {"strategy": "fsdp", "strategy.reshard": "never"},
    "no_shard": {"strategy": "ddp"},
    "hybrid_shard": {"strategy": "hsdp", "strategy.reshard": "forward"},
    "hybrid_shard_zero2": {"strategy": "hsdp", "strategy.reshard": "never"},
}
NUMBERS = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard", "5": "hybrid_shard_zero2"}
"""Values of torch's ShardingStrategy enum, which older files contain."""


def translate(ledger: Ledger) -> None:
    if ledger.get("compute_environment", "LOCAL_MACHINE") not in ("LOCAL_MACHINE", "local_machine"):
        for key in ledger.open():
            ledger.refuse(
                key,
                "dtrain does not start SageMaker jobs. Start dtrain inside the container instead.",
            )
        return
    for tell in (_world, _kind, _sharding, _deepspeed, _megatron, _axes, _dynamo):
        tell(ledger)
    ledger.apply(RULES)


def _world(ledger: Ledger) -> None:
    """Accelerate's num_processes counts all machines; dtrain's devices counts one node."""
    machines, processes = ledger.leaves.get("num_machines", 1), ledger.leaves.get("num_processes")
    wrong = [
        key for key in ("num_machines", "num_processes") if key in ledger.leaves and not _counted(ledger.leaves[key])
    ]
    for key in wrong:
        if ledger.leaves[key] in (None, -1):
            ledger.skip(key, "all available: devices=auto")
        else:
            ledger.refuse(
                key, f"Accelerate takes an integer >= 1 here, not {ledger.leaves[key]!r}. Type nodes=1 devices=2."
            )
            ledger.ask(
                "nodes" if key == "num_machines" else "devices",
                "number" if key == "num_machines" else "processes per node",
            )
    if not wrong and processes is not None and processes % machines:
        for key in ("num_machines", "num_processes"):
            ledger.refuse(
                key,
                f"{processes} processes cannot be split evenly over {machines} machines. Type nodes={machines} "
                "devices=<processes per node>.",
            )
        return
    machines = machines if "num_machines" not in wrong else 1
    if "num_machines" in ledger.open():
        ledger.carry("num_machines", {"nodes": machines})
    if processes is not None and "num_processes" in ledger.open():
        ledger.carry(
            "num_processes",
            {"devices": processes // machines},
            f"{processes} on {machines} machines" if machines > 1 else "",
        )
    _meeting(ledger, machines)


def _seen(ledger: Ledger, key: str, value: Any) -> None:
    """Refuse gpu_ids, a comma-separated list of numbers, and suggest CUDA_VISIBLE_DEVICES."""
    numbers = str(value) if re.fullmatch(r"[0-9][0-9, ]*", str(value)) else "<numbers>"
    ledger.refuse(
        key,
        f"the environment selects the GPUs. Type CUDA_VISIBLE_DEVICES={numbers.replace(' ', '')} dtrain ...",
    )


def _counted(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _meeting(ledger: Ledger, machines: int) -> None:
    """Put the rendezvous address on the first machine's command line: it is valid at this site only."""
    host, port = ledger.get("main_process_ip"), ledger.get("main_process_port")
    alone = machines == 1
    for key in ledger.under("main_process_ip", "main_process_port", "machine_rank"):
        if alone or ledger.leaves[key] is None:
            ledger.skip(key, "one machine" if alone else "empty")
        elif key == "machine_rank":
            ledger.skip(key, "machines are numbered in order of arrival")
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
    name = str(ledger.leaves.get(key, "")).lower()
    ranks = (ledger.words.get("nodes") or 1) * (ledger.words.get("devices") or 1)
    if key not in ledger.leaves:
        return
    if name not in TYPES:
        ledger.refuse(
            key,
            f"{ledger.leaves[key]} is not supported: dtrain runs on GPUs with nccl and on CPUs with gloo. Type "
            f"strategy=ddp.",
        )
    elif name == "deepspeed":
        ledger.skip(key, "covered by deepspeed_config")
    elif name == "no" and ranks > 1:
        ledger.refuse(key, f"this means one process, but the file has {ranks}. Type strategy=ddp, or devices=1.")
    elif name == "fsdp" or (
        name == "megatron_lm" and switched_on(ledger, "megatron_lm_config.megatron_lm_use_distributed_optimizer")
    ):
        ledger.skip(
            key, "covered by fsdp_config" if name == "fsdp" else "covered by megatron_lm_use_distributed_optimizer"
        )
        ledger.imply(SHARDING["full_shard"] if name == "fsdp" else {"strategy": "zero1"}, f"default of {name}")
    else:
        ledger.carry(key, TYPES[name])


def switched_on(ledger: Ledger, key: str) -> bool:
    try:
        return switch(ledger.get(key, False))
    except ValueError:
        return False


def _sharding(ledger: Ledger) -> None:
    """Translate fsdp_config of both versions: FSDP1 names a sharding strategy, FSDP2 a flag reshard_after_forward."""
    fsdp = str(ledger.get("distributed_type", "")).lower() == "fsdp"
    for key in ledger.under("fsdp_config"):
        name = key.removeprefix("fsdp_config.").removeprefix("fsdp_")
        value = ledger.leaves[key]
        if not fsdp:
            ledger.skip(key, f"an FSDP option, but distributed_type is {ledger.get('distributed_type')}")
        elif name in ("sharding_strategy", "reshard_after_forward") and not unread(
            ledger, key, value, "strategy.reshard"
        ):
            plain = NUMBERS.get(str(value), str(value).lower())
            reshard = {"true": "full_shard", "false": "shard_grad_op"}.get(plain, plain)
            if reshard in SHARDING:
                ledger.carry(key, SHARDING[reshard])
            else:
                ledger.refuse(
                    key,
                    f"unknown sharding {value}. Type strategy=fsdp, or strategy=hsdp with nodes and devices.",
                )
        elif name in FSDP:
            FSDP[name](ledger, key, value)


def _deepspeed(ledger: Ledger) -> None:
    """Translate DeepSpeed's fields, or the DeepSpeed file that is named instead of them."""
    section = "deepspeed_config"
    if str(ledger.get("distributed_type", "")).lower() != "deepspeed":
        for key in ledger.under(section):
            ledger.skip(key, f"a DeepSpeed option, but distributed_type is {ledger.get('distributed_type')}")
        return
    file, key = ledger.get(f"{section}.deepspeed_config_file"), f"{section}.zero_stage"
    if file:
        nested(ledger, f"{section}.deepspeed_config_file", "deepspeed")
    stage = ledger.leaves.get(key)
    if stage is not None and (not isinstance(stage, int) or stage not in STAGES):
        ledger.refuse(key, f"the stage is 0, 1, 2 or 3, not {stage!r}. Type strategy=<ddp, zero1, zero2 or zero3>.")
        ledger.ask("strategy")
    elif key in ledger.open():
        ledger.carry(key, {"strategy": STAGES[stage or 0]})
    elif not file:
        ledger.imply({"strategy": "zero2"}, "default of Accelerate's DeepSpeed")
    if not file:
        ledger.imply({"clip": None}, "DeepSpeed does not clip by default")
    note = "offloads the weights and the optimizer state"
    for part in ("optimizer", "param"):
        for key in ledger.under(f"{section}.offload_{part}_device"):
            offload = (
                says({"strategy.offload": "cpu"}, note)
                if stage != 0
                else refused("stage 0 shards nothing. Type strategy=zero2 strategy.offload=cpu.")
            )
            chosen({"none": unneeded("off, as here"), "cpu": offload}, refused(DISK))(ledger, key, ledger.leaves[key])


DISK = "there is no offload to disk. Type strategy.offload=cpu for host memory, or use more ranks."


def _megatron(ledger: Ledger) -> None:
    section = "megatron_lm_config"
    on = str(ledger.get("distributed_type", "")).lower() == "megatron_lm"
    for key in ledger.under(section):
        name = key.removeprefix(f"{section}.").removeprefix("megatron_lm_")
        if not on:
            ledger.skip(key, f"a Megatron-LM option, but distributed_type is {ledger.get('distributed_type')}")
        elif name == "num_micro_batches":
            to("accumulate", count, "microbatches per step")(ledger, key, ledger.leaves[key])
        elif name in MEGATRON:
            MEGATRON[name](ledger, key, ledger.leaves[key])
        else:
            ledger.refuse(
                key, "an option of Megatron-LM only. Leave it out, or look for an equivalent in dtrain --help."
            )


def _axes(ledger: Ledger) -> None:
    """Translate parallelism_config, the mesh degrees. Ulysses (sp) and ring attention (cp) are both mesh.cp here."""
    section = "parallelism_config"
    degrees = {
        "dp_replicate_size": "dp_replicate",
        "dp_shard_size": "dp_shard",
        "tp_size": "tp",
        "cp_size": "cp",
        "sp_size": "cp",
    }
    for key in ledger.under(section):
        name = key.removeprefix(f"{section}.").removeprefix("parallelism_config_")
        value = ledger.leaves[key]
        if name in degrees and value in (1, None):
            ledger.skip(key, "one, as here")
        elif name in degrees:
            ways = {"cp_size": {"context.attention": "ring"}, "sp_size": {"context.attention": "ulysses"}}.get(name, {})
            try:
                ledger.carry(key, {f"mesh.{degrees[name]}": count(value), **ways})
            except ValueError as error:
                ledger.refuse(key, f"Accelerate takes {error} here, not {value!r}. Type mesh.{degrees[name]}=2.")
        elif name in (
            "cp_comm_strategy",
            "cp_backend",
            "cp_handler",
            "sp_backend",
            "sp_handler",
            "sp_seq_length",
            "sp_seq_length_is_variable",
            "sp_attn_implementation",
        ):
            ledger.skip(key, "an implementation detail of ring attention or Ulysses")
    replicas, shards = ledger.words.get("mesh.dp_replicate", 1), ledger.words.get("mesh.dp_shard", 1)
    if (replicas > 1 or shards > 1) and ledger.words.get("strategy") in ("ddp", "fsdp", None):
        ledger.words["strategy"] = {(True, True): "hsdp", (False, True): "fsdp"}.get((replicas > 1, shards > 1), "ddp")


def _dynamo(ledger: Ledger) -> None:
    for key in ledger.under("dynamo_backend", "dynamo_config.dynamo_backend"):
        table = {"no": says({"compile": "none"}), "inductor": says({"compile": "blocks"})}
        chosen(table, refused("inductor compiles the blocks. Type compile=blocks."))(ledger, key, ledger.leaves[key])
    for key in ledger.under("dynamo_config.dynamo_mode"):
        (to("compile.mode", text) if ledger.words.get("compile") == "blocks" else unneeded("compilation is off"))(
            ledger, key, ledger.leaves[key]
        )


FSDP: dict[str, Rule] = {
    "version": unneeded("dtrain uses FSDP2"),
    "offload_params": switched(says({"strategy.offload": "cpu"}), unneeded("off, as here")),
    "activation_checkpointing": switched(says({"remat": "full"}), unneeded("off, as here")),
    "activation_checkpointing_offload": lacking("there is no activation offload. Type remat=full."),
    **every("auto_wrap_policy transformer_layer_cls_to_wrap min_num_params", unneeded("dtrain shards every element "
    "of the model's ModuleLists and Sequentials")),
    **every("backward_prefetch forward_prefetch limit_all_gathers", unneeded("the next block is prefetched while one "
    "computes")),
    **every("state_dict_type", SHARDS),
    **every("use_orig_params", unneeded("FSDP2 always does")),
    **every("sync_module_states cpu_ram_efficient_loading param_init_fn", unneeded("each shard is initialised in "
    "place, with the same values on every mesh")),
    "ignored_modules": lacking("every module is sharded. Leave it out."),
}  # fmt: skip

MEGATRON: dict[str, Rule] = {
    "tp_degree": to("mesh.tp", count),
    "pp_degree": to("mesh.pp", count),
    "context_parallel_size": to("mesh.cp", count),
    "expert_model_parallel_size": to("mesh.ep", count),
    "sequence_parallelism": lambda ledger, key, value: (
        switched(says({"tensor.sequence": "split"}), unneeded("off, as here"))
        if ledger.get("megatron_lm_config.megatron_lm_tp_degree", 1) != 1
        else unneeded("tensor parallelism is off")
    )(ledger, key, value),
    "recompute_activations": switched(says({"remat": "selective"}), unneeded("off, as here")),
    "recompute_granularity": chosen(
        {"full": says({"remat": "full"}), "selective": says({"remat": "selective"})},
        refused("type remat=full or remat=selective."),
    ),
    "use_distributed_optimizer": switched(says({"strategy": "zero1"}), says({"strategy": "ddp"})),
    "gradient_clipping": to("clip"),
    "optimizer_cpu_offload": switched(says({"strategy.offload": "cpu"}), unneeded("off, as here")),
}

RULES: dict[str, Rule] = {
    **every("distributed_type num_processes num_machines machine_rank main_process_ip main_process_port", refused(ODD)),
    **every("deepspeed_config_file zero_stage offload_optimizer_device offload_param_device", refused(ODD),
    "deepspeed_config"),
    "compute_environment": unneeded("this machine"),
    "mixed_precision": chosen(
        {"no": says({"precision": "fp32"}), False: says({"precision": "fp32"}), "fp32": says({"precision": "fp32"}),
        "fp16": says({"precision": "fp16"}), "bf16": says({"precision": "bf16"}),
        "fp8": says({"precision": "fp8"}, "needs torchao and a GPU with fp8")},
        refused("allowed: no, fp16, bf16 and fp8. Type precision=bf16.", "precision"),
    ),
    "fp16": switched(says({"precision": "fp16"}), unneeded("off, as here")),
    "downcast_bf16": lacking("dtrain does not run on TPUs. Leave it out."),
    "use_cpu": switched(says({"backend": "gloo"}), unneeded("GPUs if available, as here")),
    "gpu_ids": chosen({"all": unneeded("all visible GPUs, as here")}, _seen),
    "debug": unneeded("dtrain always reports the rank that hangs or fails"),
    "enable_cpu_affinity": lacking("dtrain does not bind processes to cores. Type numactl --cpunodebind=0 dtrain ... "
    "if you "
        "need it."),
    "rdzv_backend": unneeded("the launcher runs its own rendezvous store, a new one per round"),
    "rdzv_conf.**": unneeded("the launcher runs its own rendezvous store, a new one per round"),
    "max_restarts": to("launcher.restarts", int),
    "monitor_interval": unneeded("the launcher notices the end of a process immediately"),
    "same_network": unneeded("nodes need one rendezvous address"),
    "main_training_function": unneeded("dtrain starts dtrain.train.train, or your loop with loop=<yours>"),
    "dynamo_config.dynamo_use_fullgraph": lacking("graph breaks are allowed. Leave it out."),
    "dynamo_config.dynamo_use_dynamic": lacking("dtrain compiles for static shapes. Leave it out."),
    "dynamo_config.dynamo_use_regional_compilation": unneeded("block by block, as here"),
    "deepspeed_config.gradient_accumulation_steps": to("accumulate", count),
    "deepspeed_config.gradient_clipping": to("clip"),
    "deepspeed_config.zero3_init_flag": unneeded("each shard is initialised in place"),
    "deepspeed_config.zero3_save_16bit_model": SHARDS,
    **every("offload_optimizer_nvme_path offload_param_nvme_path", refused(DISK), "deepspeed_config"),
    **every("deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter",
    refused("dtrain has no hostfile. On each other node type python -m dtrain.launcher.local.agent "
    "<host>:<port>."), "deepspeed_config"),
    "deepspeed_config.deepspeed_multinode_launcher": unneeded("nodes join by python -m dtrain.launcher.local.agent "
        "<host>:<port>"),
    "deepspeed_config.deepspeed_moe_layer_cls_names": unneeded("dtrain shards every element of the model's "
    "ModuleLists"),
    "fp8_config.backend": chosen({"ao": says({"precision": "fp8"}), "torchao": says({"precision": "fp8"})},
    refused("fp8 uses torchao. Type precision=fp8.")),
    "fp8_config.**": refused("fp8 uses torchao's kernels only. Type precision=fp8 precision.recipe=tensorwise or "
        "rowwise."),
    **every("tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env command_file commands",
    lacking("dtrain does not run on TPUs. Leave it out.")),
    "mpirun_config.**": refused("start the ranks with mpirun: mpirun -n 2 python -m dtrain <words>."),
    "ipex_config.**": lacking("ipex is not supported. Leave it out."),
    "fsdp_config": unneeded("empty"), "deepspeed_config": unneeded("empty"), "megatron_lm_config": unneeded("empty"),
    "parallelism_config": unneeded("empty"),
    **{f"fsdp_config.fsdp_{name}": rule for name, rule in FSDP.items()},
    **{f"megatron_lm_config.megatron_lm_{name}": rule for name, rule in MEGATRON.items()},
}  # fmt: skip
