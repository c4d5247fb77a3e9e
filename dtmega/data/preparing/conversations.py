"""Turn conversations into `.bin/.idx` files; `python -m dtmega tokenize --chat` calls `write`.

    python -m dtmega tokenize --chat --input chat.jsonl --tokenizer DIR/tokenizer.json --output data/chat

`messages.py` reads the records. Each worker (`conversation_worker.py`) has a child process with limits on time and
memory, in which `tokenizers/rendering.py` turns the conversations into tokens. `indexed_files/conversations.py`
describes the files. `prepare_shipped` makes the files for the conversations that dtmega ships, which
`tools/shipped_chat.py` wrote.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import xxhash
from tqdm import tqdm

from dtmega.data import cache_dir
from dtmega.data.indexed_files.dataset import token_dtype
from dtmega.data.indexed_files.record import ChatRecord
from dtmega.data.indexed_files.stored_output import check_free
from dtmega.data.indexed_files.writer import IndexedWriter, text_of
from dtmega.data.preparing import input_files, text_files
from dtmega.data.preparing.conversation_worker import NOTHING_TO_LEARN, ChatResult, Job
from dtmega.data.preparing.parts import share_of
from dtmega.data.preparing.workers import in_order
from dtmega.data.tokenizers.chat import Template, end_of_document, find_template
from dtmega.data.tokenizers.load import load_tokenizer
from dtmega.data.tokenizers.rendering import ASSISTANT, MARKERS
from dtmega.data.tokenizers.tokenizer import Tokenizer
from dtmega.files import optional_imports
from dtmega.files.console import counted, quoted
from dtmega.files.lock import Lock

SHIPPED = Path(__file__).with_name("shipped-chat.jsonl")
FORMAT = 1  # raise this number when a code change alters the tokens of the shipped conversations
MAX_NOTES, OTHERS = 50, "the template leaves out other fields"  # a record may have any number of fields
SHOWN = 5  # number of refused conversations to print; further refused conversations are only counted


def write(args: argparse.Namespace) -> str:
    """Write the `.bin/.idx` pair. If writing fails, an existing pair at the output's path stays unchanged.

    Args:
        args: the options of `python -m dtmega tokenize --chat`.

    Returns:
        A line for the user: counts of conversations, tokens, learned tokens and refused conversations by cause; how
        the learned tokens were found; the time taken; and the file names.

    Raises:
        ValueError: an argument, the template or the input cannot be used, or a conversation has no token to learn.
        OSError: a file cannot be read or written, or a worker died.
    """
    start_s = time.perf_counter()
    if args.part is None:
        check_free(args.output, args.overwrite)
    files = input_files.find_files(args.input, args.kind)
    for file in files:
        if file.kind not in (".jsonl", ".json"):
            raise ValueError(
                f"{file.path}: expected lines of JSON for --chat, got {file.kind} (--kind jsonl for files with other "
                f"suffixes and for standard input)"
            )
    tokenizer = load_tokenizer(args.tokenizer)
    template = find_template(tokenizer, args.chat_template)
    optional_imports.check("transformers", "hf", f"the chat template {template.path}")
    job = Job(args.tokenizer, end_of_document(tokenizer), template, args.json_key, args.roles, args.train_on)
    settings = {"tokenizer": tokenizer.fingerprint, "eod_id": tokenizer.eod_id, "templates": _digest(template)}
    settings |= {"key": args.json_key, "roles": args.roles, "train_on": args.train_on}
    share = share_of(args.output, files, args.part, encoding=args.encoding, settings=settings)
    if line := share.made(args.overwrite):
        return line
    batches = text_files.read_batches(share.files, "", encoding=args.encoding)
    tally = Tally(args.strict, args.skip_empty)
    with (
        IndexedWriter(share.prefix, token_dtype(tokenizer.vocab_size)) as writer,
        tqdm(total=sum(file.n_bytes for file in share.files) or None, unit="B", unit_scale=True, disable=None) as bar,
        contextlib.closing(in_order(batches, job, args.workers)) as results,
    ):
        for result in results:
            tally.add(result, bar)
            result.write(writer)
            bar.update(result.position_bytes - bar.n)
        if len(writer) == 0 and share.part is None:
            raise ValueError(f"no conversations in {counted(len(files), 'file')} ({tally.refusals()})")
        chat = ChatRecord(
            template=tally.template,
            train_on=args.train_on,
            end_ids=sorted(tally.end_ids),
            learned=tally.learned,
            refused=tally.by_cause(),
            notes=dict(sorted(tally.notes.items())),
        )
        writer.about = text_of(tokenizer, writer, part=share.part, chat=chat)
    summary = f"{share.name}{counted(writer.n_documents, 'conversation')}, {counted(writer.n_tokens, 'token')}"
    return (
        f"{summary}, {tally.learned:,} of them learned ({tally.how()}), {tally.refusals()}{tally.noted()}; "
        f"template {template.path} ({tally.template}), {time.perf_counter() - start_s:.1f} s: {share.prefix}.bin, "
        f"{share.prefix}.idx"
    )


def prepare_shipped(tokenizer: Tokenizer) -> str:
    """Return the path prefix of the shipped conversations' data set in the cache directory; make missing files first.

    The questions in the last tenth of the conversations do not occur in the earlier conversations.

    Raises:
        ValueError: the tokenizer has no chat template, or no cache directory is writable.
    """
    template = find_template(tokenizer).path
    digest = xxhash.xxh3_64_hexdigest(SHIPPED.read_bytes() + template.read_bytes())
    prefix = str(cache_dir() / f"chat-{tokenizer.fingerprint}-{digest}-v{FORMAT}")
    options = {"input": [str(SHIPPED)], "output": prefix, "overwrite": True, "kind": None, "encoding": "", "workers": 1}
    options |= {"tokenizer": tokenizer.name, "chat_template": None, "json_key": None, "roles": {}}
    options |= {"train_on": ASSISTANT, "strict": True, "skip_empty": False, "part": None}
    with Lock(Path(f"{prefix}.lock")):
        # An .idx exists only next to a complete .bin and a complete record.
        if not Path(f"{prefix}.idx").exists():
            print(f"tokenizing {SHIPPED} into {prefix}", file=sys.stderr, flush=True)
            write(argparse.Namespace(**options))
    return prefix


def _digest(template: Template) -> str:
    """Digest of a chat template's files."""
    files = [path for path in template if path is not None]
    return xxhash.xxh3_64_hexdigest(b"\n".join(path.read_bytes() for path in files))


