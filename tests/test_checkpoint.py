"""Claims about checkpoint/local.py: complete or not there, and nothing of another model."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtmega.checkpoint import local


@pytest.fixture(autouse=True)
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(width: int = 3) -> tuple[nn.Module, torch.optim.AdamW]:
    """A model after one step, so that its optimizer has moments."""
    model = nn.Linear(width, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    return model, optimizer


def save(root, step: int, model: nn.Module, optimizer: torch.optim.AdamW, keep: int = 2) -> None:
    local.save(root, step, dict(model.named_parameters()), optimizer, {"note": step}, keep=keep)


def test_what_is_loaded_is_what_was_saved_to_the_bit(tmp_path):
    model, optimizer = trained()
    save(tmp_path, 7, model, optimizer)
    other, other_optimizer = trained()
    state = local.load(tmp_path / "step-00000007", other.named_parameters(), other_optimizer)
    assert state == {"note": 7, "step": 7}
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, other_optimizer.state[b][key]), key


def test_a_save_that_fails_half_way_leaves_the_older_checkpoint_alone(tmp_path, monkeypatch):
    model, optimizer = trained()
    save(tmp_path, 1, model, optimizer, keep=1)
    written = []

    def full_disk(tensors, path):
        if written:
            raise OSError(28, "No space left on device")
        written.append(path)

    monkeypatch.setattr(local, "save_file", full_disk)
    monkeypatch.setattr(local, "_fsync", lambda path: None)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 2, model, optimizer, keep=1)
    assert [path.name for path in local.finished(tmp_path)] == ["step-00000001"]
    local.load(tmp_path / "step-00000001", model.named_parameters(), optimizer)


def test_what_a_killed_save_left_is_no_checkpoint_and_is_written_over(tmp_path):
    left = tmp_path / ".tmp-step-00000003"
    left.mkdir()
    (left / "model-00000.safetensors").write_bytes(b"half")
    assert local.finished(tmp_path) == []
    model, optimizer = trained()
    save(tmp_path, 3, model, optimizer)
    assert not left.exists()
    local.load(tmp_path / "step-00000003", model.named_parameters(), optimizer)


def test_only_the_newest_stay(tmp_path):
    for step in (1, 2, 10, 9):
        save(tmp_path, step, *trained(), keep=2)
    assert [path.name for path in local.finished(tmp_path)] == ["step-00000009", "step-00000010"]


def test_a_tensor_of_another_shape_is_named_with_both(tmp_path):
    save(tmp_path, 1, *trained(3))
    model, optimizer = trained(4)
    with pytest.raises(ValueError, match=r"'weight' is \[2, 3\] there, \[2, 4\] here"):
        local.load(tmp_path / "step-00000001", model.named_parameters(), optimizer)


def test_a_name_that_is_not_there_is_named(tmp_path):
    save(tmp_path, 1, *trained())
    with pytest.raises(ValueError, match="it has no 'other'"):
        local.load_model(tmp_path / "step-00000001", [("other", nn.Parameter(torch.ones(1)))])
