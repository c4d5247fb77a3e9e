"""Compare the flags and values that `from-megatron` and bash find in launch scripts of Megatron-LM.

    sudo python benchmarks/scripts.py scripts/*.sh            # one line for each script
    sudo python benchmarks/scripts.py --details run.sh        # also the arguments that differ
    sudo python benchmarks/scripts.py --index scripts.tsv --folder scripts > benchmarks/scripts.md

The last command writes a table in Markdown. After a header, each line of an index holds a repository, a path and a
commit, separated by tabs, as `git show COMMIT:PATH` needs them. The script of a line is the file
FOLDER/OWNER+NAME/PATH. If the index lists a path several times, the file is FOLDER/OWNER+NAME@COMMIT[:12]/PATH.

Bash runs in an empty network namespace, with a root directory of its own and an empty environment. A few text programs
are available; every other command is recorded and does nothing. `cd`, `source` and `pushd` succeed even if their path
does not exist. A placeholder of an example (NAME=<Specify path>) is replaced with a value that bash accepts.

`from-megatron` also gets an empty environment. If `from-megatron` asks for a variable, the variable is empty, as in
bash, and the output line names the variable. A script that sets such a variable itself, from another program's output,
counts as refused. A part of a word that `from-megatron` reports as unknown matches any text.
"""

from __future__ import annotations

import argparse
import collections
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dtmega.interop.megatron.bash import run
from dtmega.interop.megatron.bash.words import Undecided, Unknown, Word, written
from dtmega.interop.megatron.launch import command
from dtmega.interop.megatron.launch.translate import translate

TEXT_TOOLS = ("cat", "sed", "dirname", "basename", "seq", "tr", "cut", "head", "tail", "awk", "wc", "expr", "grep")
TOOLS = (*TEXT_TOOLS, "mkdir", "touch", "bash", "sh")
LEGEND = """\
# Launch scripts, as bash and as `from-megatron` read them

The flags and values that `from-megatron` finds were compared with those that bash gives the same script, in an empty
environment. *right*: they are the same, and the last column has what the translation leaves open. *refused*: with the
reason. *not comparable*: bash itself runs no command without the machine of the script. The command is

    sudo python benchmarks/scripts.py --index scripts.tsv --folder scripts > benchmarks/scripts.md
"""
PROGRAMS = ("gpt", "gpt2", "bert", "t5", "vlm", "retro")  # scripts check whether pretrain_*.py exist
# Bash code that records every command that is not in TOOLS. If such a command would start a shell, the code starts the
# shell.
ENVIRONMENT = r"""
command_not_found_handle() {
  printf '%s\0' "$#" "$@" > "/stub/record.$BASHPID.$RANDOM"
  [[ $1 == tee ]] && cat > /dev/null
  local previous="" word i=0
  for word in "$@"; do
    i=$((i + 1))
    if [[ $previous == bash || $previous == sh ]] && [[ $word == -*c ]]; then
      shift $i
      /bin/bash -c "$@"
      return 0
    fi
    previous=${word##*/}
  done
  return 0
}
cd() { builtin cd "$@" 2>/dev/null || true; }
pushd() { builtin cd "$@" 2>/dev/null || true; }
popd() { true; }
source() { [ -f "${1:-}" ] && builtin source "$@"; return 0; }
function . { [ -f "${1:-}" ] && builtin . "$@"; return 0; }
"""
# Bash code that makes the root directory and runs the script there. Arguments: root, work, stub, NAME=VALUE ..., and
# the command.
SETUP = r"""
set -e
root=$1 work=$2 stub=$3
shift 3
mount -t tmpfs tmpfs "$root"
mkdir -p "$root"/{usr,work,dev,tmp,stub}
mount --rbind -o ro /usr "$root/usr"
for link in bin lib lib64; do cp -a "/$link" "$root/$link"; done
touch "$root/dev/null"
mount --bind /dev/null "$root/dev/null"
cp -r "$work"/. "$root/work"
mount --bind "$stub" "$root/stub"
exec chroot "$root" /usr/bin/env -i BASH_ENV=/stub/env HOME=/nonexistent HOSTNAME= PATH=/stub/bin "$@"
"""
PLACEHOLDER = re.compile(r"^([ \t]*(?:export[ \t]+)?\w+=)<([A-Za-z][^<>\n]*)>", re.MULTILINE)


