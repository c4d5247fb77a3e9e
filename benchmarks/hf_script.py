"""The training script that a user of transformers would write: `hf_script.py MODEL TOKENS.npy STEPS [compile]`.

TOKENS is an array [samples, S + 1]. Each step takes the next four samples. The script uses bf16 autocast, fused AdamW
and gradient clipping. The last line of the output holds the losses, as JSON.
"""

import json
import sys

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM

BATCH = 4


class Tokens(Dataset):
    def __init__(self, path: str) -> None:
        self.rows = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.from_numpy(self.rows[i].astype(np.int64))


def main(model: str, tokens: str, steps: str, *how: str) -> None:
    network = AutoModelForCausalLM.from_pretrained(model).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    forward = torch.compile(network) if "compile" in how else network
    losses = []
    for _, rows in zip(range(int(steps)), DataLoader(Tokens(tokens), batch_size=BATCH), strict=False):
        inputs, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        with torch.autocast("cpu", torch.bfloat16):
            loss = forward(input_ids=inputs, labels=labels, shift_labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(json.dumps(losses))


if __name__ == "__main__":
    main(*sys.argv[1:])
