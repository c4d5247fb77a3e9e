import torch

# Two threads on two busy cores wait for each other longer than one of them computes.
torch.set_num_threads(1)
