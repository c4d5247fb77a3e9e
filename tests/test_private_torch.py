"""The private names of torch that dtmega uses: one list, so that a new torch is compared with it before it is allowed.

A name counts as private if a part of its path begins with one underscore. torch may change or remove any of them in a
release. All of them were last seen in torch 2.11 and 2.13, on which the whole test suite ran (CONTRIBUTING.md).
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


class Private(NamedTuple):
    """A private name of torch.

    Attributes:
        files: the files of dtmega/ that use it.
        why: what it is used for, and what has no public form.
    """

    files: tuple[str, ...]
    why: str


TORCH = {
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": Private(
        ("planning/counting/recorder.py",), "whose buffers are FSDP's"
    ),
    "torch._C.DisableTorchFunctionSubclass": Private(
        ("interop/hf/logits.py",), "call torch's own function from `__torch_function__`; the public base uses it too"
    ),
    "torch._C._distributed_c10d": Private(
        ("distributed/flight_recorder.py",), "holder of the next, and of `_dump_nccl_trace` in builds with CUDA"
    ),
    "torch._C._distributed_c10d._dump_fr_trace": Private(
        ("distributed/flight_recorder.py",), "the last collectives of this process, which `torchfrtrace` reads"
    ),
    "torch.autograd.profiler._is_profiler_enabled": Private(
        ("ops/ranges.py",), "is this process profiled: torch's own optimizers ask the same"
    ),
    "torch.cuda.memory._dump_snapshot": Private(
        ("training/profile.py",), "writes the allocations that torch has recorded"
    ),
    "torch.cuda.memory._record_memory_history": Private(
        ("training/profile.py",), "records allocations; documented, though its name begins with an underscore"
    ),
    "torch._foreach_mul_": Private(
        ("ops/optim/gradients.py",), "multiply many tensors by few kernels, as torch's own clipping"
    ),
    "torch.Tensor._base": Private(("planning/counting/recording.py",), "the tensor that a graph's result is a view of"),
    "torch.Tensor._is_view": Private(
        ("pipelining/stage.py", "planning/counting/recording.py"),
        "torch detaches sent tensors in place: clone views; how a graph's result is made again",
    ),
    "torch.Tensor._make_wrapper_subclass": Private(
        ("interop/hf/logits.py",), "a tensor with a shape and no memory, for logits that nobody may ever compute"
    ),
    "torch.Tensor._post_accumulate_grad_hooks": Private(
        ("fsdp/masters.py",), "run the hooks of a master weight, which backward never visits: it visits the copy"
    ),
    "torch.Tensor._version": Private(
        ("interop/hf/logits.py",), "notice that the optimizer changed a weight between forward and use"
    ),
    "torch.cpu._is_amx_tile_supported": Private(("ops/cpu/features.py",), "does the CPU have AMX"),
    "torch.cpu._is_avx512_bf16_supported": Private(("ops/cpu/features.py",), "does the CPU have bfloat16 products"),
    "torch.distributed._functional_collectives": Private(
        ("models/routing.py", "ops/sequence_exchange.py", "plans/mappings.py"),
        "collectives that torch.compile can trace; dist.* breaks the graph",
    ),
    "torch.distributed.distributed_c10d._get_default_store": Private(
        ("mesh.py",), "the store of the process group, for the watchdog's own connection"
    ),
    "torch.distributed.distributed_c10d._world": Private(
        ("distributed/flight_recorder.py", "mesh.py"),
        "which groups this process has made: torch numbers the names of groups by it, and gloo's record lacks them",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_group": Private(
        ("fsdp/exact.py", "fsdp/shard_sums.py", "planning/counting/role.py"),
        "sum one block's gradients, which backward in two parts computes unseen by FSDP2",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_post_backward_final_callback": Private(
        ("fsdp/exact.py", "fsdp/shard_sums.py"),
        "tell FSDP2 that a backward which it did not see is over, as torch's own stages do",
    ),
    "torch.distributed.pipelining._backward.stage_backward": Private(
        ("pipelining/sums.py",), "a stage's backward; torch's method would forbid FSDP2 to sum gradients in it"
    ),
    "torch.distributed.pipelining._backward.stage_backward_weight": Private(
        ("pipelining/sums.py",), "the part for weights, of one block at a time"
    ),
    "torch.distributed.pipelining.PipelineStage._get_init_p2p_neighbors_ops": Private(
        ("pipelining/stage.py",), "torch 2.11 sends a first message to a stage on the same rank, where gloo fails"
    ),
    "torch.distributed.pipelining.schedules._PipelineScheduleRuntime": Private(
        ("pipelining/pipeline.py",), "runs a schedule from a CSV file"
    ),
    "torch.distributed.pipelining.schedules._PipelineScheduleRuntime._load_csv": Private(
        ("pipelining/pipeline.py",), "reads that file"
    ),
    "torch.distributed.tensor.DTensor._op_dispatcher": Private(
        ("interop/hf/tp/generic.py",), "holder of the next; torch's public context ends before backward begins"
    ),
    "torch.distributed.tensor.DTensor._op_dispatcher._allow_implicit_replication": Private(
        ("interop/hf/tp/generic.py",), "let any model's code mix plain tensors with DTensors"
    ),
    "torch.distributed.tensor.parallel.ParallelStyle._apply": Private(
        (
            "interop/hf/tp/experts.py",
            "interop/hf/tp/generic.py",
            "interop/hf/tp/regions.py",
            "plans/base.py",
            "plans/styles.py",
            "plans/vocabulary.py",
        ),
        "the one method of a style, which parallelize_module calls; a style of one's own overrides it",
    ),
    "torch.distributed.tensor.placement_types._StridedShard": Private(
        ("interop/hf/tp/packed.py", "ops/shards.py", "plans/adapters.py"),
        "the placement of a dimension that is cut in parts: [q | k | v]",
    ),
    "torch.nn.Module._modules": Private(
        ("interop/hf/model.py", "models/model.py"), "delete a layer of a list without renumbering the others"
    ),
    "torch.nn.Module._non_persistent_buffers_set": Private(("models/model.py",), "which buffers a checkpoint stores"),
    "torch.nn.Module._parameters": Private(
        ("fsdp/masters.py", "fsdp/slots.py", "plans/base.py"),
        "exchange a parameter for one forward; assignment would register another",
    ),
    "torch.ops._c10d_functional.all_reduce": Private(
        ("plans/mappings.py",), "begin a compiled sum without waiting for it; `functional` waits at once"
    ),
    "torch.ops._c10d_functional.reduce_scatter_tensor": Private(("plans/mappings.py",), "the same for a cut sum"),
    "torch.ops.aten._grouped_mm.default": Private(
        ("training/recompute.py",), "the operator of `F.grouped_mm`, whose results selective recomputation keeps"
    ),
    "torch.ops.aten._scaled_dot_product_efficient_attention.default": Private(
        ("ops/attention.py",), "a kernel of F.scaled_dot_product_attention, which selective recompute keeps"
    ),
    "torch.ops.aten._scaled_dot_product_flash_attention.default": Private(("ops/attention.py",), "as above"),
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": Private(
        ("ops/attention.py",), "the CPU's kernel, with the log-sum-exp that our backward by chunks needs"
    ),
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default": Private(
        ("ops/attention.py",), "a kernel that selective recompute keeps"
    ),
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": Private(
        ("ops/attention.py",), "its backward, a chunk at a time"
    ),
    "torch.ops.aten._softmax_backward_data.out": Private(
        ("ops/cpu/attention.py",), "the gradient of softmax into memory that is there already"
    ),
    "torch.ops.mkldnn._linear_pointwise": Private(
        ("ops/cpu/linear.py",), "oneDNN's product with a bias, in one pass over the output"
    ),
    "torch.optim.Adam._init_group": Private(
        ("ops/optim/adam.py",), "give torch's kernels local parts while the optimizer's state stays DTensors"
    ),
    "torch.utils._python_dispatch.TorchDispatchMode": Private(
        ("interop/hf/initial.py", "planning/counting/autograd_sums.py", "planning/counting/fake_device.py"),
        "see every operator: by which ones transformers draws initial values, and what a plan's step does",
    ),
    "torch.utils._pytree.tree_map_only": Private(
        ("interop/hf/tp/generic.py", "interop/hf/logits.py"), "visit the tensors in whatever a model returns"
    ),
    "torch.utils._pytree.tree_leaves": Private(("training/compiled_proof.py",), "the tensors that a block returns"),
    "torch.utils._pytree.tree_map": Private(("training/compiled_proof.py",), "copy the tensors that a block is given"),
    "torch._C.DispatchKey.AutogradMeta": Private(
        ("planning/counting/fake_device.py",), "give composite operators their gradient on the meta device"
    ),
    "torch._C.DispatchKey.CompositeImplicitAutograd": Private(
        ("planning/counting/fake_device.py",), "is an operator composite"
    ),
    "torch._C.DispatchKey.Meta": Private(
        ("planning/counting/fake_device.py",), "has a composite operator a shape function"
    ),
    "torch._C._only_lift_cpu_tensors": Private(("planning/counting/fake_device.py",), "the state before the next"),
    "torch._C._set_only_lift_cpu_tensors": Private(
        ("planning/counting/fake_device.py",), "torch.tensor(numbers, device=...) moves its numbers by an operator"
    ),
    "torch._C._storage_Use_Count": Private(
        ("planning/counting/autograd_sums.py",), "does only the engine hold a gradient"
    ),
    "torch._C._distributed_c10d.FakeWork": Private(
        ("planning/counting/recorder.py",), 'a message of the "fake" process group, whose wait is noted'
    ),
    "torch.ops.aten._to_copy.default": Private(("planning/counting/compiled.py",), "Inductor fuses it"),
    "torch._decomp": Private(("planning/counting/fake_device.py",), "the table of shape functions"),
    "torch._dynamo.backends.common.aot_autograd": Private(
        ("planning/counting/compiled.py",), "a backend that runs AOT's graphs as they are"
    ),
    "torch._dynamo.config": Private(
        ("ops/attention.py",), "no number of kernels after which a function would run uncompiled"
    ),
    "torch._dynamo.decorators": Private(
        ("planning/counting/fake_device.py",), "Dynamo reads `_make_subclass` when it is imported"
    ),
    "torch._dynamo.polyfills.loader": Private(("planning/counting/fake_device.py",), "the same"),
    "torch._dynamo.reset": Private(
        ("planning/counting/compiled.py",), "forget graphs of another backend; torch.compiler.reset also needs Inductor"
    ),
    "torch._functorch.config": Private(
        ("ops/attention.py",), "a backward that leaves the tensors it reads as they are, and so can run in two parts"
    ),
    "torch._functorch.partitioners.min_cut_rematerialization_partition": Private(
        ("planning/counting/compiled.py",), "what Inductor keeps for backward"
    ),
    "torch._inductor.decomposition.select_decomp_table": Private(
        ("planning/counting/compiled.py",), "the operators of which Inductor's graphs consist"
    ),
    "torch._guards.TracingContext": Private(
        ("planning/counting/recorder.py",), "is a graph being made, so that nothing runs"
    ),
    "torch._ops.OpOverload": Private(("planning/counting/fake_device.py",), "which entries of a table are operators"),
    "torch._ops.OperatorBase._dispatch_cache": Private(
        ("planning/counting/fake_device.py",), "forget the kernel that an operator had before"
    ),
    "torch._ops.OpOverload._overloadpacket": Private(
        ("planning/counting/launches.py",), "an operator's name, by which torch counts FLOPs"
    ),
    "torch._ops.OpOverload._schema": Private(
        ("planning/counting/launches.py",), "names of arguments, and whether a result is an argument"
    ),
    "torch._subclasses.fake_impls": Private(
        ("planning/counting/kernels.py",), "shapes of an operator's results, in its table `op_implementations_dict`"
    ),
    "torch.ops.aten._grouped_mm": Private(
        ("planning/counting/kernels.py",), "the operator behind `torch.nn.functional.grouped_mm`"
    ),
    "torch._subclasses.fake_tensor": Private(("planning/counting/fake_device.py",), "tensors without memory"),
    "torch.utils._python_dispatch._disable_current_modes": Private(
        ("planning/counting/tapes.py",), "make the results of a replayed graph, unseen by the plan's observer"
    ),
    "torch._subclasses.fake_tensor.FakeTensor": Private(
        (
            "planning/counting/autograd_sums.py",
            "planning/counting/fake_device.py",
            "planning/counting/recording.py",
            "planning/counting/tapes.py",
        ),
        "the same",
    ),
    "torch._subclasses.fake_tensor.FakeTensorMode": Private(
        (
            "planning/counting/autograd_sums.py",
            "planning/counting/kernels.py",
            "planning/counting/fake_device.py",
            "planning/counting/tapes.py",
        ),
        "the same",
    ),
    "torch.autograd.graph._engine_run_backward": Private(
        ("planning/counting/autograd_sums.py",), "is an operator called by the engine"
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._orig_size": Private(
        ("fsdp/slots.py",), "the shape of a whole gradient"
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._unsharded_param": Private(
        ("fsdp/slots.py",), "the leaf whose gradient is whole; its public name may be read before it is freed only"
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._sharded_param_data": Private(
        ("planning/counting/role.py",), "the memory of a shard"
    ),
    "torch.distributed.pipelining.schedules._PipelineSchedule": Private(
        ("planning/counting/fake_device.py",), "holder of a vote that a plan leaves out"
    ),
    "torch.distributed.pipelining.PipelineStage._inference_mode": Private(
        ("planning/counting/fake_device.py",), "the result of that vote"
    ),
    "torch.distributed.tensor.DTensor._local_tensor": Private(
        ("planning/counting/ledger.py", "planning/counting/fake_device.py"),
        "a part without an operator that a mode sees",
    ),
    "torch.distributed.tensor.placement_types.Shard._split_tensor": Private(
        ("ops/shards.py",), "the parts of a dimension as DTensor cuts it"
    ),
    "torch.nn.Module._call_impl": Private(
        ("planning/counting/recorder.py", "training/compiled_proof.py"), "call a block, noting that it computes"
    ),
    "torch.nn.Module._compiled_call_impl": Private(
        ("planning/counting/recorder.py", "training/compiled_proof.py"), "the same for compiled blocks"
    ),
    "torch.ops._c10d_functional.wait_tensor.default": Private(
        ("planning/counting/fake_device.py",), "hand on the tensor itself"
    ),
    "torch.Tensor._make_subclass": Private(("planning/counting/fake_device.py",), "let C++ see the meta device"),
    "torch.Tensor._use_count": Private(("planning/counting/autograd_sums.py",), "does only the engine hold a gradient"),
    "torch.testing._internal.distributed.fake_pg.FakeStore": Private(
        ("planning/counting/fake_device.py",), "a process group of one process"
    ),
    "torch.UntypedStorage._cdata": Private(
        (
            "ops/shards.py",
            "planning/counting/autograd_sums.py",
            "planning/counting/launches.py",
            "planning/counting/ledger.py",
            "planning/counting/tapes.py",
        ),
        "which memory a tensor has",
    ),
}
# How code names those that are attributes of objects.
ATTRIBUTES = {f".{name.rpartition('.')[2]}": name for name in TORCH if not name.startswith("torch.ops.")}
# Private names of other libraries and of Python, which are not the concern of this list.
OTHERS = {
    "transformers": (
        "_attn_implementation",
        "_from_config",
        "_is_expert_parallel",
        "_is_hf_initialized",
        "_keep_in_fp32_modules_strict",
        "_keys_to_ignore_on_load_unexpected",
        "_tp_plan",
    ),
    "tiktoken": ("_mergeable_ranks", "_pat_str", "_special_tokens"),
    "python": ("_asdict", "_current_frames", "_exit", "_getframe", "_replace"),
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def chain(node: ast.AST) -> list[str]:
    """The parts of a.b.c; the first is '' if it is no plain name (a call, an item)."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "", *reversed(parts)]


