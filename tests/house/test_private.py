"""What dtrain uses of torch without torch promising it: each name stands here, and is where it was in the torch that is installed.

Read so in the sources of torch 2.13.0 and 2.14.1. A name that is not in every version that we run on is asked for before it is used: MAY_BE_GONE.
"""

import ast
import importlib
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist

import dtrain

ROOT = Path(dtrain.__file__).parent
PRIVATE = {
    "_BatchNorm": "torch.nn.modules.batchnorm", "_ConvNd": "torch.nn.modules.conv", "_DropoutNd": "torch.nn.modules.dropout",
    "_NormBase": "torch.nn.modules.batchnorm",
    "_buffers": "torch.nn.modules.module", "_modules": "torch.nn.modules.module", "_parameters": "torch.nn.modules.module",
    "_compiled_call_impl": "torch.nn.modules.module", "_forward_hooks": "torch.nn.modules.module", "_forward_pre_hooks": "torch.nn.modules.module", "_non_persistent_buffers_set": "torch.nn.modules.module",
    "_C": "torch", "torch._C._distributed_c10d": "torch._C", "_abort_process_group": "torch.distributed.distributed_c10d", "_world": "torch.distributed.distributed_c10d",
    "_device_types": "torch.distributed.ProcessGroup", "_get_backend": "torch.distributed.ProcessGroup",
    "_get_sequence_number_for_group": "torch.distributed.ProcessGroup",
    "_current_graph_task_id": "torch._C", "_is_view": "torch.Tensor", "_version": "torch.Tensor", "_cdata": "torch.UntypedStorage",
    "_foreach_add_": "torch", "_foreach_copy_": "torch", "_foreach_div_": "torch", "_foreach_lerp": "torch", "_foreach_lerp_": "torch",
    "_foreach_mul_": "torch", "_foreach_norm": "torch", "_foreach_sub": "torch", "_opoverload": "torch._library.custom_ops",
    # parallel/kernels.py: the public function gives no logarithms, by which the blocks of a ring are joined
    "_scaled_dot_product_flash_attention": "torch.ops.aten", "_scaled_dot_product_flash_attention_backward": "torch.ops.aten",
    "_scaled_dot_product_efficient_attention": "torch.ops.aten", "_scaled_dot_product_efficient_attention_backward": "torch.ops.aten",
    "_scaled_dot_product_flash_attention_for_cpu": "torch.ops.aten", "_scaled_dot_product_flash_attention_for_cpu_backward": "torch.ops.aten",
    "_grouped_mm": "torch.ops.aten", "_detect_is_causal_mask": "torch.nn.modules.transformer", "_Action": "torch.distributed.pipelining.schedules", "_ComputationType": "torch.distributed.pipelining.schedules",
    "_PipelineScheduleRuntime": "torch.distributed.pipelining.schedules",
    "_create_grad_recv_info": "torch.distributed.pipelining.PipelineStage",
    "_get_recv_ops": "torch.distributed.pipelining.PipelineStage",
    "_retrieve_recv_activations": "torch.distributed.pipelining.PipelineStage",
    "_retrieve_recv_grads": "torch.distributed.pipelining.PipelineStage",
    "_setup_forward_recv_info": "torch.distributed.pipelining.PipelineStage",
    "_prepare_schedule_with_comms": "torch.distributed.pipelining.schedules._PipelineScheduleRuntime",
    "_fsdp_param_group": "torch.distributed.fsdp._fully_shard._fsdp_state", "_get_fsdp_state": "torch.distributed.fsdp.FSDPModule",
    "_register_post_backward_hook": "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
    "_training_state": "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    "torch._C._clear_DTensor_sharding_propagator_cache": "torch._C",
    "torch.distributed.tensor._api.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear":
        "torch.distributed.tensor._api.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding",
    "torch.distributed.tensor._redistribute.clear_redistribute_planner_cache": "torch.distributed.tensor._redistribute",
    "torch.distributed.tensor._redistribute._gen_transform_infos.cache_clear": "torch.distributed.tensor._redistribute._gen_transform_infos",
    "torch.distributed.tensor._collective_utils.MeshTopoInfo.build_from_mesh.cache_clear": "torch.distributed.tensor._collective_utils.MeshTopoInfo.build_from_mesh",
    "_set_params_and_buffers_to_ignore_for_model": "torch.nn.parallel.DistributedDataParallel",
    "_backward_hooks": "torch.Tensor", "_post_accumulate_grad_hooks": "torch.Tensor",
    "_module_info": "torch.distributed.fsdp._fully_shard._fsdp_param", "_param_fqn": "torch.distributed.fsdp._fully_shard._fsdp_param",
    "_unsharded_param": "torch.distributed.fsdp._fully_shard._fsdp_param", "_prepare_input_fn": "torch.distributed.tensor.parallel.SequenceParallel",
    "_prepare_output_fn": "torch.distributed.tensor.parallel.ColwiseParallel", "_make_wrapper_subclass": "torch.Tensor",
    "torch._dynamo": "torch", "torch._dynamo.config": "torch._dynamo", "torch._functorch.config": "torch._functorch", "torch._inductor.cudagraph_trees": "torch._inductor",
    "torch._subclasses.fake_tensor.DataDependentOutputException": "torch._subclasses.fake_tensor",
    "torch._subclasses.fake_tensor.FakeTensor": "torch._subclasses.fake_tensor",
    "torch._subclasses.fake_tensor.FakeTensorMode": "torch._subclasses.fake_tensor",
    "torch._subclasses.fake_tensor.unset_fake_temporarily": "torch._subclasses.fake_tensor",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": "torch.distributed.tensor._utils",
    "torch._tensor._rebuild_from_type_v2": "torch._tensor", "torch._utils._rebuild_parameter": "torch._utils",
    "torch._utils._rebuild_parameter_with_state": "torch._utils", "torch._utils._rebuild_tensor": "torch._utils",
    "torch._utils._rebuild_tensor_v2": "torch._utils", "torch._utils._rebuild_tensor_v3": "torch._utils",
    "torch.distributed._shard.sharded_tensor.metadata": "torch.distributed._shard.sharded_tensor",
    "torch.serialization._get_layout": "torch.serialization",
    "torch.utils._python_dispatch.TorchDispatchMode": "torch.utils._python_dispatch",
    "torch.utils._pytree.tree_flatten": "torch.utils._pytree", "torch.utils._pytree.tree_leaves": "torch.utils._pytree",
    "torch.utils._pytree.tree_map_only": "torch.utils._pytree", "torch.utils._pytree.tree_unflatten": "torch.utils._pytree",
}  # fmt: skip
"""Name -> the module, class or source in which it is."""
MAY_BE_GONE = {
    "_accelerator_setAllocatorSettings", "_dump_fr_trace_json", "_dump_nccl_trace_json", "_fsdp_param_groups", "_is_in_bad_fork", "_set_default_timeout", "_step_supports_amp_scaling",
}  # fmt: skip
"""Asked for by `getattr` or `hasattr`. Before 2.14 only gloo's and NCCL's groups take a timeout."""
OF_OTHERS = {
    "_asdict", "_attn_implementation", "_config", "_create_unverified_context", "_current_exceptions", "_current_frames", "_dummy", "_ex_iterable", "_exit", "_gateway", "_inheriting", "_jsc", "_next_step", "_parent",
    "_cat_file", "_process_limits", "_raise_not_found_for_status", "_request", "_resetUid", "_strip_protocol",
}  # fmt: skip
"""Of Python, fsspec and its clients, transformers, datasets, pyspark, trackio."""
OURS = {"_letter"}


