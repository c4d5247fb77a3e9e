"""Train a local Hugging Face model with tensor parallelism: load, shard, three steps, save.

torchrun --nproc-per-node 2 examples/hf_tp.py DIR OUT     # DIR has config.json and weights; OUT is written
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from dtmega.ops.shards import full_tensor
from dtmega.plans import parallelize_hf, plan_for

if len(sys.argv) != 3:
    print("usage: torchrun --nproc-per-node 2 examples/hf_tp.py DIR OUT", file=sys.stderr)
    sys.exit(2)
source, target = sys.argv[1:]
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group()
mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).to(device).train()
if dist.get_rank() == 0:
    print(plan_for(model, mesh.size()))
parallelize_hf(model, mesh)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(0)  # all tp ranks need the same batches and the same dropout
tokens = torch.randint(model.config.vocab_size, (4, 64), device=device)
for step in range(3):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step + 1}: loss {loss.item():.4f}, gradient norm {norm.full_tensor().item():.3f}")

# `full_tensor` is a collective, so every rank calls it.
weights = {name: full_tensor(parameter).cpu() for name, parameter in model.state_dict().items()}
if dist.get_rank() == 0:
    model.save_pretrained(target, state_dict=weights)
dist.barrier()
dist.destroy_process_group()
