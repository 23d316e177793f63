"""Translation of Lightning's devices and strategy."""

from collections.abc import Mapping
from typing import Any

from dtrain.dialect import nested
from dtrain.dialect.accelerate import SHARDING
from dtrain.dialect.callbacks import class_of
from dtrain.dialect.deepspeed_zero import SHARDS, STAGES
from dtrain.dialect.ledger import Code, Ledger, Rule, count
from dtrain.dialect.rules import chosen, every, refused, says, switched, to, unneeded, unread

OFF = unneeded("off, as here")


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


NO_STRATEGY = refused("dtrain has ddp, zero1, zero2, zero3, fsdp, hsdp and single. Type strategy=fsdp.")


def devices(ledger: Ledger, t: str) -> None:
    """Translate devices: a number, a list of device numbers, or all."""
    key = f"{t}devices"
    value = ledger.leaves.get(key)
    if isinstance(value, str) and value.lstrip("-").isdecimal():
        value = int(value)
    if key not in ledger.leaves or isinstance(value, Code):
        return
    if value in ("auto", -1, None):
        ledger.skip(key, "all available: devices=auto")
    elif isinstance(value, list) and all(isinstance(device, int) for device in value) and value:
        ledger.carry(
            key,
            {"devices": len(value)},
            f"to select these, put CUDA_VISIBLE_DEVICES={','.join(map(str, value))} before the command",
        )
    else:
        to("devices", count)(ledger, key, value)


def strategy(ledger: Ledger, t: str) -> None:
    """Translate a strategy given by name or as an object with arguments."""
    key = f"{t}strategy"
    name = class_of(ledger, key)
    if key in ledger.leaves and not unread_strategy(ledger, key):
        given = str(ledger.leaves[key])
        if given in STRATEGIES:
            ledger.carry(key, STRATEGIES[given])
        else:
            NO_STRATEGY(ledger, key, given)
    for other in ledger.under(f"{key}.class_path"):
        word = {
            "DDPStrategy": "ddp",
            "FSDPStrategy": "fsdp",
            "DeepSpeedStrategy": "zero2",
            "ModelParallelStrategy": "fsdp",
            "SingleDeviceStrategy": "single",
            "RayDDPStrategy": "ddp",
            "RayFSDPStrategy": "fsdp",
        }.get(name)
        if word is None:
            NO_STRATEGY(ledger, other, name)
        elif name in ("DeepSpeedStrategy", "FSDPStrategy") and any(
            ledger.get(f"{key}.init_args.{part}") for part in ("stage", "sharding_strategy", "config")
        ):
            ledger.skip(other, "covered by its arguments")
        else:
            ledger.carry(other, {"strategy": word})
    for other in ledger.under(f"{key}.init_args"):
        argument = other.removeprefix(f"{key}.init_args.")
        if (
            argument == "config"
            and name == "DeepSpeedStrategy"
            and isinstance(ledger.leaves[other], str)
            and not isinstance(ledger.leaves[other], Code)
        ):
            nested(ledger, other, "deepspeed", auto="Lightning, from the arguments of its Trainer")
        else:
            ARGUMENTS.get(name, {}).get(argument, refused(f"unknown argument of {name}. Leave it out."))(
                ledger, other, ledger.leaves[other]
            )


def unread_strategy(ledger: Ledger, key: str) -> bool:
    if ledger.leaves[key] == "auto":
        ledger.skip(key, "strategy=auto picks the cheapest that fits")
        return True
    return unread(ledger, key, ledger.leaves[key], "strategy")


def part(whole: Rule, other: Rule) -> Rule:
    """Apply `whole` to 1.0 or null, which mean all batches, and `other` to anything else (an integer 1 is one
    batch).
    """
    return lambda ledger, key, value: (whole if value is None or (isinstance(value, float) and value == 1) else other)(
        ledger, key, value
    )


ARGUMENTS: Mapping[str, Mapping[str, Rule]] = {
    "DDPStrategy": {
        "find_unused_parameters": unneeded("unused parameters are allowed"),
        "bucket_cap_mb": to("strategy.bucket_mb", count),
        **every(
            "static_graph gradient_as_bucket_view start_method process_group_backend timeout timeout.class_path "
            "timeout.init_args.seconds timeout.init_args.minutes",
            unneeded("an implementation detail of DDP; backend.timeout is 600 s"),
        ),
    },
    "FSDPStrategy": {
        "sharding_strategy": chosen({name: says(words) for name, words in SHARDING.items()}, NO_STRATEGY),
        "cpu_offload": switched(says({"strategy.offload": "cpu"}), OFF),
        **every(
            "activation_checkpointing_policy activation_checkpointing",
            lambda ledger, key, value: (
                says({"remat": "full"}, "of every block")(ledger, key, value) if value else OFF(ledger, key, value)
            ),
        ),
        "state_dict_type": SHARDS,
        **every(
            "auto_wrap_policy mixed_precision use_orig_params limit_all_gathers forward_prefetch "
            "backward_prefetch sync_module_states process_group_backend timeout",
            unneeded("dtrain finds the blocks itself; precision determines the dtypes"),
        ),
        "device_mesh": refused("type strategy=hsdp mesh.dp_shard=<inside> mesh.dp_replicate=<between>."),
    },
    "DeepSpeedStrategy": {
        "stage": chosen({stage: says({"strategy": word}) for stage, word in STAGES.items()}, NO_STRATEGY),
        "offload_optimizer": switched(
            says({"strategy.offload": "cpu"}, "offloads the weights and the optimizer state"), OFF
        ),
        "offload_parameters": switched(says({"strategy.offload": "cpu"}), OFF),
        **every(
            "remote_device offload_params_device offload_optimizer_device",
            chosen({"cpu": OFF, "none": OFF}, refused("there is no offload to disk. Type strategy.offload=cpu.")),
        ),
        **every(
            "allgather_bucket_size reduce_bucket_size overlap_communication contiguous_gradients reduce_scatter "
            "allgather_partitions sub_group_size pin_memory zero_optimization zero_allow_untested_optimizer "
            "logging_batch_size_per_gpu logging_level load_full_weights",
            unneeded("collectives run per block and overlap the computation"),
        ),
    },
    "ModelParallelStrategy": {
        "data_parallel_size": chosen({"auto": unneeded("the remaining ranks")}, to("mesh.dp_shard", count)),
        "tensor_parallel_size": chosen({"auto": refused("type mesh.tp=<ranks>.")}, to("mesh.tp", count)),
        **every("save_distributed_checkpoint", SHARDS),
        **every("process_group_backend timeout", unneeded("an implementation detail; backend.timeout is 600 s")),
    },
    "SingleDeviceStrategy": every("device", OFF),
}