def used(source: str) -> set[str]:
    """Private names that a source uses of objects that are not its own, and private modules of torch that it imports."""
    tree, found = ast.parse(source), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            found |= set() if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") else {node.attr}
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"torch(\.\w+)+(:[\w.]+)?", node.value)
        ):
            names = [node.value.replace(":", ".")]
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("getattr", "hasattr")
            and isinstance(name := node.args[1], ast.Constant)
        ):
            found |= {str(name.value)} if re.match("_[^_]", str(name.value)) else set()
        found |= {name for name in names if name.startswith("torch") and re.search(r"\._[^_]", name)}
    return found


def is_there(name: str, owner: str) -> bool:
    """Whether a module or a class has it, or else its module's source says it: what objects are given stands nowhere else."""
    module, rest = owner, list[str]()
    while True:
        try:
            there: object = importlib.import_module(module)
            break
        except ImportError:
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
    for part in rest:
        there = getattr(there, part)
    last = name.rpartition(".")[2]
    if hasattr(there, last):
        return True
    source = getattr(there, "__file__", None)
    return (name.startswith("torch.") and find_spec(name) is not None) or (
        bool(source) and last in re.findall(r"\w+", Path(str(source)).read_text())
    )


@cache
def used_by_file() -> dict[Path, set[str]]:
    """The private names that each file of dtrain/ uses."""
    return {path: used(path.read_text()) for path in ROOT.rglob("*.py")}


def test_every_private_name_of_torch_is_in_the_list() -> None:
    users = {name: path for path, names in used_by_file().items() for name in names}
    listed = set(PRIVATE) | MAY_BE_GONE | OF_OTHERS | OURS
    assert {name: path for name, path in users.items() if name not in listed} == {}
    assert listed - set(users) == set(), "nobody uses it any more"


@pytest.mark.parametrize("name", PRIVATE)
def test_what_is_private_in_torch_is_where_it_was(name: str) -> None:
    assert is_there(name, PRIVATE[name])


def test_what_may_be_gone_is_asked_for_first() -> None:
    for path, names in used_by_file().items():
        for name in MAY_BE_GONE & names:
            assert re.search(rf'(getattr|hasattr)\([^()]*(\(\))?[^()]*"{name}"', path.read_text()), f"{path}: {name}"


def test_names_are_found_and_missed() -> None:
    source = "import torch._dynamo\nfrom torch.utils import _pytree\ntorch._C._x\nself._own\ngetattr(group, '_maybe', None)\n__import__('torch._y')\n'torch.a:_z.b'"
    assert used(source) == {"torch._dynamo", "torch.utils._pytree", "_C", "_x", "_maybe", "torch._y", "torch.a._z.b"}
    assert not is_there("_never", "torch") and not is_there("_never", "torch.nn.modules.module")
    assert is_there("_get_backend", f"{dist.ProcessGroup.__module__}.ProcessGroup")
