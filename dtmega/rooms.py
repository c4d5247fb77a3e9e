"""The rooms that only a key of the configuration opens: one function each, with the statement that imports the room.

    rooms.compiled_proof().prove(...)

A function returns the module that is the room's door. A run loads a room when it calls the room's function, and so it
loads nothing that its configuration does not ask for (`tests/test_closure.py`). All other imports stand at the top of a
file. Type checkers, linters and `lint-imports` read the statements like any import; tests/test_house.py counts a call
as an import by the caller. Call these functions when something is set up, never in code that `torch.compile` traces.
"""

from __future__ import annotations

# Families: a record for each value of [model] name.


def bloom_keys():
    """The keys of BLOOM: [model] name = "bloom"."""
    from dtmega.config.families import bloom

    return bloom


def gpt_keys():
    """The keys of GPT-2 and GPT-3: [model] name = "gpt"."""
    from dtmega.config.families import gpt

    return gpt


def bert_keys():
    """The keys of BERT: [model] name = "bert"."""
    from dtmega.config.families import bert

    return bert


def llama_keys():
    """The keys of Llama, Mistral and Qwen3: [model] name = "llama"."""
    from dtmega.config.families import llama

    return llama


def moe_keys():
    """The keys of mixtures of experts: [model] name = "moe"."""
    from dtmega.config.families import moe

    return moe


def t5_keys():
    """The keys of T5: [model] name = "t5"."""
    from dtmega.config.families import t5

    return t5


def hf_keys():
    """The keys of a model that transformers implements: [model] name = "hf"."""
    from dtmega.config.families import hf

    return hf


def bloom():
    """The record of BLOOM: [model] name = "bloom"."""
    from dtmega.families import bloom

    return bloom


def gpt():
    """The record of GPT-2 and GPT-3: [model] name = "gpt"."""
    from dtmega.families import gpt

    return gpt


def llama():
    """The record of Llama, Mistral and Qwen3: [model] name = "llama"."""
    from dtmega.families import llama

    return llama


def moe():
    """The record of mixtures of experts: [model] name = "moe"."""
    from dtmega.families import moe

    return moe


def bert():
    """The record of BERT: [model] name = "bert"."""
    from dtmega.families import bert

    return bert


def t5():
    """The record of T5: [model] name = "t5"."""
    from dtmega.families import t5

    return t5


def transformers():
    """The record of models that transformers implements: [model] name = "hf"."""
    from dtmega.interop.hf import record

    return record


def bloom_plan():
    """The plan of BLOOM: [mesh] tp."""
    from dtmega.plans import bloom

    return bloom


def gpt_plan():
    """The plan of GPT-2 and GPT-3: [mesh] tp."""
    from dtmega.plans import gpt

    return gpt


def llama_plan():
    """The plan of Llama, Mistral and Qwen3: [mesh] tp."""
    from dtmega.plans import llama

    return llama


def moe_plan():
    """The plan of mixtures of experts: [mesh] tp."""
    from dtmega.plans import moe

    return moe


def bert_plan():
    """The plan of BERT: [mesh] tp."""
    from dtmega.plans import bert

    return bert


def t5_plan():
    """The plan of T5: [mesh] tp."""
    from dtmega.plans import t5

    return t5


def bloom_formats():
    """The files of BLOOM in other programs: [model] init_from, convert, inspect."""
    from dtmega.interop.formats import bloom

    return bloom


def gpt_formats():
    """The files of GPT-2 and GPT-3 in other programs: [model] init_from, convert, inspect."""
    from dtmega.interop.formats import gpt

    return gpt


def llama_formats():
    """The files of Llama, Mistral and Qwen3 in other programs: [model] init_from, convert, inspect."""
    from dtmega.interop.formats import llama

    return llama


def moe_formats():
    """The files of mixtures of experts in other programs: [model] init_from, convert, inspect."""
    from dtmega.interop.formats import moe

    return moe


def bert_formats():
    """The files of BERT in other programs: [model] init_from, convert, inspect."""
    from dtmega.interop.formats import bert

    return bert


def t5_formats():
    """The files of T5 in other programs: [model] init_from, convert, inspect."""
    from dtmega.interop.formats import t5

    return t5


def transformers_files():
    """The files of a model that transformers implements, with weights to start from or to convert."""
    from dtmega.interop.hf.files import record

    return record


def plans_of_transformers():
    """Plans of tensor parallelism for models of transformers: [mesh] tp."""
    from dtmega.interop.hf.tp import parallel

    return parallel


