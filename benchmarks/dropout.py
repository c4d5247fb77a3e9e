"""Compare the cost of layout-invariant dropout with `F.dropout`: `python benchmarks/dropout.py`.

Each form runs forward on a tensor [4, 512, 1024] in fp32, on one CPU thread. The forms take turns, and the median of 30
process times counts.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from dtmega.models.layers import KeyedDropout


def main() -> None:
    torch.set_num_threads(1)
    x = torch.randn(4, 512, 1024)
    sample_ids, places = torch.arange(4), torch.arange(512).repeat(4, 1)
    keyed = KeyedDropout(0.1)

    def plain(x: torch.Tensor, sample_ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.1)

    forms: dict[str, Callable[..., torch.Tensor]] = {
        "F.dropout": plain,
        "keyed": keyed,
        "F.dropout, compiled": torch.compile(plain),
        "keyed, compiled": torch.compile(keyed),
    }
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(32):
        for name, form in forms.items():
            start = time.process_time()
            form(x, sample_ids, places)
            times[name].append(time.process_time() - start)
    for name, seconds in times.items():
        print(f"{name:<20} {statistics.median(seconds[2:]) * 1e3:6.1f} ms")


if __name__ == "__main__":
    main()
