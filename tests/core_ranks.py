"""megatron-core's own GPTModel on a CPU, as several ranks: it loads a checkpoint, and saves one after three updates.

    python -m torch.distributed.run --nproc-per-node N -m tests.core_ranks load FOLDER TP PP OUT
    python -m torch.distributed.run --nproc-per-node N -m tests.core_ranks save FOLDER TP PP OUT

FOLDER is a `release` folder. `load` reads it strictly and writes to the file OUT which entries were missing or not
asked for, and the logits of `tokens`. `save` reads it, updates the weights three times with gradients that are half of
the first weights, and saves all with the optimizer to OUT. The model is made from the checkpoint's arguments alone.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

MULTIPLE = 128
STEPS, SAMPLES = 3, 24
NAME = f"iter_{STEPS:07d}"


def tokens(vocab: int) -> Tensor:
    return torch.arange(24).view(2, 12) * 7 % vocab


def main(what: str, folder: str, tp: int, pp: int, out: str) -> None:
    from megatron.core import dist_checkpointing, parallel_state

    dist.init_process_group("gloo")
    with on_a_cpu():
        parallel_state.initialize_model_parallel(tp, pp)
        args = dist_checkpointing.load_common_state_dict(folder)["args"]
        model = built(args, tp, pp)
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        state, missing, unexpected = dist_checkpointing.load(
            {"model": model.sharded_state_dict(), "engine": states_of_transformer_engine(args.num_layers)},
            folder,
            strict="return_all",
        )
        model.load_state_dict(state["model"])
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        if what == "load":
            found = {"missing": sorted(missing), "unexpected": sorted(unexpected)}
            if pp == 1:
                found["logits"] = logits(model, tokens(args.padded_vocab_size - MULTIPLE + 2))
            if dist.get_rank() == 0:
                torch.save(found, out)
        else:
            save(model, args, tp, pp, Path(out))
    dist.destroy_process_group()


def built(args: Namespace, tp: int, pp: int) -> Any:
    """The model of a checkpoint's arguments, with a vocabulary that is padded for these ranks."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    gelu = functools.partial(F.gelu, approximate="tanh")
    is_rotary = args.position_embedding_type == "rope"
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        ffn_hidden_size=args.ffn_hidden_size,
        kv_channels=args.kv_channels,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=args.swiglu,
        activation_func=F.silu if args.swiglu else gelu,
        add_bias_linear=args.add_bias_linear,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )
    rotary = {"rotary_base": args.rotary_base, "rotary_percent": args.rotary_percent} if is_rotary else {}
    if is_rotary and args.use_rope_scaling:
        rotary |= {"rope_scaling": True, "rope_scaling_factor": args.rope_scaling_factor}
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=-(-args.padded_vocab_size // (MULTIPLE * tp)) * MULTIPLE * tp,
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        parallel_output=False,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **rotary,
    )


def states_of_transformer_engine(n_layers: int) -> list[Any]:
    """What a model of Transformer Engine's modules asks for beyond this one: Megatron-LM's default on a GPU."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    name, end = "decoder.layers.self_attention.core_attention._extra_state", "decoder.final_layernorm._extra_state"
    rank = dist.get_rank()
    found = [ShardedObject(name, None, (n_layers,), (i,), replica_id=rank) for i in range(n_layers)]
    return [*found, ShardedObject(end, None, (1,), (0,), replica_id=rank)]


@torch.no_grad()
def logits(model: Any, batch: Tensor) -> Tensor:
    b, s = batch.shape
    mask = torch.ones(1, 1, s, s, dtype=torch.bool).triu(1)
    return model(batch, torch.arange(s).expand(b, s), mask)


def save(model: Any, args: Namespace, tp: int, pp: int, out: Path) -> None:
    """Update the model by megatron-core's optimizer of fp32, and save as Megatron-LM does."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    replicas = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    settings = OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.01, params_dtype=torch.float32, clip_grad=0.0)
    optimizer = get_megatron_optimizer(settings, [replicas])
    gradients = {name: parameter.data * 0.5 for name, parameter in model.named_parameters()}
    for _ in range(STEPS):
        replicas.zero_grad_buffer()
        for name, parameter in model.named_parameters():
            parameter.main_grad.copy_(gradients[name])
        optimizer.step()
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state: dict[str, Any] = {"model": model.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = optimizer.sharded_state_dict(dict(state), metadata=metadata)
    args.consumed_train_samples, args.global_batch_size, args.micro_batch_size = SAMPLES, SAMPLES // STEPS, 4
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size = tp, pp
    common = {"args": args, "checkpoint_version": 3.0, "iteration": STEPS}
    if dist.get_rank() == 0:
        (out / NAME).mkdir(parents=True)
        (out / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
    dist.barrier()
    dist_checkpointing.save(state | common | {"opt_param_scheduler": {"num_steps": SAMPLES}}, str(out / NAME))


class OnCPU(TorchFunctionMode):
    """Tensors that are asked for on a GPU are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextlib.contextmanager
def on_a_cpu() -> Iterator[None]:
    """megatron-core where there is no GPU, and no psutil, with which it only logs how much memory it takes."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    with (
        patch.object(CudaRNGStatesTracker, "fork", lambda self, name="": contextlib.nullcontext()),
        patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        patch.object(torch.cuda, "synchronize", lambda *args: None),
        patch.object(torch.Tensor, "cuda", lambda self, *args, **options: self),
        patch.object(filesystem_async, "_process_memory", lambda: 0),
        OnCPU(),
    ):
        yield


# A process that megatron-core starts while it saves imports this file once more.
if __name__ == "__main__":
    what, folder, tp, pp, out = sys.argv[1:]
    main(what, folder, int(tp), int(pp), out)
