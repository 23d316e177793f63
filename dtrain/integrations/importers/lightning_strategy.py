"""Translation of Lightning's devices and strategy."""

from collections.abc import Mapping
from typing import Any

from dtrain.integrations.importers import nested
from dtrain.integrations.importers.accelerate import SHARDING
from dtrain.integrations.importers.callbacks import class_of
from dtrain.integrations.importers.deepspeed_zero import STAGES
from dtrain.integrations.importers.ledger import Code, Ledger, Rule, count
from dtrain.integrations.importers.rules import OFF, chosen, refused, says, table, to, turns_on, unneeded, unread, when
from dtrain.integrations.importers.terms import CHECKPOINTS, OFFLOAD

STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    **{
        f"ddp_{way}": {"strategy": "ddp"}
        for way in ("find_unused_parameters_true", "find_unused_parameters_false", "spawn", "fork", "notebook")
    },
    "fsdp": SHARDING["full_shard"],
    "fsdp_cpu_offload": {**SHARDING["full_shard"], "strategy.offload": "cpu"},
    "deepspeed": {"strategy": "zero2"},
    **{f"deepspeed_stage_{stage}": {"strategy": STAGES[stage]} for stage in (1, 2, 3)},
    **{f"deepspeed_stage_{stage}_offload": {"strategy": STAGES[stage], "strategy.offload": "cpu"} for stage in (2, 3)},
    "single_device": {"strategy": "single"},
}


CLASSES = {
    "DDPStrategy": "ddp",
    "FSDPStrategy": "fsdp",
    "DeepSpeedStrategy": "zero2",
    "ModelParallelStrategy": "fsdp",
    "SingleDeviceStrategy": "single",
    "RayDDPStrategy": "ddp",
    "RayFSDPStrategy": "fsdp",
}
NO_STRATEGY = refused("dtrain has ddp, zero1, zero2, zero3, fsdp, hsdp and single. Type strategy=fsdp.")


def devices(ledger: Ledger, t: str) -> None:
    """Translate devices: a number, a list of device numbers, or all."""
    key = f"{t}devices"
    value = ledger.leaves.get(key)
    if key not in ledger.leaves or isinstance(value, Code):
        return
    if value in ("auto", -1, None):
        ledger.skip(key, "all available: devices=auto")
    elif isinstance(value, list) and all(isinstance(device, int) for device in value) and value:
        numbers = ",".join(map(str, value))
        ledger.carry(
            key, {"devices": len(value)}, f"to select these, put CUDA_VISIBLE_DEVICES={numbers} before the command"
        )


def strategy(ledger: Ledger, t: str) -> None:
    """Translate a strategy given by name or as an object with arguments."""
    key = f"{t}strategy"
    name = class_of(ledger, key)
    ledger.settle(_named, key)
    for other in ledger.under(f"{key}.class_path"):
        arguments = [ledger.get(f"{key}.init_args.{part}") for part in ("stage", "sharding_strategy", "config")]
        if name in ("DeepSpeedStrategy", "FSDPStrategy") and any(arguments):
            ledger.skip(other, "covered by its arguments")
        elif name in CLASSES:
            ledger.carry(other, {"strategy": CLASSES[name]})
        else:
            ledger.settle(NO_STRATEGY, other)
    file = ledger.leaves.get(f"{key}.init_args.config")
    if name == "DeepSpeedStrategy" and isinstance(file, str) and not isinstance(file, Code):
        nested(ledger, f"{key}.init_args.config", "deepspeed", auto="Lightning, from the arguments of its Trainer")
    unknown = refused(f"unknown argument of {name}. Leave it out.")
    for other in ledger.under(f"{key}.init_args"):
        argument = other.removeprefix(f"{key}.init_args.")
        ledger.settle(ARGUMENTS.get(f"{name}.{argument}", unknown), other)


def _named(ledger: Ledger, key: str, value: Any) -> None:
    if value == "auto":
        ledger.skip(key, "strategy=auto picks the cheapest that fits")
    elif str(value) in STRATEGIES and not isinstance(value, Code):
        ledger.carry(key, STRATEGIES[str(value)])
    elif not unread(ledger, key, value, "strategy"):
        NO_STRATEGY(ledger, key, value)


def part(whole: Rule, other: Rule) -> Rule:
    """Apply `whole` to 1.0 or null, which mean all batches, and `other` to anything else (an integer 1 is one
    batch).
    """
    return when(lambda ledger, key, value: value is None or (isinstance(value, float) and value == 1), whole, other)


KEYS: Mapping[str, Any] = {
    "DDPStrategy": {
        "find_unused_parameters": unneeded("unused parameters are allowed"),
        "bucket_cap_mb": to("strategy.bucket_mb", count),
        "static_graph gradient_as_bucket_view start_method process_group_backend timeout timeout.class_path "
        "timeout.init_args.seconds timeout.init_args.minutes": unneeded(
            "an implementation detail of DDP; backend.timeout is 600 s"
        ),
    },
    "FSDPStrategy": {
        "sharding_strategy": chosen({name: says(words) for name, words in SHARDING.items()}, NO_STRATEGY),
        "cpu_offload": OFFLOAD,
        "activation_checkpointing_policy activation_checkpointing": when(
            lambda ledger, key, value: bool(value), says({"remat": "full"}, "of every block"), OFF
        ),
        "state_dict_type": CHECKPOINTS,
        "auto_wrap_policy mixed_precision use_orig_params limit_all_gathers forward_prefetch backward_prefetch "
        "sync_module_states process_group_backend timeout": unneeded(
            "dtrain finds the blocks itself; precision determines the dtypes"
        ),
        "device_mesh": refused("type strategy=hsdp mesh.dp_shard=<inside> mesh.dp_replicate=<between>."),
    },
    "DeepSpeedStrategy": {
        "stage": chosen({stage: says({"strategy": word}) for stage, word in STAGES.items()}, NO_STRATEGY),
        "offload_optimizer": turns_on({"strategy.offload": "cpu"}, "offloads the weights and the optimizer state"),
        "offload_parameters": OFFLOAD,
        "remote_device offload_params_device offload_optimizer_device": chosen(
            {"cpu": OFF, "none": OFF}, refused("there is no offload to disk. Type strategy.offload=cpu.")
        ),
        "allgather_bucket_size reduce_bucket_size overlap_communication contiguous_gradients reduce_scatter "
        "allgather_partitions sub_group_size pin_memory zero_optimization zero_allow_untested_optimizer "
        "logging_batch_size_per_gpu logging_level load_full_weights": unneeded(
            "collectives run per block and overlap the computation"
        ),
    },
    "ModelParallelStrategy": {
        "data_parallel_size": chosen({"auto": unneeded("the remaining ranks")}, to("mesh.dp_shard", count)),
        "tensor_parallel_size": chosen({"auto": refused("type mesh.tp=<ranks>.")}, to("mesh.tp", count)),
        "save_distributed_checkpoint": CHECKPOINTS,
        "process_group_backend timeout": unneeded("an implementation detail; backend.timeout is 600 s"),
    },
    "SingleDeviceStrategy": {"device": OFF},
}
ARGUMENTS = table(KEYS)
