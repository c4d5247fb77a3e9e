"""A ledger of the bytes on a fake device, by owner, now and at the peak of each action.

An owner says what the bytes are for: "parameters", "gradients", "activations of layers.0", and so on.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Span(NamedTuple):
    """The memory during one action of a step.

    Attributes:
        action: name of the action, as in `Work.action`.
        peak_bytes: largest number of bytes held at any time during the action.
        at_peak: owner, such as "gradients" or "activations of layers.0" -> bytes at the time of the peak.
        held_bytes: number of bytes held at the end of the action.
    """

    action: str
    peak_bytes: int
    at_peak: dict[str, int]
    held_bytes: int


class Ledger:
    """A count of the bytes of all storages that live on a device.

    Args:
        device: device whose storages are counted.

    Attributes:
        device_type: type of the device.
        now_bytes: number of bytes held now.
        owners: owner, such as "gradients" or "activations of layers.0" -> bytes now.
        spans: actions that have ended, in order.
    """

    def __init__(self, device: torch.device) -> None:
        self.device_type = device.type
        self.now_bytes = 0
        self.owners: Counter[str] = Counter()
        self.spans: list[Span] = []
        self._n_allocated = 0
        # Address of a storage -> (bytes, owner, weak reference whose callback runs when the storage is freed).
        self._entries: dict[int, tuple[int, str, weakref.ref[torch.UntypedStorage] | None]] = {}
        self._hidden: set[int] = set()
        self._peak_bytes = 0
        self._at_peak: dict[str, int] = {}

    def see(self, tensor: Tensor, owner: str, hidden: bool = False) -> bool:
        """Add the storage of a tensor to the ledger. Return True if the storage takes memory and is new.

        Args:
            tensor: tensor whose storage is added.
            owner: owner to which the bytes are counted, such as "gradients".
            hidden: whether the storage takes no memory.
        """
        part = local_part(tensor)
        if part.device.type != self.device_type:
            return False
        storage = part.untyped_storage()
        key = storage._cdata
        if key in self._entries:
            return False
        self._entries[key] = 0, owner, weakref.ref(storage, lambda _: self._forget(key))
        if hidden:
            self._hidden.add(key)
        self._set_bytes(key, 0 if hidden else storage.nbytes())
        return not hidden

    def allocate(self, n_bytes: int, owner: str) -> int:
        """Add a storage that has no tensor. Return a key for `free`; unlike an address, the key is negative."""
        self._n_allocated += 1
        key = -self._n_allocated
        self._entries[key] = 0, owner, None
        self._set_bytes(key, n_bytes)
        return key

    def free(self, key: int) -> None:
        """Remove a storage that was added by `allocate`."""
        self._forget(key)

    def lives(self, key: int) -> bool:
        """True if the ledger contains a storage with this address or key."""
        return key in self._entries

    def hides(self, tensor: Tensor) -> bool:
        """True if the tensor's storage was added as hidden."""
        return local_part(tensor).untyped_storage()._cdata in self._hidden

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that the memory of a storage was freed or allocated again."""
        if storage._cdata in self._entries:
            self._set_bytes(storage._cdata, storage.nbytes())

    def give(self, tensor: Tensor, owner: str) -> None:
        """Change the owner of a tensor's storage."""
        key = local_part(tensor).untyped_storage()._cdata
        if key not in self._entries:
            return
        n_bytes, before, reference = self._entries[key]
        self.owners[before] -= n_bytes
        self.owners[owner] += n_bytes
        self._entries[key] = n_bytes, owner, reference

    def end_span(self, action: str) -> None:
        """End the current action. The next action begins with the bytes that are held now."""
        self.spans.append(Span(action, self._peak_bytes, self._at_peak, self.now_bytes))
        self.forget_peak()

    def forget_peak(self) -> None:
        """Restart the search for the peak, beginning with the bytes that are held now."""
        self._peak_bytes = self.now_bytes
        self._at_peak = self._snapshot()

    def _set_bytes(self, key: int, n_bytes: int) -> None:
        before, owner, reference = self._entries[key]
        self._entries[key] = n_bytes, owner, reference
        self.owners[owner] += n_bytes - before
        self.now_bytes += n_bytes - before
        if self.now_bytes > self._peak_bytes:
            self._peak_bytes = self.now_bytes
            self._at_peak = self._snapshot()

    def _forget(self, key: int) -> None:
        self._hidden.discard(key)
        n_bytes, owner, _ = self._entries.pop(key)
        self.owners[owner] -= n_bytes
        self.now_bytes -= n_bytes

    def _snapshot(self) -> dict[str, int]:
        return {owner: n_bytes for owner, n_bytes in self.owners.items() if n_bytes}


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor. `DTensor.to_local` would run an operator, which the ledger would see."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