class Tally:
    """Counts over all batches so far.

    Args:
        strict: whether to raise an error at the first refused conversation.
        skip_empty: whether to count conversations without a token to learn, instead of raising an error.

    Attributes:
        learned: number of tokens that count in the loss.
        template: digest of the template.
        end_ids: ids of the tokens that end a learned turn.
        notes: number of conversations for each note of `rendering.Renderer`.
    """

    def __init__(self, strict: bool, skip_empty: bool) -> None:
        self._strict, self._skip_empty = strict, skip_empty
        self._refused: Counter[str] = Counter()
        self._ends: set[str] = set()
        self._by = ""
        self.learned, self.template = 0, ""
        self.end_ids: set[int] = set()
        self.notes: Counter[str] = Counter()

    def add(self, result: ChatResult, bar: tqdm[Any]) -> None:
        """Add a batch to the counts and print the first SHOWN refusals of the whole input.

        Raises:
            ValueError: the template cannot be used, or the options turn a refused conversation into an error.
        """
        for refusal in result.refused:
            line = f"{refusal.where}: {refusal.cause}: {refusal.why}"
            if refusal.cause == NOTHING_TO_LEARN and not self._skip_empty:
                raise ValueError(f"{line}; --skip-empty leaves such conversations out and counts them")
            if self._strict:
                raise ValueError(f"{line} (--strict)")
            if self._refused.total() < SHOWN:
                bar.write(quoted(f"skipped {line}"), file=sys.stderr)
            self._refused[refusal.cause] += 1
        if result.fatal:
            raise ValueError(result.fatal)
        self.learned += result.learned
        self.template = self.template or result.template
        self._by = self._by or result.by
        self._ends |= result.ends
        self.end_ids |= result.end_ids
        for note, n in result.notes.items():
            self.notes[note if note in self.notes or len(self.notes) < MAX_NOTES else OTHERS] += n

    def by_cause(self) -> dict[str, int]:
        """The number of refused conversations for each cause."""
        return dict(sorted(self._refused.items()))

    def refusals(self) -> str:
        """Describe the number and causes of refusals for the user."""
        causes = ", ".join(f"{n:,} {cause}" for cause, n in self.by_cause().items())
        return f"{self._refused.total():,} refused" + (f" ({causes})" if causes else "")

    def noted(self) -> str:
        """Describe for the user how many conversations the template did not read as they stand."""
        return "".join(f", {note} ({n:,})" for note, n in sorted(self.notes.items()))

    def how(self) -> str:
        """Describe for the user how the learned tokens were found and which tokens end a turn."""
        if not self._ends:
            return "all but the first of each conversation"
        found = "marked by the template" if self._by == MARKERS else "shown by prefixes"
        return f"{found}; turns end with {', '.join(sorted(self._ends))}, which is learned"
