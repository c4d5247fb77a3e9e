"""Score a run with lm-evaluation-harness, on one process or with the model split over several processes.

    tasks = ["hellaswag"]
    scores = evaluate(trained, tasks, find_tasks(tasks, None), batch_size=8)

Every rank runs the whole harness on the same questions in the same order, because all ranks of a split model compute
each batch together. On each rank, the harness runs as if in a single process. Tokenization, truncation of long text
and the rule for ending an answer follow the harness's `HFLM` class, so that scores are comparable with the scores of
transformers models.

This module needs the extra `eval` (https://github.com/EleutherAI/lm-evaluation-harness).
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
from dtmega.inference.trained import TrainedModel, settle_as_rank_0
from dtmega.models.generate import Sampling, generate, settle_alone

DEFAULT_LENGTH = 2048  # the harness's own default, for a model without a maximum sequence length
N_BOOTSTRAPS = 1000  # number of resamples, for metrics whose standard error has no formula
REPORTED = ("results", "groups", "versions", "n-shot", "higher_is_better", "n-samples", "configs")

Pair = tuple[Any, list[int], list[int]]  # key, tokens of the context, tokens of the continuation


def find_tasks(names: Sequence[str], folder: str | None) -> TaskManager:
    """Load task definitions.

    The harness's own collection has thousands of YAML files. If `folder` holds all tasks, the collection is not read.

    Args:
        names: names of the tasks.
        folder: folder with further definitions as YAML files; None to use only the harness's own definitions.

    Raises:
        ValueError: a task has no definition.
    """
    manager = TaskManager(include_path=folder, include_defaults=False) if folder else None
    if manager is None or any(name not in manager.all_tasks for name in names):
        manager = TaskManager(include_path=folder)
    if unknown := [name for name in names if name not in manager.all_tasks]:
        where = f" nor in {folder}" if folder else ""
        raise ValueError(f"no task of the harness{where} is called {', '.join(unknown)} (--tasks, --include-path)")
    return manager


def evaluate(
    trained: TrainedModel,
    tasks: Sequence[str],
    manager: TaskManager,
    batch_size: int,
    n_shots: int | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """Score a model. Every rank calls this function, and every rank gets the result.

    Args:
        trained: the model with its tokenizer.
        tasks: names of the tasks.
        manager: the tasks' definitions, from `find_tasks`.
        batch_size: number of sequences in one forward pass.
        n_shots: number of examples before each question; None for the task's default.
        limit: number of questions per task, counted from the first; None for all questions.

    Returns:
        The harness's scores, together with the checkpoint, step, date, harness version and limit.
    """
    # Prevent the harness from bootstrapping in a process pool, which would fork this multi-threaded process.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    evaluation = simple_evaluate(
        model=RunLM(trained, batch_size),
        tasks=list(tasks),
        task_manager=manager,
        num_fewshot=n_shots,
        limit=limit,
        bootstrap_iters=N_BOOTSTRAPS,
        log_samples=False,
    )
    assert evaluation is not None
    return {
        "checkpoint": trained.checkpoint,
        "step": trained.step,
        "date": datetime.now().astimezone().isoformat(" ", "seconds"),
        "lm_eval": version("lm_eval"),
        "limit": limit,
        **{key: evaluation[key] for key in REPORTED if key in evaluation},
    }


def table(scores: dict[str, Any]) -> str:
    """Format the scores as a Markdown table."""
    return utils.make_table(scores)


class RunLM(TemplateLM):
    """A dtmega decoder, wrapped in the harness's model interface.

    Args:
        trained: the model with its tokenizer.
        batch_size: number of sequences in one forward pass.
    """

    def __init__(self, trained: TrainedModel, batch_size: int) -> None:
        super().__init__()
        self._model, self._tokenizer, self.batch_size = trained.model, trained.tokenizer, batch_size
        self.max_length = trained.model.longest or DEFAULT_LENGTH
        self._prompt_is_prefix = families.objective(trained.cfg).prompt_is_prefix
        self._device = next(trained.model.parameters()).device

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eod_id

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self._tokenizer.encode(string)

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **kwargs: Any) -> list[tuple[float, bool]]:
        """Score each continuation given its context (see `_score`). Each batch holds sequences of similar length."""
        # Start with the longest sequences: batches need little padding, and a batch too large for memory fails early.
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        answers: dict[int, tuple[float, bool]] = {}
        for batch in _batches(order, self.batch_size, "texts"):
            scores = self._score([requests[i] for i in batch])
            answers |= dict(zip(batch, scores, strict=True))
        return [answers[i] for i in range(len(requests))]

    @torch.no_grad()
    def _score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Score pairs of context and continuation in one forward pass. Long sequences are truncated on the left.

        Returns:
            The log-likelihood of each pair's continuation, and whether greedy decoding would produce the
            continuation.
        """
        # The model predicts the next token at each position, so the last token of a sequence is never an input.
        inputs = [(context + continuation)[-(self.max_length + 1) :][:-1] for _, context, continuation in pairs]
        longest = max(map(len, inputs))
        # Padding goes after each sequence: the model is causal, so no token of the sequence sees the padding.
        tokens = torch.tensor([text + [0] * (longest - len(text)) for text in inputs], device=self._device)
        masks = {}
        if self._prompt_is_prefix:
            n_given = []
            for text, (_, _, continuation) in zip(inputs, pairs, strict=True):
                n_given.append(len(text) - (len(continuation) - 1))
            lengths = torch.tensor(n_given, device=self._device).unsqueeze(1)
            masks["prefix"] = torch.arange(longest, device=self._device) < lengths
        # The model's vocabulary may be padded; padding ids must not take part in the softmax.
        logits = self._model(tokens, **masks)[:, :, : self._tokenizer.vocab_size].float()
        scores = []
        for (_, _, continuation), text, row in zip(pairs, inputs, logits, strict=True):
            log_probabilities = row[len(text) - len(continuation) : len(text)].log_softmax(-1)
            expected = torch.tensor(continuation, device=self._device)
            total = log_probabilities.gather(1, expected.unsqueeze(1)).sum()
            is_greedy = (log_probabilities.argmax(-1) == expected).all()
            scores.append((float(total), bool(is_greedy)))
        return scores

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Compute each document's log-likelihood as a sum over disjoint windows, each with one token of context."""
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
        """Generate the text after each context, up to but excluding a stop sequence."""
        numbers = _batches(list(range(len(requests))), 1, "answers")
        return [self._generate_answer(*requests[i].args) for (i,) in numbers]

    def _generate_answer(self, context: str, task_options: dict[str, Any]) -> str:
        """Generate one answer with the task's generation options."""
        keys = dict(normalize_gen_kwargs(task_options))
        n_tokens = keys.pop("max_gen_toks")
        eod = self._tokenizer.decode([self.eot_token_id])
        stops = handle_stop_sequences(keys.pop("until", None), eos=eod)
        draws = keys.pop("do_sample", False)
        options: dict[str, Any] = {key: keys.pop(key) for key in ("temperature", "top_k", "top_p") if key in keys}
        if keys:
            raise ValueError(f"a task asks for generation with {', '.join(keys)}, which is not known here")
        if not draws:
            options = {"temperature": 0.0}
        if n_tokens >= self.max_length:
            raise ValueError(f"a task asks for {n_tokens} tokens, and the model has positions for {self.max_length}")
        prompt = self.tok_encode(context)[-(self.max_length - n_tokens) :] or [self.prefix_token_id]
        end_ids = frozenset([self.eot_token_id])
        settle = _stop_at(stops, self._tokenizer.decode)
        options |= {"settle": settle, "prompt_is_prefix": self._prompt_is_prefix}
        sampling = Sampling(self._tokenizer.vocab_size, end_ids, **options)
        answer = generate(self._model, prompt, n_tokens, sampling)
        return postprocess_generated_text(self._tokenizer.decode(answer), stop=stops, think_end_token=None)


def _stop_at(stops: Sequence[str], decode: Callable[[list[int]], str]) -> Callable[[Tensor], bool]:
    """Make the `Sampling.settle` function for one answer.

    The function ends the answer once the tokens before the newest token contain a stop sequence.
    """
    agree = settle_as_rank_0 if mesh.world_size() > 1 else settle_alone
    answer: list[int] = []

    def settle(token: Tensor) -> bool:
        agree(token)
        text = decode(answer)
        answer.append(int(token))
        return not any(stop in text for stop in stops if stop)

    return settle


def _batches(numbers: list[int], size: int, what: str) -> Iterator[list[int]]:
    """Yield the numbers in batches of `size`, with a progress bar on rank 0; `what` is the bar's title."""
    with tqdm(total=len(numbers), desc=what, disable=None if mesh.rank() == 0 else True) as bar:
        for start in range(0, len(numbers), size):
            batch = numbers[start : start + size]
            yield batch
            bar.update(len(batch))
