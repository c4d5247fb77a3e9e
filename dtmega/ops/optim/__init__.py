"""Optimizers as in Megatron: parameter groups, learning rate and weight decay schedules, clipping, loss spikes.

- `build.py` builds a run's optimizer and parameter groups; `adam.py` has AdamW on this rank's parts of tensors
- `muon.py` has Muon; `owners.py` exchanges parts of tensors, so that Muon gets whole matrices
- `rates.py` has the schedules, `gradients.py` has norms and clipping, and `spikes.py` finds steps to skip
"""

from __future__ import annotations

from dtmega.ops.optim.adam import Adam as Adam
from dtmega.ops.optim.adam import AdamW as AdamW
from dtmega.ops.optim.build import build_optimizer as build_optimizer
from dtmega.ops.optim.build import check_factors as check_factors
from dtmega.ops.optim.gradients import clip_gradients as clip_gradients
from dtmega.ops.optim.gradients import count_zeros as count_zeros
from dtmega.ops.optim.gradients import squared_norm as squared_norm
from dtmega.ops.optim.gradients import total_norm as total_norm
from dtmega.ops.optim.gradients import unscale as unscale
from dtmega.ops.optim.rates import learning_rate as learning_rate
from dtmega.ops.optim.rates import notes_on_warmup as notes_on_warmup
from dtmega.ops.optim.rates import rate_at as rate_at
from dtmega.ops.optim.rates import set_rates as set_rates
from dtmega.ops.optim.rates import weight_decay_at as weight_decay_at
