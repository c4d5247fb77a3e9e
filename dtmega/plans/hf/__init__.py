"""Sharding plans for unmodified models of `transformers`.

print(plan_for(model, tp=2))                  # the table first
mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp_shard", "tp"))
print(verify_plan(model, mesh))               # a small clone, cut, against one process
model = parallelize_hf(model, mesh)           # then train it as you would: loss, backward, clip_grad_norm_, AdamW

Read families.py (what we know of each family), plans/styles.py, styles.py and experts.py here (the words), regions.py,
then plan.py and parallel.py.
"""

from dtmega.plans.hf.command import verify_plan
from dtmega.plans.hf.load import Read, load_hf
from dtmega.plans.hf.parallel import parallelize_hf, plan_for
from dtmega.plans.hf.plan import HFPlan
from dtmega.plans.hf.verify import Verification

__all__ = ["HFPlan", "Read", "Verification", "load_hf", "parallelize_hf", "plan_for", "verify_plan"]
