"""Where tensors are made, where the host waits for the device and where CUDA is named: each such place has its reason here, by file and function.

A step on a GPU is slowed by every wait, and broken by every tensor that is made on the wrong device; neither is seen on a machine without one.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import dtrain

ROOT = Path(dtrain.__file__).parent
FACTORIES = {
    "zeros", "ones", "empty", "full", "arange", "range", "tensor", "as_tensor", "asarray", "scalar_tensor", "randn", "rand", "randint", "randperm",
    "normal", "eye", "linspace", "logspace", "empty_strided", "complex", "Tensor", "FloatTensor", "LongTensor",
}  # fmt: skip
"""Of torch, that make a tensor on the CPU where no `device=` is said. from_numpy and frombuffer take none: they say the CPU by their name."""
WAITS = {"item", "tolist", "cpu", "numpy", "nonzero", "synchronize"}
"""Methods for which the host waits until the device is there."""
TRUTH = {"any", "all", "max", "min", "sum", "argmax", "argmin", "isnan"}
"""Methods whose tensor the host waits for where a number or a condition is made of it."""
COMPARES = {"torch.equal", "torch.allclose"}
ROOMS = ("backend/", "cluster/", "doctor/", "integrations/importers/")
"""Which are about CUDA: how GPUs are reached, which there are, whether they work, and what other tools call them."""


class Finder(ast.NodeVisitor):
    """`found`: (kind, function) of every place in a source, `Class.method` or empty outside of all."""

    def __init__(self, source: str) -> None:
        self.found: set[tuple[str, str]] = set()
        self._inside = list[str]()
        tree = ast.parse(source)
        owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        bodies = [node.body for node in ast.walk(tree) if isinstance(node, owners)]
        self._texts = {id(line.value) for body in bodies for line in body if isinstance(line, ast.Expr)}
        """Docstrings"""
        self.visit(tree)

    def _within(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._inside.append(node.name)
        self.generic_visit(node)
        self._inside.pop()

    visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _within  # noqa: N815 - ast's

    def _find(self, kind: str) -> None:
        self.found.add((kind, ".".join(self._inside)))

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        if (
            name.startswith("torch.")
            and name.removeprefix("torch.") in FACTORIES
            and not any(key.arg in ("device", None) for key in node.keywords)
        ):
            self._find("made")
        waits = isinstance(node.func, ast.Attribute) and node.func.attr in WAITS
        to_cpu = (
            name.endswith(".to") and bool(node.args) and ast.unparse(node.args[0]) in ("'cpu'", "torch.device('cpu')")
        )
        number = name in ("int", "float", "bool") and any(map(_judges, node.args))
        if waits or to_cpu or number or name in COMPARES:
            self._find("waits")
        self.generic_visit(node)

    def _condition(self, node: ast.If | ast.IfExp | ast.While | ast.Assert) -> None:
        if any(map(_judges, ast.walk(node.test))):
            self._find("waits")
        self.generic_visit(node)

    visit_If = visit_IfExp = visit_While = visit_Assert = _condition  # noqa: N815 - ast's

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and id(node) not in self._texts and re.search(r"\bcuda\b", node.value):
            self._find("cuda")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in ("is_cuda", "cuda"):
            self._find("cuda")
        self.generic_visit(node)


def _judges(node: ast.AST) -> bool:
    """Whether it is a call, without arguments, of what tensors have (Python's own take what is judged), or of what makes a tensor of one."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return (node.func.attr in TRUTH and not node.args) or ast.unparse(node.func) in (
        "mesh.max",
        "self._mesh.max",
        "torch.stack",
    )


@cache
def places() -> dict[str, set[str]]:
    """Kind -> `file:function`, of all of dtrain/."""
    all_kinds: dict[str, set[str]] = {"made": set(), "waits": set(), "cuda": set()}
    for path in ROOT.rglob("*.py"):
        name = str(path.relative_to(ROOT))
        for kind, function in Finder(path.read_text()).found:
            if kind != "cuda" or not name.startswith(ROOMS):
                all_kinds[kind].add(f"{name}:{function}")
    return all_kinds


