"""Translation of DeepSpeed's zero_optimization section."""

from typing import Any

from dtrain.integrations.importers.ledger import Ledger, Rule
from dtrain.integrations.importers.rules import ODD, OFF, chosen, lacking, refused, says, switched, unneeded, unread
from dtrain.integrations.importers.terms import CHECKPOINTS, DISK

STAGES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
MOVES = unneeded("an implementation detail of offloading, which FSDP2 handles")


def stage(ledger: Ledger, key: str, value: Any) -> None:
    """Carry a stage over as a strategy."""
    if unread(ledger, key, value, "strategy"):
        return
    if isinstance(value, bool) or not isinstance(value, int) or value not in STAGES:
        ledger.refuse(key, f"the stage is 0, 1, 2 or 3, not {value!r}. Type strategy=<ddp, zero1, zero2 or zero3>.")
        ledger.ask("strategy")
    else:
        ledger.carry(key, {"strategy": STAGES[value]})


def zero_section(ledger: Ledger) -> None:
    """Translate the stage into a strategy, and the offload sections into strategy.offload."""
    top = "zero_optimization"
    if isinstance(ledger.leaves.get(top), bool):  # very old files
        ledger.settle(switched(says({"strategy": "zero1"}), says({"strategy": "ddp"})), top)
        return
    ledger.settle(stage, f"{top}.stage")
    if f"{top}.stage" not in ledger.leaves:
        ledger.imply({"strategy": "ddp"}, "default of DeepSpeed: stage 0")
    shards = ledger.leaves.get(f"{top}.stage") in (1, 2, 3)
    for part, note in (("optimizer", "offloads weights too, not only the optimizer"), ("param", "")):
        offload = says({"strategy.offload": "cpu"}, note)
        if not shards:
            offload = refused("stage 0 shards nothing, so it cannot offload. Type strategy=zero2 strategy.offload=cpu.")
        _offload(ledger, f"{top}.offload_{part}", offload)
        ledger.settle(switched(offload, OFF), f"{top}.cpu_offload_param" if part == "param" else f"{top}.cpu_offload")


def _offload(ledger: Ledger, section: str, offload: Rule) -> None:
    device = ledger.leaves.get(f"{section}.device")
    ledger.settle(chosen({"cpu": offload, "none": OFF}, DISK), f"{section}.device")
    for key in ledger.under(section):
        if device == "nvme" and ledger.leaves[key] is not False:
            ledger.settle(DISK, key)
    whole = refused("dtrain offloads all shards or none. Leave it out.")
    ledger.settle(chosen({1: MOVES}, whole), f"{section}.ratio")


ZERO = {
    "stage": refused(ODD),
    "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save "
    "stage3_gather_fp16_weights_on_model_save elastic_checkpoint": CHECKPOINTS,
    "allgather_partitions allgather_bucket_size overlap_comm reduce_scatter reduce_bucket_size contiguous_gradients "
    "round_robin_gradients sub_group_size stage3_max_live_parameters stage3_max_reuse_distance "
    "stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold "
    "stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential "
    "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters "
    "max_reuse_distance module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential "
    "use_multi_rank_bucket_allreduce compute_grad_norm ignore_unused_parameters legacy_stage1 parameter_alignment "
    "memory_efficient_linear pipeline_loading_checkpoint override_module_apply enable_sanity_checks grad_hooks "
    "fast_init save_muon_momentum_buffer_in_memory log_trace_cache_warnings leaf_module.classes leaf_module.names "
    "leaf_module.name_suffixes": unneeded("collectives run per block and overlap the computation"),
    "zero_quantized_weights zero_quantized_gradients zero_quantized_nontrainable_weights": lacking(
        "communication is not quantised. Leave it out."
    ),
    "cpu_offload_use_pin_memory": MOVES,
    "offload_optimizer.device offload_optimizer.ratio offload_param.device cpu_offload cpu_offload_param": refused(ODD),
    "offload_optimizer offload_param": {
        "pin_memory buffer_count buffer_size max_in_cpu fast_init nvme_path pipeline_read pipeline_write "
        "cpuadam_cores_perc": MOVES
    },
    "offload_optimizer.super_offload": lacking("offloaded shards return to the device for the update. Leave it out."),
    "load_from_fp32_weights": unneeded("stored weights are fp32"),
    "zero_hpz_partition_size": chosen(
        {0: OFF, 1: OFF},
        refused("secondary shards inside a node are not supported. The closest: strategy=hsdp nodes=2 devices=8."),
    ),
    "mics_shard_size": chosen(
        {-1: OFF},
        refused(
            "for shards inside a group and replicas between groups, type strategy=hsdp mesh.dp_shard=<size of a "
            "group>, with nodes and devices."
        ),
    ),
    "mics_hierarchical_params_gather": unneeded("an implementation detail of MiCS"),
}
