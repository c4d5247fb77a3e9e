# %% [markdown]
# # Fine-tune a local Hugging Face model on one GPU, cell by cell
#
# `python examples/one_gpu.py DIR OUT`, or open it as a notebook (VS Code, Jupytext) and set the three names below. DIR
# has config.json, *.safetensors and tokenizer.json; a CPU does too. Every cell is a piece that `train.py` is made of:
# for many GPUs, checkpoints and restarts run `torchrun train.py --config hf.toml --model.path DIR` instead.

# %%
import sys

import torch

from dtmega import config, cost, families, mesh, optim
from dtmega.checkpoint.weights import load_weights
from dtmega.data.loader import TrainBatches
from dtmega.data.objectives import NEXT_TOKEN
from dtmega.data.text import open_text
from dtmega.fsdp import release
from dtmega.models.generate import generate
from dtmega.parallelize import check, fitted, parallelize
from dtmega.shards import local

directory, out, steps = sys.argv[1], sys.argv[2], 3

# %% [markdown]
# The configuration, checked against the directory: sizes and tokenizer are the model's.

# %%
overrides = {"model.path": directory, "train.steps": steps, "data.seq_len": 64, "data.num_workers": 0, "optim.lr": 1e-4}
overrides |= {"batch.global_batch_size": 4, "optim.warmup": 0, "optim.schedule": "constant"}
argv = [text for key, value in overrides.items() for text in (f"--{key}", str(value))]
cfg = families.resolve(config.load(["--config", "hf.toml", *argv]))
device, sizes = mesh.pick_device(cfg.run.device), mesh.resolve(cfg.mesh, world=1)
cfg = fitted(cfg, sizes)
check(cfg, sizes, device)
text = open_text(cfg, NEXT_TOKEN)
n_parameters = cost.n_parameters(families.pieces(cfg.model))
print(f"{n_parameters:,} parameters on {device}; {text.samples('train').n_tokens:,} tokens to read")

# %% [markdown]
# The model: transformers' own code and names, bf16 with fp32 masters, its loss fused with the head.

# %%
model = parallelize(cfg, mesh.start(device, sizes))
weights = families.of(cfg.model).weights(cfg.model)
if weights is None:
    model.draw(cfg.run.seed)
else:
    load_weights(weights, model.named_parameters(), cfg.model.vocab_size)
optimizer = optim.build_optimizer(model.named_parameters(), cfg.optim)

# %% [markdown]
# Steps. Batch n is a function of the seed and n: run the cell again, and it goes on.

# %%
batches = TrainBatches(text.rows("train"), cfg.data, cfg.batch, rank=0, world=1)
losses: list[float] = []
for step in range(1, steps + 1):
    microbatches = [{name: t.to(device) for name, t in m.items()} for m in next(batches).microbatches]
    n_tokens = sum(m["labels"].numel() for m in microbatches)
    loss = model.forward_backward(microbatches, {"tokens": n_tokens}).item() / n_tokens
    gradients = model.gradients()
    norm = optim.total_norm(gradients, device, model.world.groups["shards"])
    optim.clip_gradients(gradients, norm, cfg.optim.clip_grad)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss)
    print(f"step {step}: loss {loss:.4f}, gradient norm {norm:.3f}")

# %% [markdown]
# A sample, and a directory that `from_pretrained` loads.

# %%
prompt = text.tokenizer.encode("def ")
vocabulary = {"vocab_size": text.tokenizer.vocab_size, "eod_id": text.tokenizer.eod_id}
print("def " + text.tokenizer.decode(generate(model.stages[0], prompt, 16, **vocabulary, seed=0)))

# %%
release(model.stages[0])  # which sampling leaves gathered, in bf16
hf = model.stages[0].hf  # on one device each part is the whole
hf.save_pretrained(out, state_dict={name: local(p).detach().cpu() for name, p in hf.state_dict().items()})
torch.distributed.destroy_process_group()