def tiny_transformers():
    """Small copies of models of transformers, on which proofs run."""
    from dtmega.interop.hf.tp import tiny

    return tiny


def rows_proof():
    """The proof that a model of transformers computes each row by itself: packed rows, [mesh] cp, pp and tp."""
    from dtmega.interop.hf import rows_proof

    return rows_proof


def context_proof():
    """The proof that a model of transformers computes the same over [mesh] cp."""
    from dtmega.interop.hf import context_proof

    return context_proof


def transformers_over_cp():
    """Attention of transformers' models over ranks that share sequences: [mesh] cp."""
    from dtmega.interop.hf import context

    return context


def experts_of_transformers():
    """Experts of transformers' models on several ranks: [mesh] ep."""
    from dtmega.interop.hf import expert_parallel

    return expert_parallel


def longrope():
    """Rotary frequencies that depend on the length of a conversation: rope_type = longrope in config.json."""
    from dtmega.interop.hf import rope

    return rope


def stored():
    """The weights that a run starts with: [model] init_from, or [model] path with weights."""
    from dtmega.interop import stored

    return stored


def config_json():
    """The config.json in a folder of transformers: [model] init_from."""
    from dtmega.interop.hf.files import config_json

    return config_json


# Configuration: what its reading needs only sometimes.


def mixtures():
    """The notation for mixtures of corpora: [data] train, test and validation."""
    from dtmega.config import mixtures

    return mixtures


def config_help():
    """The list of keys: `--help`."""
    from dtmega.config import help

    return help


def refusals():
    """The words about a wrong configuration."""
    from dtmega.config import refusals

    return refusals


def suggestions():
    """Suggestions for names that do not exist, of keys, sections and files."""
    from dtmega.config import suggestions

    return suggestions


# Data: objectives, orders, preparing, object stores.


def next_token():
    """The objective of causal models that learn each token of running text."""
    from dtmega.data.objectives import next_token

    return next_token


def prefixes():
    """The objective of prefix language models: [data] objective = "prefix-lm"."""
    from dtmega.data.objectives import prefixes

    return prefixes


def conversations():
    """The objective whose samples are conversations: [data] objective = "conversations"."""
    from dtmega.data.objectives import conversations

    return conversations


def masked_tokens():
    """The objective of BERT."""
    from dtmega.data.objectives.denoising import masked

    return masked


def hidden_spans():
    """The objectives of T5."""
    from dtmega.data.objectives.denoising import span_objectives

    return span_objectives


def megatron_order():
    """Samples in the order of a Megatron run: [data] order."""
    from dtmega.data.megatron import order

    return order


def stdlib_corpus():
    """The default corpus, made where it is not there yet."""
    from dtmega.data.preparing import corpus

    return corpus


def shipped_conversations():
    """The default corpus of conversations."""
    from dtmega.data.preparing import conversations

    return conversations


def blends():
    """Samples from several corpora: several prefixes in [data] path, or a mixture."""
    from dtmega.data.sampling import blend

    return blend


def data_workers():
    """Processes that make batches: [data] num_workers."""
    from dtmega.data import workers

    return workers


def wordpiece():
    """Vocabularies of WordPieces: [data] tokenizer = "stdlib-wordpiece" or "bert:PATH"."""
    from dtmega.data.tokenizers import wordpiece

    return wordpiece


def confined_tokenizer():
    """A tokenizer.json as [data] tokenizer."""
    from dtmega.data.tokenizers import tokenizer_child

    return tokenizer_child


def stored_pairs():
    """Token files in an object store: a URL of a store as [data] path."""
    from dtmega.data.indexed_files import stored

    return stored


def stored_rows():
    """Rows of samples whose tokens are in an object store."""
    from dtmega.data.objectives import stored_rows

    return stored_rows


# Training: what a step may do beside training, and what a run may report.


def dry_run():
    """The check whether a run would start, without starting it: `--dry-run`."""
    from dtmega.planning.answers import dry_run

    return dry_run


def compiled_proof():
    """The proof that compiled blocks compute what eager blocks do: [compile] enable."""
    from dtmega.training import compiled_proof

    return compiled_proof


def exact():
    """Sums with the same bits on every layout: [run] exact."""
    from dtmega.training import exact

    return exact


def exact_machine():
    """Description of the machine, on which the bits of products depend: [run] exact."""
    from dtmega.training.exact import machine

    return machine


def exact_record():
    """The digests of each step, for `dtmega replay`: [run] exact."""
    from dtmega.training.exact import record

    return record


def loss_scale():
    """A factor on the loss: [precision] params = "float16"."""
    from dtmega.training import loss_scale

    return loss_scale


