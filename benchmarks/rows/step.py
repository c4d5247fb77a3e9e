"""A whole training step beside transformers', on the same weights and the same batch."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows import ours, peers
from benchmarks.rows.measure import Row, check_losses, cpu_ms, peak_mib, top_operators

BF16_LOSS = 2e-3  # BLOOM of transformers rounds its scores to bf16, ours does not
SIZES = {"hidden_size": 512, "n_heads": 8}
BATCH = {"batch.micro_batch_size": 4, "batch.global_batch_size": 4, "data.seq_len": 512}


def keys(folder: Path, sizes: dict[str, int]) -> dict[str, Any]:
    model = {f"model.{key}": value for key, value in sizes.items()}
    return BATCH | model | {"model.init_from": str(folder), "precision.params": "float32"}


def bloom(quick: bool) -> list[Row]:
    """BLOOM, 41.6M parameters, B 4, S 512."""
    sizes = SIZES | {"n_layers": 8, "vocab_size": 32768}
    with ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        peers.bloom(folder, **sizes)
        equal = _equal("bloom.toml", folder, keys(folder, sizes), peers.causal_inputs)
        bf16 = keys(folder, sizes) | {"precision.params": "bfloat16"}
        eager = ours.Stepper(ours.begin("bloom.toml", bf16 | {"compile.enable": "false"}, closing))
        compiled = ours.Stepper(ours.begin("bloom.toml", bf16 | {"compile.enable": "true"}, closing))
        inputs = peers.causal_inputs(eager.batch.microbatches[0])
        theirs = peers.HfStep(peers.loaded(folder), inputs, autocast=True, compiled=False)
        theirs_compiled = peers.HfStep(peers.loaded(folder), inputs, autocast=True, compiled=True)
        truth, _ = theirs()
        equal += f", bf16 {check_losses(eager().loss, truth, BF16_LOSS)}"
        check_losses(compiled().loss, truth, BF16_LOSS)
        check_losses(theirs_compiled()[0], truth, BF16_LOSS)
        forms: dict[str, Callable[[], object]] = {
            "HF": theirs,
            "HF compiled": theirs_compiled,
            "eager": eager,
            "compiled": compiled,
        }
        ms = cpu_ms(forms, rounds=3 if quick else 7)
        top = top_operators(compiled)
        name = "BLOOM step, bf16, S 512"
        return [
            Row(f"{name}, compiled", "HF eager", ms["compiled"], ms["HF"], "CPU ms", 0.50, equal, top),
            Row(f"{name}, compiled", "HF compiled", ms["compiled"], ms["HF compiled"], "CPU ms", 0.80, equal, top),
            Row(f"{name}, eager", "HF eager", ms["eager"], ms["HF"], "CPU ms", 0.60, equal, top_operators(eager)),
        ]


def memory(quick: bool) -> list[Row]:
    """The most memory that the same step takes over what stands between steps: weights and AdamW's state."""
    sizes = SIZES | {"n_layers": 8, "vocab_size": 32768}
    with ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        peers.bloom(folder, **sizes)
        bf16 = keys(folder, sizes) | {"precision.params": "bfloat16", "compile.enable": "true"}
        step = ours.Stepper(ours.begin("bloom.toml", bf16, closing))
        theirs = peers.HfStep(
            peers.loaded(folder), peers.causal_inputs(step.batch.microbatches[0]), autocast=True, compiled=False
        )
        equal = f"bf16 {check_losses(step().loss, theirs()[0], BF16_LOSS)}"
        forms: dict[str, Callable[[], object]] = {"HF": theirs, "ours": step}
        most = dict.fromkeys(forms, 0.0)
        for _ in range(2 if quick else 4):
            for name, form in forms.items():
                form()
                step.run.optimizer.zero_grad()  # as theirs leaves it
                most[name] = max(most[name], peak_mib(form))
                step.run.optimizer.zero_grad()
        name = "BLOOM step, bf16, S 512, compiled: peak memory"
        return [Row(name, "HF eager", most["ours"], most["HF"], "MiB over steady", 0.30, equal)]


def llama(quick: bool) -> list[Row]:
    """A Llama of 4 layers with 2 heads of keys for 8 of queries."""
    sizes = SIZES | {"n_layers": 4, "vocab_size": 32768}
    more = {"model.n_kv_heads": 2, "model.ffn_hidden_size": 1408, "model.max_position_embeddings": 2048}
    return _compiled(
        "Llama-shaped step, bf16, S 512", "llama.toml", sizes, more, peers.llama, peers.causal_inputs, quick
    )


def bert(quick: bool) -> list[Row]:
    """A BERT of 4 layers, whose heads predict masked words and the order of two segments."""
    sizes = SIZES | {"n_layers": 4, "vocab_size": 8192}
    more = {
        "model.max_position_embeddings": 512,
        "model.norm": "post",
        "model.layer_norm_eps": 1e-12,
        "data.tokenizer": "stdlib-wordpiece",
    }
    return _compiled("BERT-shaped step, bf16, S 512", "bert.toml", sizes, more, peers.bert, _bert_inputs, quick)


def _bert_inputs(microbatch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        "input_ids": microbatch["tokens"],
        "token_type_ids": microbatch["token_types"],
        "attention_mask": 1 - microbatch["document_ids"],
        "labels": microbatch["labels"],
        "next_sentence_label": microbatch["swapped"],
    }


def _compiled(
    name: str,
    config: str,
    sizes: dict[str, int],
    more: dict[str, Any],
    write: Callable[..., None],
    inputs_of: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    quick: bool,
) -> list[Row]:
    """The compiled step of a family beside the compiled one of transformers."""
    with ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        write(folder, **sizes)
        base = keys(folder, sizes) | more
        equal = _equal(config, folder, base, inputs_of)
        compiled = base | {"precision.params": "bfloat16", "compile.enable": "true"}
        step = ours.Stepper(ours.begin(config, compiled, closing))
        inputs = inputs_of(step.batch.microbatches[0])
        theirs = peers.HfStep(peers.loaded(folder), inputs, autocast=True, compiled=True)
        equal += f", bf16 {check_losses(step().loss, theirs()[0], BF16_LOSS)}"
        forms: dict[str, Callable[[], object]] = {"HF compiled": theirs, "ours": step}
        ms = cpu_ms(forms, rounds=3 if quick else 7)
        return [
            Row(
                f"{name}, compiled",
                "HF compiled",
                ms["ours"],
                ms["HF compiled"],
                "CPU ms",
                0.85,
                equal,
                top_operators(step),
            )
        ]


def _equal(config: str, folder: Path, base: dict[str, Any], inputs_of: Callable[..., dict[str, torch.Tensor]]) -> str:
    """Compare loss and norm of the gradient of one step in fp32."""
    with ExitStack() as closing:
        fp32 = base | {"precision.params": "float32", "compile.enable": "false"}
        step = ours.Stepper(ours.begin(config, fp32, closing))
        loss, norm = peers.HfStep(
            peers.loaded(folder), inputs_of(step.batch.microbatches[0]), autocast=False, compiled=False
        )()
        outcome = step()
        check_losses(outcome.grad_norm, norm, 1e-3)  # BLOOM of transformers adds slope * place, some hundreds
        said = f"fp32 {check_losses(outcome.loss, loss)}"
    gc.collect()
    return said


BENCHMARKS = {"bloom": bloom, "memory": memory, "llama": llama, "bert": bert}
