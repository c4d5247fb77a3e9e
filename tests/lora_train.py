"""Adapters on models of transformers: a plain loop in one process, and the trainer's on several layouts.

The plain loop knows nothing of dtmega or peft: each adapter is two matrices beside a linear layer, whose result a hook
adds. `hf_train.py` has the batches, whose sequences have unequal numbers of labels, and the layouts.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from dtmega import config
from dtmega.checkpoint.base import Base
from dtmega.interop import stored
from dtmega.mesh import World
from dtmega.models.initial import draw
from dtmega.models.lora import is_adapter
from dtmega.ops import optim
from dtmega.ops.shards import boxes, local
from dtmega.training.parallelize import parallelize
from dtmega.training.sharded_model import ShardedModel
from dtmega.training.step import train_step
from dtmega.training.weights_beside import load_beside
from tests import hf_models, hf_train
from tests.hf_models import Case

RANK, ALPHA = 3, 12.0  # no layout divides the rank


class Asked(NamedTuple):
    """A model with adapters.

    Attributes:
        case: the model.
        targets: value of [lora] targets.
        ends: ends of the names of those layers in transformers.
        steps: number of steps.
    """

    case: Case
    targets: str | tuple[str, ...]
    ends: tuple[str, ...]
    steps: int = 4


def initial_a(name: str, inputs: int) -> Tensor:
    """Values of A for the layer with this name, [r, in]."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(RANK, inputs, generator=generator) / inputs**0.5


def plain(where: str, ends: Sequence[str]) -> tuple[Any, dict[str, nn.Parameter]]:
    """transformers' model with adapters beside its layers, and the adapters' parameters by dtmega's names."""
    options = {"dtype": torch.float32, "experts_implementation": "eager"}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(where, **options).train().requires_grad_(False)
    adapters: dict[str, nn.Parameter] = {}
    for name, module in model.named_modules():
        if not name.endswith(tuple(ends)):
            continue
        rows, columns = module.weight.shape
        outputs, inputs = (rows, columns) if isinstance(module, nn.Linear) else (columns, rows)
        a = adapters[f"{name}.lora_a"] = nn.Parameter(initial_a(name, inputs))
        b = adapters[f"{name}.lora_b"] = nn.Parameter(torch.zeros(outputs, RANK))

        def add(_: nn.Module, args: Any, out: Tensor, a: Tensor = a, b: Tensor = b) -> Tensor:
            return out + (ALPHA / RANK) * (args[0] @ a.T @ b.T)

        module.register_forward_hook(add)
    return model, adapters


def with_peft(where: str, ends: Sequence[str]) -> tuple[Any, dict[str, nn.Parameter]]:
    """The same with peft's adapters."""
    import peft

    base = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).train()
    settings = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=[*ends], task_type="CAUSAL_LM")
    model: Any = peft.get_peft_model(base, settings)
    adapters: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            name = name.removeprefix("base_model.model.").removesuffix(".default.weight")
            layer, _, matrix = name.rpartition(".")
            adapters[f"{layer}.{matrix.lower()}"] = parameter
            if matrix == "lora_A":
                with torch.no_grad():
                    parameter.copy_(initial_a(layer, parameter.shape[1]))
    return model, adapters


def truth(where: str, asked: Asked) -> dict[str, Any]:
    """Losses of steps of torch's AdamW on the plain model, and the adapters after them."""
    return plain_steps(*plain(where, asked.ends), asked.steps)


def plain_steps(model: Any, adapters: Mapping[str, nn.Parameter], n_steps: int) -> dict[str, Any]:
    """Losses of steps of torch's AdamW, the adapters after them, and the bytes that AdamW keeps."""
    settings = {"lr": hf_train.LR, "betas": (0.9, 0.95), "eps": hf_train.EPS, "weight_decay": hf_train.DECAY}
    optimizer = torch.optim.AdamW(adapters.values(), **settings)
    losses = []
    for step in range(n_steps):
        optimizer.zero_grad()
        tokens, labels = hf_train.batch(model.config.vocab_size, step)
        total = torch.zeros(())
        for row in range(len(tokens)):  # a microbatch each; the divisor is the whole batch's
            logits = model(tokens[row : row + 1]).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels[row], reduction="sum") / (labels != -100).sum()
            loss.backward()
            total += loss.detach()
        losses.append(total.item())
        torch.nn.utils.clip_grad_norm_(adapters.values(), hf_train.CLIP)
        optimizer.step()
    kept = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return {
        "losses": losses,
        "adapters": {name: p.detach().clone() for name, p in adapters.items()},
        "bytes": sum(moment.nbytes for moment in kept),
    }