class Outcome(NamedTuple):
    """The comparison of one script.

    Attributes:
        kind: "right", "wrong", "refused", "not comparable" (bash runs no program of Megatron-LM) or "missing".
        remark: explanation for the reader.
    """

    kind: str
    remark: str


def bash_commands(path: Path, given: Mapping[str, str]) -> tuple[list[list[str]], str]:
    """Run the script with bash. Returns the Megatron-LM commands that bash runs, and the last line of bash's errors."""
    given = dict(given)
    while True:
        commands, errors = _run_bash(path, given)
        unbound = re.search(r": (\w+): unbound variable", errors)
        if commands or unbound is None or unbound[1] in given:
            return commands, (errors.strip().splitlines() or [""])[-1]
        given[unbound[1]] = ""  # the script has `set -u`


def _run_bash(path: Path, given: Mapping[str, str]) -> tuple[list[list[str]], str]:
    with tempfile.TemporaryDirectory() as folder:
        root, work, stub = (Path(folder, name) for name in ("root", "work", "stub"))
        for each in (root, work, stub / "bin"):
            each.mkdir(parents=True)
        (stub / "env").write_text(ENVIRONMENT)
        for tool in TOOLS:
            target = "/bin/bash" if tool in ("bash", "sh") else shutil.which(tool)
            (stub / "bin" / tool).symlink_to(Path(str(target)).resolve())
        for file in path.parent.iterdir():
            if file.is_file() and file.stat().st_size < 1_000_000:
                shutil.copy(file, work / file.name)
        for program in PROGRAMS:
            (work / f"pretrain_{program}.py").touch()
        text = path.read_text(errors="replace")
        (work / path.name).write_text(PLACEHOLDER.sub(lambda match: match[1] + re.sub(r"\W", "_", match[2]), text))
        n_arguments = max((int(name) for name in given if name.isdigit()), default=0)
        arguments = [given.get(str(i + 1), "") for i in range(n_arguments)]
        variables = [f"{name}={value}" for name, value in given.items() if name.isidentifier()]
        inside = ["/bin/bash", "-c", 'cd /work; exec /bin/bash "$0" "$@"', f"./{path.name}", *arguments]
        outside = ["unshare", "-n", "-m", "--", "/bin/bash", "-c", SETUP, "setup", str(root), str(work), str(stub)]
        try:
            done = subprocess.run(
                [*outside, *variables, *inside], capture_output=True, timeout=60, stdin=subprocess.DEVNULL, check=False
            )
        except subprocess.TimeoutExpired:
            return [], "no end after a minute"
        commands: list[list[str]] = []
        for record in stub.glob("record.*"):
            words = record.read_text(errors="replace").split("\0")[1:-1]
            if any(map(_is_program, words)) and "bash" not in words:
                commands.append(words)
        return commands, done.stderr.decode(errors="replace")


def _is_program(word: str) -> bool:
    return command.SCRIPT.search(word) is not None and "=" not in word


def our_commands(path: Path) -> tuple[list[list[Word]], dict[str, str]]:
    """The commands that `from-megatron` finds, and the variables that it has asked for, with their values.

    Raises:
        ValueError: `from-megatron` refuses the script.
    """
    given: dict[str, str] = {}
    while True:
        try:
            found, _ = run.launches(path.read_text(errors="replace"), command.is_training, path.parent, given)
        except Undecided as error:
            new = [name for name in re.findall(r"--set '?(\S+?)=VALUE", str(error)) if name not in given]
            if not new:
                raise
            given |= {name: "0" if name == "#" else "" for name in new}
            continue
        return [launch.words for launch in found], given


def arguments_of(words: Sequence[str]) -> list[str]:
    """The words after the program."""
    return list(words[next(i for i, word in enumerate(words) if _is_program(word)) + 1 :])


def fits(ours: Sequence[Word], theirs: Sequence[str]) -> bool:
    """True if our arguments match bash's arguments. An unknown part of our arguments matches any text."""
    pattern = ""
    first = next(i for i, word in enumerate(ours) if _is_program(written(word)))
    for word in ours[first + 1 :]:
        if all(isinstance(piece, Unknown) for piece in word) and word:
            pattern += "(?:[^\0]*\0)*?"  # no word, or several
            continue
        for piece in word:
            pattern += "[^\0]*(?:\0[^\0]*)*?" if isinstance(piece, Unknown) else re.escape(piece.text)
        pattern += "\0"
    return re.fullmatch(pattern, "".join(f"{word}\0" for word in theirs), re.DOTALL) is not None


