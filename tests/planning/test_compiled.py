"""planning/counting/compiled.py against Inductor, and compiled blocks of a plan against eager ones."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from torch import Tensor, nn

from dtmega.planning.counting import compiled
from dtmega.planning.plan import totals
from tests import ranks
from tests.planning import real_step
from tests.planning.test_counts import DROPOUT, LLAMA, SMALL, TIMEOUT_S

GPU = torch.device("cuda", 0)
OF_BLOCKS = "activations of layers."


class Block(nn.Module):
    """A layer norm and two products with a GELU between them, added to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)), approximate="tanh"))


def kept(block: nn.Module) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what a block keeps for backward, its parameters left out."""
    addresses = {parameter.data_ptr() for parameter in block.parameters()}
    found = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in addresses:
            found.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = block(torch.ones(8, 16, requires_grad=True))
    out.sum().backward()
    return sorted(found, key=str)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a compiler")
def test_a_block_keeps_for_backward_what_it_keeps_with_inductor():
    block = Block()
    with compiled.counted():
        here = kept(torch.compile(block))  # pyright: ignore[reportArgumentType]
    assert here == kept(torch.compile(block))  # pyright: ignore[reportArgumentType]


@pytest.mark.full
@pytest.mark.parametrize("keys", [DROPOUT, LLAMA], ids=["bloom", "llama"])
def test_compiled_blocks_have_the_flops_and_gradients_of_eager_ones_and_keep_less(keys: dict):
    few = SMALL | keys | {"model.n_layers": 2, "batch.global_batch_size": 2}
    eager, fused = (
        ranks.run(1, real_step.planned, real_step.nested(few | {"compile.enable": on}), GPU, timeout_s=TIMEOUT_S)[0]
        for on in (False, True)
    )
    assert sum(totals(fused).flops.values()) == sum(totals(eager).flops.values())
    assert fused.held == eager.held
    kept_bytes = []
    for role in (eager, fused):
        (forward,) = (span for span in role.spans if span.action == "0F0")
        kept_bytes.append(math.fsum(n for owner, n in forward.at_peak.items() if owner.startswith(OF_BLOCKS)))
    assert kept_bytes[1] < kept_bytes[0]