def truths(every: Sequence[Asked]) -> tuple[dict[Asked, str], str]:
    """Directories, and a file of {asked: truth}."""
    directories = hf_models.saved([asked.case for asked in every])
    path = Path(next(iter(directories.values()))).parent / f"{zlib.crc32(repr(every).encode())}-lora.pt"
    torch.save({asked: truth(directories[asked.case], asked) for asked in every}, path)
    return {asked: directories[asked.case] for asked in every}, str(path)


def configured(where: str, keys: Mapping[str, Any], asked: Asked, **more: dict[str, Any]) -> config.Config:
    targets = asked.targets if isinstance(asked.targets, str) else [*asked.targets]
    lora = {"rank": RANK, "alpha": ALPHA, "targets": targets, **more.pop("lora", {})}
    return hf_train.configured(where, keys, lora=lora, train={"steps": asked.steps}, **more)


def ready(cfg: config.Config, world: World) -> tuple[ShardedModel, Base]:
    """The model with its base's weights and new adapters, and what is known of the base."""
    source = stored.weights(cfg.model)
    assert source is not None
    model = parallelize(cfg, world)
    base = load_beside(model, source, cfg, None, list)
    assert base is not None
    return model, base


def are_drawn(model: ShardedModel, seed: int) -> bool:
    """True if each A has the values that the seed gives the whole matrix."""
    for name, parameter in model.named_parameters():
        if name.endswith(".lora_a"):
            whole = torch.empty(parameter.shape)
            draw(whole, name, seed, 1 / (3 * parameter.shape[1]) ** 0.5, 0.0)
            if not all(torch.equal(box.part, whole[box.where]) for box in boxes(parameter.detach())):
                return False
    return True


@torch.no_grad()
def put_initial(model: ShardedModel) -> None:
    """Give A the values of the plain loop."""
    for name, parameter in model.named_parameters():
        if name.endswith(".lora_a"):
            whole = initial_a(name.removesuffix(".lora_a"), parameter.shape[1])
            for box in boxes(parameter):
                box.part.copy_(whole[box.where])


def steps(cfg: config.Config, world: World, model: ShardedModel) -> list[float]:
    """Losses of all steps as the trainer does them."""
    optimizer = optim.build_optimizer(model.named_parameters(), cfg.optim)
    parts = {"cfg": cfg, "world": world, "model": model, "optimizer": optimizer}
    run: Any = SimpleNamespace(**parts, spikes=None, watch=Mock(), phases=Mock(), loss_scale=None)
    return [train_step(run, hf_train.microbatches(world, cfg, i))[0] for i in range(cfg.train.steps)]


def numbers(world: World, keys: dict[str, Any], directories: dict[Asked, str], path: str) -> dict[Asked, Any]:
    """The distance from the plain loop, and the digests of the base."""
    expected, found = torch.load(path, weights_only=False), {}
    for asked, where in directories.items():
        cfg = configured(where, keys, asked)
        model, base = ready(cfg, world)
        drawn = are_drawn(model, cfg.run.seed)
        put_initial(model)
        losses = steps(cfg, world, model)
        adapters = {name: p for name, p in model.named_parameters() if is_adapter(name)}
        found[asked] = {
            "losses": max(abs(a / b - 1) for a, b in zip(losses, expected[asked]["losses"], strict=True)),
            "adapters": hf_train.errors(adapters, expected[asked]["adapters"]),
            "drawn": drawn,
            "digests": base.digests,
            "bytes": sum(8 * local(p.detach()).numel() for p in model.counted_once().values() if p.requires_grad),
        }
    return found


def rounded(world: World, keys: dict[str, Any], where: str, asked: Asked) -> dict[str, Any]:
    """Losses in bfloat16 with the base in either dtype, and the bytes of the frozen parameters."""
    found: dict[str, Any] = {}
    for base in ("float32", "bfloat16"):
        cfg = configured(where, keys, asked, lora={"base": base}, precision={"params": "bfloat16"})
        model, _ = ready(cfg, world)
        put_initial(model)
        losses = steps(cfg, world, model)
        frozen = sum(local(p).nbytes for _, p in model.named_parameters() if not p.requires_grad)
        found[base] = {"losses": losses, "bytes": frozen}
    return found
