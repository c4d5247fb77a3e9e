"""lm-evaluation-harness on a run: the harness asks, a model of ours answers, on one process or cut over several.

    scores = evaluate(used, find_tasks(["hellaswag"], None), batch_size=8)

Every rank asks itself the same questions in the same order (to the harness each is the only one), since all ranks of a
cut model compute each batch together. What is asked for is that of the harness's own class for models of transformers
(`HFLM`): how texts are cut into tokens, what is left out of a long one, where an answer ends.

Needs the extra `eval` (https://github.com/EleutherAI/lm-evaluation-harness).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from importlib.metadata import version
from typing import Any

import torch
from lm_eval import simple_evaluate, utils  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports]
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
from torch import Tensor
from tqdm import tqdm

from dtmega import families, mesh
from dtmega.models.generate import Drawing, generate, settled
from dtmega.use import Used, agreed

DEFAULT_LENGTH = 2048  # the harness's, for a model that has no longest sequence
N_BOOTSTRAPS = 1000  # for the error of a score that has no formula for it
PART = ("results", "groups", "versions", "n-shot", "higher_is_better", "n-samples", "configs")

Pair = tuple[Any, list[int], list[int]]  # a key, tokens of a context, tokens of what follows


def find_tasks(names: Sequence[str], folder: str | None) -> TaskManager:
    """Find a list that knows these tasks: that of a folder of YAML files, with the harness's own if others are meant.

    Raises:
        ValueError: nobody knows one of them.
    """
    known = TaskManager(include_path=folder, include_defaults=False) if folder else None
    if known is None or any(name not in known.all_tasks for name in names):
        known = TaskManager(include_path=folder)  # reads thousands of files
    if unknown := [name for name in names if name not in known.all_tasks]:
        where = f" nor in {folder}" if folder else ""
        raise ValueError(f"no task of the harness{where} is called {', '.join(unknown)} (--tasks, --include-path)")
    return known


def evaluate(
    used: Used,
    tasks: Sequence[str],
    known: TaskManager,
    batch_size: int,
    n_shots: int | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """The scores of a model, and what they are of; on every rank.

    Args:
        n_shots: examples before each question; None: as the task says.
        limit: the first so many questions of each task; None: all.
    """
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # its pool would fork a process that has threads
    found = simple_evaluate(
        model=RunLM(used, batch_size),
        tasks=list(tasks),
        task_manager=known,
        num_fewshot=n_shots,
        limit=limit,
        bootstrap_iters=N_BOOTSTRAPS,
        log_samples=False,
    )
    assert found is not None
    return {
        "checkpoint": used.checkpoint,
        "step": used.step,
        "date": datetime.now().astimezone().isoformat(" ", "seconds"),
        "lm_eval": version("lm_eval"),
        "limit": limit,
        **{key: found[key] for key in PART if key in found},
    }


def table(scores: dict[str, Any]) -> str:
    """The scores for people: a table of Markdown."""
    return utils.make_table(scores)


class RunLM(TemplateLM):
    """A decoder of ours, as the harness asks for it.

    Args:
        batch_size: how many texts a forward reads.
    """

    def __init__(self, used: Used, batch_size: int) -> None:
        super().__init__()
        self._model, self._tokenizer, self.batch_size = used.model, used.tokenizer, batch_size
        self.max_length = used.model.longest or DEFAULT_LENGTH
        self._prompt_is_prefix = families.objective(used.cfg).prompt_is_prefix
        self._device = next(used.model.parameters()).device

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eod_id

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self._tokenizer.encode(string)

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **kwargs: Any) -> list[tuple[float, bool]]:
        """For each pair the logarithm of the probability that the one follows the other, and if greedy draws say it."""
        # The longest first: neighbours are of nearly one length, and what does not fit into memory fails at once.
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        found: dict[int, tuple[float, bool]] = {}
        for batch in _batches(order, self.batch_size, "texts"):
            answers = self._score([requests[i] for i in batch])
            found |= dict(zip(batch, answers, strict=True))
        return [found[i] for i in range(len(requests))]

    @torch.no_grad()
    def _score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """The answers for pairs, in one forward. The beginning of a text that is too long is left out."""
        read = [(context + follows)[-(self.max_length + 1) :][:-1] for _, context, follows in pairs]
        longest = max(map(len, read))
        # What fills up a shorter text stands behind it, and nothing before sees it.
        tokens = torch.tensor([text + [0] * (longest - len(text)) for text in read], device=self._device)
        rows = {}
        if self._prompt_is_prefix:
            n_given = [len(text) - (len(follows) - 1) for text, (_, _, follows) in zip(read, pairs, strict=True)]
            lengths = torch.tensor(n_given, device=self._device).unsqueeze(1)
            rows["prefix"] = torch.arange(longest, device=self._device) < lengths
        logits = self._model(tokens, **rows)[:, :, : self._tokenizer.vocab_size].float()
        answers = []
        for (_, _, follows), text, row in zip(pairs, read, logits, strict=True):
            of_them = row[len(text) - len(follows) : len(text)].log_softmax(-1)
            wanted = torch.tensor(follows, device=self._device)
            total = of_them.gather(1, wanted.unsqueeze(1)).sum()
            answers.append((float(total), bool((of_them.argmax(-1) == wanted).all())))
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The logarithm of the probability of each text: windows side by side, each with the token before it."""
        pairs: list[Pair] = []
        owners: list[int] = []
        for i, request in enumerate(requests):
            (text,) = request.args
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in windows:
                pairs.append((None, *utils.make_disjoint_window(window)))
                owners.append(i)
        totals = [0.0] * len(requests)
        for i, (total, _) in zip(owners, self._loglikelihood_tokens(pairs), strict=True):
            totals[i] += total
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context, up to a stop sequence, which is left out."""
        numbers = _batches(list(range(len(requests))), 1, "answers")
        return [self._say(*requests[i].args) for (i,) in numbers]

    def _say(self, context: str, asked: dict[str, Any]) -> str:
        keys = dict(normalize_gen_kwargs(asked))
        n_tokens = keys.pop("max_gen_toks")
        eod = self._tokenizer.decode([self.eot_token_id])
        stops = handle_stop_sequences(keys.pop("until", None), eos=eod)
        draws = keys.pop("do_sample", False)
        how: dict[str, Any] = {key: keys.pop(key) for key in ("temperature", "top_k", "top_p") if key in keys}
        if keys:
            raise ValueError(f"a task asks for generation with {', '.join(keys)}, which is not known here")
        if not draws:
            how = {"temperature": 0.0}
        if n_tokens >= self.max_length:
            raise ValueError(f"a task asks for {n_tokens} tokens, and the model has positions for {self.max_length}")
        read = self.tok_encode(context)[-(self.max_length - n_tokens) :] or [self.prefix_token_id]
        ends = frozenset([self.eot_token_id])
        settle = _until(stops, self._tokenizer.decode)
        how |= {"settle": settle, "prompt_is_prefix": self._prompt_is_prefix}
        drawing = Drawing(self._tokenizer.vocab_size, ends, **how)
        said = generate(self._model, read, n_tokens, drawing)
        return postprocess_generated_text(self._tokenizer.decode(said), stop=stops, think_end_token=None)


def _until(stops: Sequence[str], decode: Callable[[list[int]], str]) -> Callable[[Tensor], bool]:
    """A `settle` that ends an answer when a stop sequence stands in it, the token with its end being said already."""
    agree = agreed if mesh.world_size() > 1 else settled
    said: list[int] = []

    def settle(token: Tensor) -> bool:
        agree(token)
        text = decode(said)
        said.append(int(token))
        return not any(stop in text for stop in stops if stop)

    return settle


def _batches(numbers: list[int], size: int, what: str) -> Iterator[list[int]]:
    """So many at a time, with a bar on the first process."""
    with tqdm(total=len(numbers), desc=what, disable=None if mesh.rank() == 0 else True) as bar:
        for start in range(0, len(numbers), size):
            batch = numbers[start : start + size]
            yield batch
            bar.update(len(batch))
