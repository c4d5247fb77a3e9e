"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): all heads share one vector per token.

For each token, `kv_down` computes a latent vector of R numbers and the P rotated channels of the key. All heads share
the vector and the rotated channels. From the vector, `kv_up` computes each head's value and the remaining K - P
channels of each head's key. So a cache stores R + P numbers per token and layer, instead of the keys and values of all
heads. Queries may also be computed from a latent vector. Only the last P channels of queries and keys are rotated.
Scores are divided by sqrt(K).

Each rotated pair consists of adjacent channels (0 and 1, 2 and 3, ...), as in DeepSeek's checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dtmega.config.families.moe import MoEKeys
from dtmega.models.llama import Rotation, Rules
from dtmega.ops.attention import attention

# All of DeepSeek's models use this epsilon in the norms of latent vectors, regardless of rms_norm_eps.
LATENT_EPS = 1e-6


class LatentAttention(nn.Module):
    """Attention that computes keys and values, and optionally queries, from latent vectors.

    Args:
        cfg: sizes of the model.
        layer: number of the layer, from 0.
    """

    def __init__(self, cfg: MoEKeys, layer: int) -> None:
        super().__init__()
        self.head_dim, self.v_dim = cfg.head_dim, cfg.v_dim
        self.n_rotated, self.n_latent = cfg.rotary_channels, cfg.kv_latent_size
        self.window = cfg.window_of(layer)
        d, n_queries = cfg.hidden_size, cfg.n_heads * cfg.head_dim
        n_latent_q = cfg.q_latent_size
        self.q = None if n_latent_q else nn.Linear(d, n_queries, bias=False)
        self.q_down = nn.Linear(d, n_latent_q, bias=False) if n_latent_q else None
        self.q_norm = nn.RMSNorm(n_latent_q, LATENT_EPS) if n_latent_q else None
        self.q_up = nn.Linear(n_latent_q, n_queries, bias=False) if n_latent_q else None
        self.kv_down = nn.Linear(d, self.n_latent + self.n_rotated, bias=False)
        self.kv_norm = nn.RMSNorm(self.n_latent, LATENT_EPS)
        n_keys_and_values = cfg.n_heads * (cfg.head_dim - self.n_rotated + self.v_dim)
        self.kv_up = nn.Linear(self.n_latent, n_keys_and_values, bias=False)
        self.out = nn.Linear(cfg.n_heads * self.v_dim, d, bias=False)

    def forward(self, x: Tensor, rules: Rules, rotation: Rotation) -> Tensor:
        n_plain = self.head_dim - self.n_rotated
        plain_q, rotated_q = self.queries(x).unflatten(-1, (-1, self.head_dim)).split([n_plain, self.n_rotated], -1)
        q = torch.cat([plain_q, rotate_pairs(rotated_q, rotation)], -1)  # [B, S, H, K]
        latent, rotated = self.kv_down(x).split([self.n_latent, self.n_rotated], -1)
        latent = self.kv_norm(latent)  # [B, S, R]
        rotated = rotate_pairs(rotated.unsqueeze(2), rotation)  # [B, S, 1, P]
        rule = rules[self.window]
        if rule.cache is not None:
            # The cache stores only the tensors that all heads share. Keys and values of earlier tokens are recomputed.
            latents, rotated = rule.cache.append(latent.unsqueeze(1), rotated.transpose(1, 2))
            latent, rotated = latents.squeeze(1), rotated.transpose(1, 2)
            rule = rule._replace(cache=None)
        keys_and_values = self.kv_up(latent).unflatten(-1, (-1, n_plain + self.v_dim))
        plain_k, v = keys_and_values.split([n_plain, self.v_dim], -1)
        k = torch.cat([plain_k, rotated.expand(-1, -1, plain_k.shape[2], -1)], -1)  # [B, T, H, K]
        out = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), rule)  # [B, H, S, V]
        return self.out(out.transpose(1, 2).flatten(2))

    def queries(self, x: Tensor) -> Tensor:
        """Compute the unrotated queries of all heads, [B, S, H K]."""
        if self.q is not None:
            return self.q(x)
        assert self.q_down is not None
        assert self.q_norm is not None
        assert self.q_up is not None
        return self.q_up(self.q_norm(self.q_down(x)))


def rotate_pairs(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate x, [B, S, H, P]. Each rotated pair consists of adjacent channels.

    In the result, the first channels of all pairs come before all second channels.
    """
    return rotation(torch.cat([x[..., 0::2], x[..., 1::2]], -1))
