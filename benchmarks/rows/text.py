"""Text to ids by a Hugging Face tokenizer.json as `dtmega tokenize` does it, beside the batch call of transformers."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from benchmarks.rows.measure import Row, cpu_ms
from dtmega.data.preparing import corpus
from dtmega.data.preparing.text_files import RecordBatch
from dtmega.data.preparing.tokenize import Job, Worker
from dtmega.data.tokenizers import tokenizer_json

N_BYTES = 2**20  # about what a worker is handed at a time


def tokenizer(quick: bool) -> list[Row]:
    """Some documents of Python's library, as lines of JSON."""
    texts: list[str] = []
    n_bytes = 0
    for _, text in corpus.documents():
        texts.append(text)
        n_bytes += len(text.encode())
        if n_bytes > N_BYTES:
            break
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    batch = RecordBatch(path="texts.jsonl", kind=".jsonl", first=1, data=lines, is_cut=False, position_bytes=0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokenizer.json")
        path.write_text(tokenizer_json.to_json("stdlib-8k"), encoding="utf-8")
        worker = Worker(Job(tokenizer=str(path), key="text", append_eod=False))
        theirs = PreTrainedTokenizerFast(tokenizer_file=str(path))

        def call() -> Any:
            return theirs(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]

        assert worker(batch).ids.tolist() == [i for ids in call() for i in ids], "ids differ"
        ms = cpu_ms({"HF": call, "ours": lambda: worker(batch)}, rounds=3 if quick else 7, warm_up=1)
    rates = {name: n_bytes / 1e3 / found for name, found in ms.items()}
    equal = f"ids equal; {rates['ours']:.2f} and {rates['HF']:.2f} MB/s"
    name = "tokenizer.json, with reading JSON"
    return [Row(name, "HF's batch call, without", ms["ours"], ms["HF"], "CPU ms", 1.0, equal)]


BENCHMARKS = {"tokenizer": tokenizer}