def spikes():
    """Steps with a conspicuous loss or gradient, which are skipped: [train] skip_spikes."""
    from dtmega.ops.optim import spikes

    return spikes


def profile():
    """Traces of chosen steps: [profile], or a file `profile-now` in the run directory."""
    from dtmega.training import profile

    return profile


def trackers():
    """wandb, mlflow and trackio: [log] trackers."""
    from dtmega.training.records import trackers

    return trackers


def rank_log():
    """A log of each rank: [log] ranks = "all"."""
    from dtmega.training.records import rank_log

    return rank_log


def expert_loads():
    """The record of the experts' loads: models with experts."""
    from dtmega.training.records import loads

    return loads


# Layouts: axes of the mesh, adapters, experts, optimizers.


def compiled_softmax():
    """Compiled kernels of the loss: [compile] enable on a GPU."""
    from dtmega.ops import compiled_softmax

    return compiled_softmax


def cpu_attention():
    """Attention as batched products: a CPU with bfloat16 instructions."""
    from dtmega.ops.cpu import attention

    return attention


def context_parallel():
    """Ranks that share sequences: [mesh] cp."""
    from dtmega.ops import context_parallel

    return context_parallel


def plans():
    """Plans of tensor parallelism: [mesh] tp."""
    from dtmega import plans

    return plans


def schedule():
    """Schedules of pipelines: [mesh] pp."""
    from dtmega.pipelining import schedule

    return schedule


def lora():
    """Low-rank adapters: [lora] rank."""
    from dtmega.models import lora

    return lora


def lora_proof():
    """The proof that adapters learn: [lora] rank."""
    from dtmega.models.lora import proof

    return proof


def block_masks():
    """FlexAttention's masks: a GPU."""
    from dtmega.ops import block_mask

    return block_mask


def pipelined():
    """The stages of a run with a pipeline: [mesh] pp."""
    from dtmega.training import pipelined

    return pipelined


def drawn_schedule():
    """The drawing of a schedule: [pipeline] draw."""
    from dtmega.pipelining import draw

    return draw


def fsdp():
    """Weights that FSDP2 shards or casts: [mesh] dp_shard and cp, [fsdp], [precision] with several ranks."""
    from dtmega.fsdp import wrapped

    return wrapped


def masters():
    """Casts of weights that one rank holds as a whole: [precision] params."""
    from dtmega.fsdp import masters

    return masters


def replicas():
    """Sums of gradients over whole copies: [mesh] dp_replicate."""
    from dtmega.fsdp import replicas

    return replicas


def shard_sums():
    """Sums of gradients over ranks after each microbatch of a pipeline: [fsdp] accumulate with [mesh] pp."""
    from dtmega.fsdp import shard_sums

    return shard_sums


def expert_parallel():
    """Experts on several ranks: [mesh] ep."""
    from dtmega.ops import expert_parallel

    return expert_parallel


def routing():
    """The loads of experts, in models that count them."""
    from dtmega.models import routing

    return routing


def recompute():
    """Activations that backward computes again: [recompute] mode."""
    from dtmega.training import recompute

    return recompute


def amx_products():
    """Faster products of linear layers: bfloat16 on a CPU with AMX."""
    from dtmega.ops.cpu import linear

    return linear


def adapter_proof():
    """The proof of adapters on a small copy of the model, where a run starts: [lora] rank."""
    from dtmega.training import adapter_proof

    return adapter_proof


def sharded_adapters():
    """The placements of adapters over tp: [lora] rank with [mesh] tp."""
    from dtmega.plans import adapters

    return adapters


def weights_beside():
    """The weights that a run reads beside its checkpoints: [model] init_from and path."""
    from dtmega.training import weights_beside

    return weights_beside


def muon():
    """An optimizer that orthogonalises whole matrices: [optim] name = "muon"."""
    from dtmega.ops.optim import muon

    return muon


# Checkpoints and files: object stores, starting weights, files of other programs.


def remote():
    """Checkpoints under a URL: [checkpoint] dir and resume, [model] init_from."""
    from dtmega.checkpoint import remote

    return remote


def changes():
    """Keys that differ from the stored ones: a run that resumes with another configuration."""
    from dtmega.checkpoint import changes

    return changes


def starting():
    """Weights that a run reads beside its checkpoints: [model] init_from or path, [lora], [train] freeze."""
    from dtmega.checkpoint import starting

    return starting


def staging():
    """Copies of tensors that a thread writes: [checkpoint] mode = "async"."""
    from dtmega.checkpoint import staging

    return staging
