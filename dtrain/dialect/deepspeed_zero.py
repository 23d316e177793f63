"""Translation of DeepSpeed's zero_optimization section."""

from typing import Any

from dtrain.dialect.ledger import Ledger, Rule
from dtrain.dialect.rules import ODD, chosen, every, lacking, refused, says, switched, unneeded, unread

STAGES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}


SHARDS = unneeded("checkpoints are sharded and any mesh can read them; dtrain checkpoint export writes one file")


MOVES = unneeded("an implementation detail of offloading, which FSDP2 handles")


def zero_section(ledger: Ledger) -> None:
    """Translate the stage into a strategy, and the offload sections into strategy.offload."""
    top = "zero_optimization"
    key = f"{top}.stage"
    if isinstance(ledger.leaves.get(top), bool):  # very old files
        ledger.carry(top, {"strategy": "zero1" if ledger.leaves[top] else "ddp"})
        return
    stage = ledger.leaves.get(key, 0)
    if key not in ledger.leaves:
        ledger.imply({"strategy": "ddp"}, "default of DeepSpeed: stage 0")
    elif not unread(ledger, key, stage, "strategy"):
        if isinstance(stage, bool) or not isinstance(stage, int) or stage not in STAGES:
            ledger.refuse(key, f"the stage is 0, 1, 2 or 3, not {stage!r}. Type strategy=<ddp, zero1, zero2 or zero3>.")
            ledger.ask("strategy")
        else:
            ledger.carry(key, {"strategy": STAGES[stage]})
    for part in ("optimizer", "param"):
        _offload(ledger, f"{top}.offload_{part}", _offloads(stage, part))
    for key in ledger.under(f"{top}.cpu_offload", f"{top}.cpu_offload_param"):
        switched(_offloads(stage, key.rpartition("_")[2]), unneeded("off, as here"))(ledger, key, ledger.leaves[key])


def _offloads(stage: Any, part: str) -> Rule:
    if not isinstance(stage, int) or stage not in (1, 2, 3):
        return refused("stage 0 shards nothing, so it cannot offload. Type strategy=zero2 strategy.offload=cpu.")
    return says(
        {"strategy.offload": "cpu"},
        "" if part == "param" else "offloads weights too, not only the optimizer",
    )


def _offload(ledger: Ledger, section: str, offload: Rule) -> None:
    disk = refused("there is no offload to disk. Type strategy.offload=cpu for host memory, or use more ranks.")
    device = ledger.leaves.get(f"{section}.device")
    for key in ledger.under(section):
        if key == f"{section}.device":
            chosen({"cpu": offload, "none": unneeded("off, as here")}, disk)(ledger, key, device)
        elif device == "nvme" and ledger.leaves[key] is not False:
            disk(ledger, key, device)
        elif key == f"{section}.ratio":
            chosen({1: MOVES}, refused("dtrain offloads all shards or none. Leave it out."))(
                ledger, key, ledger.leaves[key]
            )


ZERO: dict[str, Rule] = {
    **every(
        "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save elastic_checkpoint",
        SHARDS,
    ),
    **every(
        "allgather_partitions allgather_bucket_size overlap_comm reduce_scatter reduce_bucket_size "
        "contiguous_gradients round_robin_gradients sub_group_size "
        "stage3_max_live_parameters stage3_max_reuse_distance stage3_prefetch_bucket_size "
        "stage3_param_persistence_threshold "
        "stage3_model_persistence_threshold stage3_module_granularity_threshold "
        "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential "
        "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters "
        "max_reuse_distance module_granularity_threshold "
        "use_all_reduce_for_fetch_params allgather_sequential use_multi_rank_bucket_allreduce compute_grad_norm "
        "ignore_unused_parameters legacy_stage1 "
        "parameter_alignment memory_efficient_linear pipeline_loading_checkpoint override_module_apply "
        "enable_sanity_checks grad_hooks fast_init "
        "save_muon_momentum_buffer_in_memory log_trace_cache_warnings leaf_module.classes leaf_module.names "
        "leaf_module.name_suffixes",
        unneeded("collectives run per block and overlap the computation"),
    ),
    **every(
        "zero_quantized_weights zero_quantized_gradients zero_quantized_nontrainable_weights",
        lacking("communication is not quantised. Leave it out."),
    ),
    **every("cpu_offload_use_pin_memory", MOVES),
    **every(
        "offload_optimizer.device offload_optimizer.ratio offload_param.device cpu_offload cpu_offload_param",
        refused(ODD),
    ),
    **{
        f"offload_{part}.{name}": MOVES
        for part in ("optimizer", "param")
        for name in [
            "pin_memory",
            "buffer_count",
            "buffer_size",
            "max_in_cpu",
            "fast_init",
            "nvme_path",
            "pipeline_read",
            "pipeline_write",
            "cpuadam_cores_perc",
        ]
    },
    "offload_optimizer.super_offload": lacking("offloaded shards return to the device for the update. Leave it out."),
    "load_from_fp32_weights": unneeded("stored weights are fp32"),
    "zero_hpz_partition_size": chosen(
        {0: unneeded("off, as here"), 1: unneeded("off, as here")},
        refused("secondary shards inside a node are not supported. The closest: strategy=hsdp nodes=2 devices=8."),
    ),
    "mics_shard_size": chosen(
        {-1: unneeded("off, as here")},
        refused(
            "for shards inside a group and replicas between groups, type strategy=hsdp mesh.dp_shard=<size of a "
            "group>, with nodes and devices."
        ),
    ),
    "mics_hierarchical_params_gather": unneeded("an implementation detail of MiCS"),
}