def methods(tree: ast.AST) -> set[str]:
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {statement.name for body in bodies for statement in body if isinstance(statement, ast.FunctionDef)}


def attributes(tree: ast.AST) -> set[str]:
    """The names that a file annotates, or assigns to an attribute of `self`."""
    annotated = {ast.unparse(node.target) for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)}
    stored = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return annotated | {node.attr for node in stored if chain(node)[0] == "self"}


def uses(tree: ast.AST) -> Iterator[str]:
    """The private names in a file: of torch with their path, of other objects as `.name`."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    own = methods(tree) | attributes(tree)
    # A method of ours that has the name of one of torch's overrides it.
    yield from (f".{name}" for name in methods(tree) if f".{name}" in ATTRIBUTES)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith("torch."))
        elif isinstance(node, ast.Attribute):
            parts = chain(node)
            is_torchs = f".{node.attr}" in ATTRIBUTES or node.attr not in own
            if parts[0] == "torch" and id(node) not in inner:
                yield ".".join(parts)
            elif parts[0] != "torch" and parts[:-1] not in (["self"], ["cls"]) and is_torchs:
                yield f".{node.attr}"


def found() -> dict[str, set[str]]:
    """Private name -> the files of dtmega/ that use it."""
    files: dict[str, set[str]] = {}
    others = {name for names in OTHERS.values() for name in names}
    for path in sorted((ROOT / "dtmega").rglob("*.py")):
        for name in uses(ast.parse(path.read_text(encoding="utf-8"))):
            if any(map(is_private, name.split("."))) and name[1:] not in others:
                files.setdefault(ATTRIBUTES.get(name, name), set()).add(str(path.relative_to(ROOT / "dtmega")))
    return files


def test_the_private_names_of_torch_in_dtmega_are_those_of_the_list():
    assert found() == {name: set(private.files) for name, private in TORCH.items()}


@pytest.mark.parametrize("name", TORCH)
def test_a_private_name_of_the_list_exists_in_the_installed_torch(name: str):
    parts = name.split(".")
    place: Any = torch
    for i, part in enumerate(parts[1:], start=1):
        # Instances have the attributes of a Module that its class only annotates, or that its constructor assigns.
        constructor = getattr(vars(place).get("__init__"), "__code__", None) if isinstance(place, type) else None
        assigned = () if constructor is None else constructor.co_names
        if part not in (*getattr(place, "__annotations__", {}), *assigned) and not hasattr(place, part):
            importlib.import_module(".".join(parts[: i + 1]))
        place = getattr(place, part, None)