def compare(path: Path, details: bool) -> Outcome:
    """Compare the commands that `from-megatron` and bash find in one script."""
    try:
        ours, given = our_commands(path)
    except ValueError as error:
        return Outcome("refused", str(error))
    text = path.read_text(errors="replace")
    asked = f"asks for {', '.join(given)}; " if given else ""
    own = [name for name in given if name.isidentifier() and re.search(rf"^\s*(export )?{name}=", text, re.MULTILINE)]
    if own:
        return Outcome("refused", f"asks for {', '.join(own)}, which another program gives")
    theirs, error = bash_commands(path, given)
    if not theirs:
        return Outcome("not comparable", f"{asked}bash runs no pretrain_*.py{f': {error:.100}' if error else ''}")
    if len(ours) != len(theirs):
        return Outcome("wrong", f"{asked}{len(ours)} commands, and bash runs {len(theirs)}")
    waiting = [arguments_of(words) for words in theirs]
    for words in ours:
        match = next((other for other in waiting if fits(words, other)), None)
        if match is None:
            if details:
                print("ours:", [written(word) for word in words], "\nbash:", waiting)
            return Outcome("wrong", f"{asked}other arguments than bash's")
        waiting.remove(match)
    return Outcome("right", asked + _translated(path, given, len(ours)))


def _translated(path: Path, given: Mapping[str, str], n_commands: int) -> str:
    """The names of the settings that a translation leaves open; "nothing" if all are set; or why it is refused."""
    try:
        translation = translate(str(path), given, number=1 if n_commands > 1 else 0)
    except ValueError as error:
        return f"refused: {error}"
    names = [line.split(" ")[0] if line.startswith("--") else line.split(":")[0] for line in translation.open]
    return ", ".join(name.rstrip(":") for name in names) or "nothing"


def of_index(index: Path, folder: Path) -> list[tuple[str, Path]]:
    """The scripts of an index, as pairs: the script's name in the table, and the path of its file."""
    scripts: list[tuple[str, Path]] = []
    for row in index.read_text().splitlines()[1:]:
        repository, path, commit = row.split("\t")[:3]
        owner = repository.replace("/", "+")
        places = [folder / f"{owner}@{commit[:12]}" / path, folder / owner / path]
        place = next((place for place in places if place.is_file()), places[-1])
        scripts.append((f"{repository} `{path}` {commit[:8]}", place))
    return scripts


def markdown(rows: Sequence[tuple[str, Outcome]]) -> str:
    """The table of docs/from-megatron.md, in Markdown."""
    lines: list[str] = []
    before = ""
    for name, outcome in rows:
        repository, _, rest = name.partition(" ")
        if repository != before:
            lines += [
                f"\n**{repository}**\n",
                "| script | commit | outcome | open, or the reason |",
                "| --- " * 4 + "|",
            ]
            before = repository
        path, _, commit = rest.rpartition(" ")
        remark = re.sub(r"(--[\w-]+|\[\w+\] \w+)", r"`\1`", outcome.remark).replace("|", "/").replace("\0", "")
        lines.append(f"| {path} | {commit} | {outcome.kind} | {remark} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", type=Path)
    parser.add_argument("--details", action="store_true", help="print the arguments that differ")
    parser.add_argument("--index", type=Path, help="file that lists scripts; the output is a table in Markdown")
    parser.add_argument("--folder", type=Path, help="folder in which the scripts of --index lie")
    args = parser.parse_args()
    scripts = [(str(path), path) for path in args.scripts]
    if args.index:
        scripts += sorted(of_index(args.index, args.folder))
    counts: collections.Counter[str] = collections.Counter()
    rows: list[tuple[str, Outcome]] = []
    for name, path in scripts:
        outcome = compare(path, args.details) if path.is_file() else Outcome("missing", "not at hand")
        counts[outcome.kind] += 1
        rows.append((name, outcome))
        if not args.index:
            print(f"{name}\t{outcome.kind}\t{outcome.remark}", flush=True)
    total = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))
    if args.index:
        print(LEGEND)
    print(f"{len(rows)} scripts: {total}.")
    if args.index:
        print(markdown(rows))
    sys.exit(1 if counts["wrong"] else 0)


if __name__ == "__main__":
    main()