MADE = {
    "built where `dtrain.build` says: on the meta device": ("model/gpt.py:RMSNorm.__init__", "model/moe.py:Experts.__init__"),
    "drawn on the CPU, so that all devices have the same bits": ("model/seeds.py:_fill", "model/seeds.py:fill", "parallel/replay.py:Call._value", "parallel/tensor_check.py:_Watch._gradients"),
    "crosses by gloo, and waits for no device": (
        "data/stream.py:Stream._block", "data/stream.py:Stream._counts", "loop/spike.py:gates",
        "mesh/__init__.py:Mesh.gather", "lifecycle/stop.py:StopSignal._agreed", "strategy/units.py:Order._pass", "checkpoint/memory.py:Memory._swap",
        "doctor/bandwidth.py:_measured",
    ),
    "the cores of this host are measured": (
        "doctor/speed.py:_attention", "doctor/speed.py:_calls", "doctor/speed.py:_convolution", "doctor/speed.py:_pointwise", "doctor/speed.py:_product",
        "doctor/speed.py:_update", "doctor/speed.py:steps",
    ),
    "crosses by MPI, from the CPU": (
        "integrations/mpi/group.py:MpiGroup.all_gather_single", "integrations/mpi/group.py:MpiGroup.all_to_all_single", "integrations/mpi/group.py:MpiGroup.allgather",
        "integrations/mpi/group.py:MpiGroup.barrier", "integrations/mpi/group.py:MpiGroup.gather",
        "integrations/mpi/group.py:MpiGroup.reduce_scatter_single", "integrations/mpi/group.py:MpiGroup.scatter",
    ),
    "samples are made on the CPU, and moved when a step takes them": ("data/collate.py:stack", "data/collate.py:_tensor", "data/collate.py:_with_masks", "data/collate.py:mask_of", "data/dataset.py:Dataset._joined", "data/dataset.py:_classes", "data/mixture.py:Joined.take"),
    "bytes of a checkpoint, in the memory of the host": (
        "checkpoint/adopt.py:_read_into", "checkpoint/adopt.py:read", "checkpoint/exchange.py:Exchange._answer", "checkpoint/exchange.py:Exchange._pass_on", "checkpoint/export_adapter.py:_empty", "checkpoint/importing.py:part", "checkpoint/load.py:tensor_of", "checkpoint/memory.py:Memory._everywhere", "checkpoint/others.py:Whole.fill", "checkpoint/memory.py:_view",
        "checkpoint/snapshot.py:Snapshot.__init__", "checkpoint/snapshot.py:Snapshot._lay_out", "checkpoint/snapshot.py:_memory",
    ),
    "numbers that the host has and reads": (
        "loop/agreement.py:News.__init__",
        "loop/spike.py:SpikeDetector._judge_now", "loop/spike.py:SpikeDetector._judge_later", "objective/figures.py:figures", "optim/adafactor.py:_begin", "evaluation/parity.py:_put",
    ),
    "torch's schedules cut it by microbatch; the loss takes the number of one from it": ("parallel/pipeline.py:Pipeline.step",),
    "lengths of sequences, which are counted on the host": (
        "model/cache.py:KVCache.__init__", "model/cache.py:KVCache.begin", "model/cache.py:KVCache.positions",
    ),
    "tokens of a prompt, which the forward that it is given to moves": (
        "model/sampling.py:answers", "model/sampling.py:_last", "integrations/lm_eval/scoring.py:Rows.of", "integrations/lm_eval/scoring.py:Rows.shared", "integrations/lm_eval/scoring.py:Scoring._likelihoods", "integrations/lm_eval/scoring.py:Scoring._texts", "integrations/lm_eval/scoring.py:_Lockstep._others", "integrations/lm_eval/scoring.py:padded",
    ),
    "numbers of answers, which go to where these are": ("evaluation/predict.py:_counted",),
    "work for threads of the CPU": ("lifecycle/waiting.py:_asleep.sleep", "launcher/warm.py:first_step"),
}  # fmt: skip
WAITS_FOR = {
    "where samples of this rank missed a parameter, and of buffers that never changed every so many steps": ("loop/agreement.py:Agreement.settle",),
    "of tensors on the CPU: samples before they are moved, and what crosses by gloo": (
        "checkpoint/adopt.py:_read_runs", "checkpoint/importing.py:_bytes", "checkpoint/memory.py:Memory._swap", "checkpoint/sums.py:part_sum", "data/collate.py:tensors", "data/collate.py:check_range", "data/collate.py:rounded", "data/stream.py:_is_finite", "data/dataset.py:_classes",
        "model/limits.py:Limits.check", "data/order.py:permute", "data/order.py:samples", "integrations/ray/data.py:Rows.__getitem__", "data/shift.py:_agree", "data/stream.py:Stream._counts", "data/tokens.py:Tokens.take", "loop/spike.py:gates",
        "mesh/__init__.py:Mesh.gather", "objective/__init__.py:counted", "objective/classification.py:Classification.count", "objective/classification.py:_accuracy", "objective/dpo.py:DPO.count", "objective/masked.py:Masked.count", "objective/next_token.py:NextToken.count",
        "lifecycle/stop.py:StopSignal._agreed", "strategy/units.py:Order._pass", "files/tokenfile.py:outside", "model/seeds.py:_states",
    ),
    "arrays of numpy: rows of files, and their order": (
        "objective/masked.py:Hiding.holdout", "objective/masked.py:Hiding.take",
        "chat/files.py:TokenFile.read", "chat/files.py:alike", "files/imagerows.py:ImageRows.read", "files/parquetfile.py:unread", "chat/files.py:_check_bucket", "data/bucket.py:Buckets._windows", "data/bucket.py:_padding", "files/rowfile.py:check_bucket", "files/rowfile.py:check_some", "chat/files.py:_refuse", "chat/files.py:usable", "chat/making.py:tokens_of_file", "data/chat.py:Chat._conversations",
        "data/mixture.py:Joined.take",
        "data/mixture.py:_merged",
        "data/packing.py:Packed._heldout", "data/packing.py:Packed._made", "data/packing.py:_of_blocks", "data/tokens.py:PackedTokens.order", "data/wholedocs.py:Documents.ends", "data/wholedocs.py:Documents.tokens", "data/packing.py:packed", "data/packing.py:said", "data/rows.py:Rows.tokens", "files/rowlengths.py:check",
        "data/pictures.py:Pictures.described", "data/pictures.py:Pictures.take", "evaluation/beside.py:_read", "data/pixels.py:_resized", "files/imagefiles.py:rows", "files/imageindex.py:Images._read", "files/imageindex.py:Images.name",
        "files/imageindex.py:Images.read", "files/imageindex.py:_is_current", "files/tarindex.py:Shards._places", "files/tarindex.py:Shards._read", "files/tarindex.py:opened",
        "data/rows.py:Table.__getitem__", "data/rows.py:Table._in_blocks", "data/documents.py:_rows", "data/replayed.py:Streamed.take", "data/tokens.py:_digest", "data/tokens.py:Tokens._order", "data/tokens.py:Tokens.order", "tokenizer/blocks.py:ShardTokens.__getitem__", "tokenizer/worker.py:work", "data/split.py:Blocks.__len__", "data/split.py:Blocks._walk", "data/split.py:Blocks.order", "data/split.py:Blocks.original", "data/split.py:_route", "files/linefile.py:LineFile._look", "files/linefile.py:LineFile._rows", "files/linefile.py:_split", "files/linekinds.py:_fits", "files/parquetfile.py:_cast", "files/parquetfile.py:check_finite", "integrations/spark/data.py:_numbers",
    ),
    "numbers of steps that are over, every so many steps": ("loop/metrics.py:Log._write",),
    "without gates, or by a copy that was begun steps ago": ("loop/spike.py:SpikeDetector.decide", "loop/spike.py:SpikeDetector._catch_up"),
    "once a spike was seen": ("loop/spike.py:SpikeDetector._hear",),
    "in the first step and from step 1024 on in rare ones, or once": ("checkpoint/digest.py:digest", "objective/additive.py:_of_copy", "loop/unsaved.py:Moved._state", "checkpoint/adopt.py:untied", "loop/agreement.py:Agreement.message", "loop/agreement.py:News.__init__", "loop/unsaved.py:_is_other", "parallel/flow.py:_same", "parallel/flow.py:flaw", "parallel/ranks.py:Ranks.worst", "parallel/replay.py:Call._value", "parallel/replay.py:_text", "parallel/tensor_check.py:_Watch._compare_gradients", "strategy/writes.py:CopyWrites.check", "strategy/writes.py:_differ"),
    "a checkpoint, after which the next step may change what was copied": (
        "checkpoint/snapshot.py:Snapshot.wait", "checkpoint/snapshot.py:Snapshot._lay_out",
    ),
    "the sizes of what crosses or of products that are not aligned: the host must know them": (
        "parallel/expert.py:AllToAll.__call__", "parallel/pipeline.py:Pipeline._broadcast", "model/moe.py:by_expert", "model/moe.py:one_by_one",
        "model/moe.py:one_by_one_backward",
    ),
    "masks and positions of the data, which a part of a sequence cannot have": (
        "parallel/context.py:Context._check_meaning", "parallel/huggingface.py:_mask",
    ),
    "where documents of packed rows begin, once in a forward: the host cuts attention by them": (
        "parallel/context.py:_lengths", "parallel/context.py:_pieces", "parallel/ring.py:_documents",
    ),
    "between steps: evaluation, text, verify, records, what a hook returned, a wire that is measured": (
        "evaluation/heldout.py:evaluate", "evaluation/predict.py:_answers", "evaluation/predict.py:columns_of", "evaluation/predict.py:predict", "evaluation/predict.py:ragged", "evaluation/predict.py:targets_of", "evaluation/raw.py:_plain", "integrations/lm_eval/scoring.py:Scoring._likelihoods", "integrations/lm_eval/scoring.py:Scoring._texts", "integrations/lm_eval/scoring.py:Scoring.likelihoods", "integrations/lm_eval/scoring.py:_Lockstep._others", "integrations/lm_eval/scoring.py:likelihoods", "evaluation/metrics.py:_numbers", "metric/__init__.py:Hits.value", "metric/auroc.py:area", "metric/f1.py:F1.value",
        "metric/per_class.py:PerClass.value", "metric/perplexity.py:Perplexity.value", "model/sampling.py:_last", "model/sampling.py:_next", "model/cache.py:LayerCache.attend",
        "model/cache.py:LayerCache._room", "parallel/split_check.py:_Whole.__init__", "parallel/checks.py:distance",
        "parallel/split_check.py:_kept", "evaluation/record.py:_watch.first", "evaluation/parity.py:_rms", "hook/__init__.py:plain", "evaluation/whole.py:weights", "evaluation/whole.py:_gathered", "doctor/bandwidth.py:_measured",
        "doctor/bandwidth.py:_timed", "doctor/speed.py:steps", "doctor/speed.py:_calls",
    ),
    "a message, for which the run ends": ("objective/classification.py:one_hot", "objective/classification.py:_fractions"),
    "predictions on the CPU of an executor": ("integrations/spark/frames.py:predictions",),
}  # fmt: skip
CUDA = {
    "what other tools call GPUs": ("config/answers.py:", "config/elsewhere.py:"),
    "its memory is counted there": ("result.py:peak_bytes",),
    "generators of its own": ("model/seeds.py:_states", "model/seeds.py:kept", "model/seeds.py:reseed"),
    "kernels that are there, or better there": (
        "compile/blocks.py:prepare", "parallel/kernels.py:kernel_of",
        "objective/chunked.py:writes_wide", "parallel/checks.py:tolerance_of", "precision/fp8.py:build",
    ),
    "what is decided and predicted for the device of a plan": (
        "integrations/kubernetes/manifest.py:_resources", "integrations/kubernetes/manifest.py:predicted_bytes", "launcher/preflight.py:_devices", "integrations/ray/launcher.py:_needs", "launcher/slurm.py:Slurm._script", "launcher/slurm.py:Slurm._ours", "sweep/crew.py:_on", "predict/advice.py:_ladders", "predict/chunks.py:", "predict/chunks.py:rows_for", "predict/formulas.py:shapes", "resolve/chunk.py:sized", "predict/update.py:update", "predict/time.py:start_seconds", "resolve/reduction.py:_hides",
        "resolve/fit.py:optim", "resolve/mesh.py:degrees", "resolve/ranks.py:backend", "resolve/ranks.py:compiled", "resolve/ranks.py:precision", "resolve/small.py:words",
    ),
    "a fact of a word: the device that it needs": ("config/facts.py:",),
    "what torch and NCCL say": ("lifecycle/gpu_faults.py:",),
    "the generator of a GPU that is in use": ("evaluation/calls.py:_draws", "evaluation/calls.py:_draw_from"),
    "what a user's module or a caller of run may have started": ("launcher/local/attached.py:_refuse_cuda", "launcher/warm.py:_import", "launcher/warm.py:_is_poisoned"),
}  # fmt: skip
REASONS = {"made": MADE, "waits": WAITS_FOR, "cuda": CUDA}
"""Kind -> reason -> places"""


