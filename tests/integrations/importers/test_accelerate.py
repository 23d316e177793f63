"""Values of Accelerate's files, against what its documentation says they mean."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from imported import FILES, Imported, example, imported


def config(folder: Path, **keys: Any) -> Imported:
    path = folder / "accelerate.yaml"
    path.write_text(yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", **keys}))
    return imported(path)


def test_the_first_fsdp() -> None:
    read = example("accelerate_fsdp1.yaml")
    words = {
        "nodes": 1,
        "devices": 8,
        "strategy": "fsdp",
        "strategy.reshard": "never",
        "strategy.offload": "cpu",
        "remat": "full",
        "precision": "bf16",
    }
    assert read.words == words
    assert read.asked == {"batch"} and read.open == {"batch", "model", "data", "data.holdout"}
    assert not read.told("refused")


def test_the_second_fsdp_on_two_machines(tmp_path: Path) -> None:
    read = example("accelerate_fsdp2.yaml")
    assert read.words == {
        "nodes": 2, "devices": 8, "strategy": "hsdp", "strategy.reshard": "forward", "mesh.dp_replicate": 2, "mesh.dp_shard": 4, "mesh.tp": 2, "precision": "fp16",
        "compile": "blocks", "compile.mode": "default",
    }  # fmt: skip
    assert read.command["launcher.address"] == "10.0.0.4:29500"
    assert read.command["launcher.here"] == 1
    assert read.plan(tmp_path).mesh.data == 8


def test_deepspeed_by_fields() -> None:
    read = example("accelerate_deepspeed.yaml")
    words = {
        "nodes": 1,
        "devices": 4,
        "strategy": "zero3",
        "strategy.offload": "cpu",
        "accumulate": 4,
        "clip": 0.5,
        "precision": "bf16",
    }
    assert read.words == words
    assert "microbatch" in read.ledger.implied


def test_deepspeed_by_a_file() -> None:
    read = example("accelerate_deepspeed_file.yaml")
    assert (read.words["devices"], read.words["batch"], read.words["strategy"], read.words["steps"]) == (
        8,
        256,
        "zero2",
        20000,
    )
    assert "ds_zero2_offload.json: zero_optimization.stage" in read.told("carried")


def test_a_file_from_elsewhere_names_none_of_this_machine(tmp_path: Path) -> None:
    from dtrain.integrations.importers import translate

    for file in (str(FILES / "ds_pipeline.json"), "../ds.json", "s3://other/ds.json"):
        tree = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": file}}
        entries = {entry.key: entry for entry in translate(tree, "accelerate", "https://example.org/a.yaml").entries}
        assert entries["deepspeed_config.deepspeed_config_file"].kind == "refused"
        assert "batch" not in entries


def test_megatron(tmp_path: Path) -> None:
    read = example("accelerate_megatron.yaml")
    assert read.words == {
        "nodes": 1, "devices": 8, "strategy": "zero1", "mesh.tp": 2, "mesh.pp": 2, "tensor.sequence": "split", "remat": "selective", "accumulate": 4, "clip": 1.0,
        "precision": "bf16",
    }  # fmt: skip
    assert read.plan(tmp_path).batch.accumulate == 4


def test_a_key_without_a_value_is_empty() -> None:
    from dtrain.integrations.importers import translate

    options = {"megatron_lm_num_micro_batches": None, "megatron_lm_pp_degree": None}
    tree = {"distributed_type": "MEGATRON_LM", "megatron_lm_config": options}
    ledger = translate(tree, "accelerate", "a.yaml")
    assert {entry.why for entry in ledger.entries if "config" in entry.key} == {"empty"}
    tree = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": None}}
    assert translate(tree, "accelerate", "a.yaml").words["strategy"] == "zero2"  # the default of Accelerate


def test_the_address_does_not_depend_on_how_processes_are_split() -> None:
    from dtrain.integrations.importers import translate

    tree = {"num_machines": 2, "num_processes": 3, "main_process_ip": "10.0.0.4", "main_process_port": 29500}
    ledger = translate({**tree, "machine_rank": 0}, "accelerate", "a.yaml")
    assert {entry.key for entry in ledger.entries if entry.kind == "refused"} == {"num_processes"}
    assert ledger.command["launcher.address"] == "10.0.0.4:29500"


def test_cpus_and_what_is_misspelt() -> None:
    read = example("accelerate_cpu.yaml")
    assert read.words == {
        "nodes": 1,
        "devices": 3,
        "strategy": "ddp",
        "backend": "gloo",
        "precision": "fp32",
    }
    refused = read.told("refused")
    assert "Did you mean num_processes?" in refused["num_proceses"]
    assert "CUDA_VISIBLE_DEVICES" in refused["gpu_ids"]
    assert "ipex_config.ipex" in refused


@pytest.mark.parametrize(
    ("sharding", "words"),
    [
        ("FULL_SHARD", {"strategy": "fsdp", "strategy.reshard": "forward"}),
        (2, {"strategy": "fsdp", "strategy.reshard": "never"}),
        ("NO_SHARD", {"strategy": "ddp"}),
        ("HYBRID_SHARD", {"strategy": "hsdp", "strategy.reshard": "forward"}),
        ("HYBRID_SHARD_ZERO2", {"strategy": "hsdp", "strategy.reshard": "never"}),
    ],
)
def test_sharding_strategies(sharding: Any, words: dict[str, str], tmp_path: Path) -> None:
    read = config(tmp_path, distributed_type="FSDP", num_processes=4, fsdp_config={"fsdp_sharding_strategy": sharding})
    assert {word: value for word, value in read.words.items() if word.startswith("strategy")} == words
    read.plan(tmp_path)


def test_what_is_not_sharded_cannot_be_offloaded(tmp_path: Path) -> None:
    read = config(
        tmp_path,
        distributed_type="FSDP",
        num_processes=2,
        fsdp_config={"fsdp_offload_params": True, "fsdp_sharding_strategy": "NO_SHARD"},
    )
    assert "strategy=fsdp strategy.offload=cpu" in read.told("refused")["fsdp_config.fsdp_offload_params"]
    read.plan(tmp_path)


def test_processes_that_are_not_the_same_on_each_machine(tmp_path: Path) -> None:
    read = config(tmp_path, distributed_type="MULTI_GPU", num_machines=2, num_processes=7)
    assert set(read.told("refused")) == {"num_processes"}
    assert read.words["nodes"] == 2 and "devices" in read.asked and "\ndevices: ???" in read.recipe


@pytest.mark.parametrize("kind", ["XLA", "MULTI_NPU", "MULTI_XPU"])
def test_other_devices_are_refused(kind: str, tmp_path: Path) -> None:
    read = config(tmp_path, distributed_type=kind, num_processes=2)
    assert "GPUs with nccl" in read.told("refused")["distributed_type"]
    assert "strategy" not in read.words


def test_sagemaker_is_refused_whole(tmp_path: Path) -> None:
    read = config(tmp_path, compute_environment="AMAZON_SAGEMAKER", distributed_type="NO", ec2_instance_type="ml.p4d")
    assert not read.words
    assert len(read.told("refused")) == 3


def test_ranks_that_are_no_number_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_processes: two\nnum_machines: '2'\ngpu_ids: 0, 2\n")
    read = imported(path)
    assert read.asked == {"devices", "batch"} and read.words["nodes"] == 2
    assert "CUDA_VISIBLE_DEVICES=0,2 dtrain" in read.told("refused")["gpu_ids"]
