# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Fine-tune a local Hugging Face model on one GPU, cell by cell
#
# Run `python examples/one_gpu.py DIR OUT STEPS`, or open `one_gpu.ipynb` and set the three variables below. DIR has
# config.json, *.safetensors and tokenizer.json; if it does not exist, a tiny Llama with random weights is made there.
# It also runs on a CPU. Every cell uses a part of what `train.py` is made of. For many GPUs, checkpoints and restarts,
# run `torchrun train.py --config hf.toml --model.path DIR` instead.

# %%
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils.logging import disable_progress_bar

from dtmega import config, families, mesh
from dtmega.checkpoint.weights import load_weights
from dtmega.data.loader import TrainBatches
from dtmega.data.objectives.next_token import NEXT_TOKEN
from dtmega.data.text import open_text
from dtmega.data.tokenizers.tokenizer_json import to_json
from dtmega.interop import stored
from dtmega.models.generate import Sampling, generate
from dtmega.ops import cost, optim
from dtmega.ops.shards import local
from dtmega.training.checks import check
from dtmega.training.choices import with_micro_batch_size
from dtmega.training.parallelize import parallelize

# %% tags=["parameters"]
directory = "runs/one-gpu/model"
out = "runs/one-gpu/trained"
steps = 30

# %% [markdown]
# A script takes these values from its command line. In a notebook the command line belongs to the kernel.

# %%
disable_progress_bar()
if "ipykernel" not in sys.modules:
    if len(sys.argv) != 4 or not sys.argv[3].isdigit():
        print("usage: python examples/one_gpu.py DIR OUT STEPS", file=sys.stderr)
        sys.exit(2)
    directory, out, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
if not Path(directory).exists():
    torch.manual_seed(0)
    tiny = LlamaConfig(
        vocab_size=8192,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    AutoModelForCausalLM.from_config(tiny).save_pretrained(directory)
    Path(directory, "tokenizer.json").write_text(to_json("stdlib-8k"))

# %% [markdown]
# The configuration. `resolve` takes sizes and tokenizer from the model's directory, `check` refuses what cannot run.

# %%
overrides = {
    "model.path": directory,
    "train.steps": steps,
    "data.seq_len": 64,
    "data.num_workers": 0,
    "batch.global_batch_size": 4,
    "optim.lr": 1e-3,
    "optim.warmup": 0,
    "optim.schedule": "constant",
}
argv = [text for key, value in overrides.items() for text in (f"--{key}", str(value))]
cfg = families.resolve(config.load(["--config", "hf.toml", *argv]))
device = mesh.pick_device(cfg.run.device)
sizes = mesh.resolve(cfg.mesh, world=1)
cfg = with_micro_batch_size(cfg, sizes)
check(cfg, sizes, device)
text = open_text(cfg, NEXT_TOKEN)
n_parameters = cost.n_parameters(families.pieces(cfg.model))
print(f"{n_parameters:,} parameters on {device}; {text.samples('train').n_tokens:,} tokens to read")

# %% [markdown]
# The model: transformers' own code and names, bf16 with fp32 master weights, the loss fused with the head.

# %%
model = parallelize(cfg, mesh.start(device, sizes))
weights = stored.weights(cfg.model)
if weights is None:
    model.draw(cfg.run.seed)
else:
    load_weights(weights, model.named_parameters(), cfg.model.vocab_size)
optimizer = optim.build_optimizer(model.named_parameters(), cfg.optim)

# %% [markdown]
# The training loop. Batch n is a function of the seed and n.

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
    if step <= 3 or step % 10 == 0:
        print(f"step {step}: loss {loss:.4f}, gradient norm {norm:.3f}")

# %% [markdown]
# The loss of each step.

# %%
if "ipykernel" in sys.modules:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    axes.plot(range(1, steps + 1), losses)
    axes.set(xlabel="step", ylabel="loss", title=f"{n_parameters:,} parameters on {device}")
    plt.show()

# %% [markdown]
# A sample, and a directory that `from_pretrained` loads.

# %%
prompt = text.tokenizer.encode("def ")
sampling = Sampling(vocab_size=text.tokenizer.vocab_size, end_ids=frozenset({text.tokenizer.eod_id}))
print("def " + text.tokenizer.decode(generate(model.stages[0], prompt, 16, sampling)))

# %%
model.release()  # sampling leaves the weights gathered, in bf16
hf = model.stages[0].hf  # on one device each local part is the whole parameter
hf.save_pretrained(out, state_dict={name: local(p).detach().cpu() for name, p in hf.state_dict().items()})
trained = AutoModelForCausalLM.from_pretrained(out)
print(f"{trained.num_parameters():,} parameters in {out}")

# %%
torch.distributed.destroy_process_group()