@pytest.mark.parametrize("kind", REASONS)
def test_every_place_has_its_reason(kind: str) -> None:
    listed = [place for places_ in REASONS[kind].values() for place in places_]
    assert len(listed) == len(set(listed))
    assert sorted(places()[kind] - set(listed)) == [], (
        "say device=, leave the wait out, or give the place a reason in this file"
    )
    assert sorted(set(listed) - places()[kind]) == [], "nothing is found there any more"


def of(source: str) -> set[str]:
    return {kind for kind, _ in Finder(source).found}


@pytest.mark.parametrize(("source", "kinds"), [
    ("torch.zeros(3)", {"made"}), ("torch.full((2,), 0.0, dtype=x.dtype)", {"made"}), ("torch.zeros(3, device=x.device)", set()),
    ("torch.zeros_like(x)", set()), ("x.new_zeros(3)", set()), ("torch.ones(3, **where)", set()), ("torch.tensor(1.0)", {"made"}),
    ("x.item()", {"waits"}), ("loss.detach().cpu()", {"waits"}), ("x.to('cpu')", {"waits"}), ("x.to(torch.device('cpu'))", {"waits"}),
    ("x.to(device)", set()), ("if (x > 1).any(): pass", {"waits"}), ("if any(x): pass", set()), ("bool((x > 1).all())", {"waits"}),
    ("float(norm.max())", {"waits"}), ("max(sizes)", set()), ("y if torch.equal(x, y) else z", {"waits"}), ("torch.cuda.synchronize()", {"waits", "cuda"}),
    ("x.cuda()", {"cuda"}), ("x.is_cuda", {"cuda"}), ("device == 'cuda'", {"cuda"}), ("torch.device('cuda', 1)", {"cuda"}),
    ("def f():\n  'Of cuda.'", set()), ("'barracuda' + x", set()),
])  # fmt: skip
def test_what_is_found(source: str, kinds: set[str]) -> None:
    assert of(source) == kinds


def test_a_place_is_named_by_its_function() -> None:
    assert Finder("class A:\n  def f(self):\n    return x.item()").found == {("waits", "A.f")}
