"""The words that a script gives a command, compared with the words that bash itself gives."""

from __future__ import annotations

import contextlib
import random
import subprocess
from pathlib import Path

import pytest

from dtmega.interop.megatron.bash import grammar, run, words
from dtmega.interop.megatron.bash.words import Undecided, written

# Scripts that only use what they set themselves, so that bash and ours must give `show` the same words.
SCRIPTS = {
    "quotes": """show a\\ b 'c d' "e\\"f\\$g\\\\h" $'t\\tu' "multi\nline" ''""",
    "a comment that ends in a backslash": "show a # b \\\nshow c",
    "a comment after a continued line": "show a \\\n  # b \\\n\nshow c",
    "a trailing backslash": "show a \\\n  b \\\n",
    "an array": 'A=(--a 1 "x y"\n  --c # (so)\n); A+=(--d); show "${A[@]}" ${A[2]} "${A[*]}" ${#A[@]}',
    "an array with indices": "A=([2]=x [5]=y z); show ${A[2]} ${A[6]} ${!A[@]} ${#A[@]}",
    "appending to a text": 'A="--a 1"; A+=" --b \'q\'"; show $A "$A"',
    "defaults": 'X=; show ${X:-d e} "${X:-d e}" ${X-u} ${X:=k} $X ${X:+alt} "${X:+"in quotes"}" end',
    "defaults with quotes": 'show "${5:-"a/b c"}" ${5:-"a/b c"}',
    "arithmetic": "N=4; show $((N*2+1)) $((-7/2)) $((-7%3)) $((2**10)) $((0x1f)) $((017)) $((N>3?1:2)) $((M=N+1)) $M",
    "arithmetic with statements": "N=1; ((N++)); let N=N*5; ((N+=2)); show $N $((N << 2 | 1)) $((!N)) $((N==12&&1))",
    "which operator binds more": "show $((5 ^ 3 & 6)) $((1 | 3 ^ 2)) $((6 & 3 == 3)) $((1 + 2 << 3)) $((2 - 3 * 4))",
    "what is skipped": "n=1; ((0 && n++)); ((1 || n++)); show $n $((1 ? 7 : (n = 9))) $((0 ? n++ : n)) $((0 && 1/0))",
    "parts of a value": "x=ab.cd.ef; show ${x%.*} ${x%%.*} ${x#*.} ${x##*.} ${x/b/Q} ${x//./-} ${x:1:3} ${x: -2} ${#x}",
    "ends of a value": "x=abcdef; show ${x:1:-2} ${x: -4:2} ${x: -4:-1} ${x:4:9} a${x:6}b a${x:9}b ${x::2}",
    "the last items of a list": "A=(p q r); show ${A[-1]} ${A[-3]}; A[6]=s; show ${A[-1]}",
    "escapes": 'show "$(echo -e \'a\\tb\\\\c\\nd\')" "$(echo -ne "x\\\\ny")" $(echo \'a\\nb\')',
    "names of files": "show $(basename /a/b.sh .sh) $(basename .sh .sh) $(basename /a/ ) $(dirname /a/b/) $(dirname /)",
    "case of a value": "x=aBc; show ${x^^} ${x,,} ${x^}",
    "an indirect variable": "a=b; b=c; show ${!a}",
    "output of commands": "f() { local v=$1; echo out$v; }; show $(f 3) `f 4` $(echo a; echo b) $(printf '%s-%d' p 7)",
    "nested output": 'show "$(echo "$(echo a b)" c)" $(basename /x/y.txt) $(dirname "/x/y.txt")',
    "if": "D=1; if [ $D = 1 ]; then L=2; elif [ $D = 2 ]; then L=3; else L=4; fi; show $L",
    "else": 'D=; if [[ -n "$D" && $D == a* ]]; then L=2; else L=4; fi; show $L',
    "tests": "n=5; [ $n -gt 3 -a $n -lt 9 ] && show gt; [[ ab == a? ]] && show pat; [[ ab == 'a?' ]] || show quoted",
    "empty numbers": "E=; [[ $E -eq 0 ]] && show two; [ $E -eq 0 ] 2>&- || show one; test -z $E && show empty",
    "a list": "true && show a || show b; false && show c || show d; ! false && show e",
    "case": 'm=q1; case "$m" in a|b) show ab;; q*) show q;; *) show other;; esac',
    "loops": "for i in 1 2 {7..9} {10..30..10}; do for j in a b; do show $i$j; done; done",
    "counted loops": "for ((i=0; i<3; i++)); do [ $i = 1 ] && continue; show c$i; done",
    "an endless loop": "for ((i=0;;i++)); do show $i; [ $i = 2 ] && break; done",
    "while": "n=3; while [ $n -gt 0 ]; do n=$((n-1)); [ $n = 1 ] && break; show w$n; done",
    "until": "n=0; until [ $n -ge 2 ]; do ((n++)); show u$n; done",
    "functions": "f() { show f $# $1 $2; shift; show $@; return 0; show never; }; f a 'b c'; g() (show g); g",
    "local variables": "v=1; f() { local v=2; show $v; }; f; show $v",
    "a subshell": "v=1; (v=2; show $v); { v=3; }; show $v",
    "eval": 'X=\'--a "b c"\'; eval show $X; eval "show $X"',
    "a child": "export L='show child'; bash -c '$L \"$1\"' name 'first one'",
    "a child with expanded words": 'L="show child"; X="a b"; bash -c "$L --x $X"',
    "a here-document": 'X=5; cat <<EOT > conf\n{"a": $X, "b": "\\$x"}\nEOT\nshow "$(cat conf)"',
    "a quoted here-document": 'X=5; cat > conf <<\'EOT\'\n{"a": $X}\nEOT\nshow "$(cat conf)"',
    "a template": 'echo "a NAME b NAME" > t; X=7; sed "s/NAME/$X/" t | sed "s/b/c/g" > u; show $(cat u)',
    "arguments": 'set -- p "q r"; show $# "$@" $2; for a in "$@"; do show $a; done; shift; show "$1" $#',
    "an exit": "if [ 1 = 2 ]; then exit 1; fi; show a; exit 0; show never",
    "a temporary variable": "X=1; X=2 show $X; show $X",
    "unset": "y=1; unset y; show a$y ${y-unset} ${y:+set} end",
    "declarations": "declare -i n=4; readonly R=r; typeset t=u; export E=e F; show $n $R $t $E",
    "background": "X=1; show $X & wait",
    "words behind a redirection": "show a 2> /dev/null b; show c > /dev/stdout d",
    "behind a here-document": "cat <<EOT | show x\nq\nEOT\ncat <<EOT > /dev/null && show y\nq\nEOT\n",
    "exported by name": 'KEY=ABC; export "$KEY"="some value"; show "$ABC"',
    "a separator in a value": "IFS=,; show a; unset IFS; x='a b'; show $x",
    "an assignment of a program": "P=show; $P x; Q='show y'; $Q",
}


def shown(script: str, folder: Path) -> list[list[str]]:
    """The words that bash gives `show`."""
    preamble = "show() { printf '%s\\0' BEGIN \"$@\"; }\nexport -f show\n"
    done = subprocess.run(
        ["bash", "-c", preamble + script], cwd=folder, env={"PATH": "/usr/bin:/bin"}, capture_output=True, check=False
    )
    return [part.split("\0")[:-1] for part in done.stdout.decode().split("BEGIN\0")[1:]]


def found(script: str, given: dict[str, str] | None = None, folder: Path | None = None) -> list[list[str]]:
    launches, _ = run.launches(script, lambda each: written(each[0]) == "show", folder, given)
    return [[written(word) for word in launch.words[1:]] for launch in launches]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_words_are_those_that_bash_gives(name: str, tmp_path: Path) -> None:
    expected = shown(SCRIPTS[name], tmp_path)
    assert expected != []
    assert found(SCRIPTS[name]) == expected


def test_lines_that_end_in_a_carriage_return_are_read_as_without() -> None:
    assert found("A=1 \r\nshow $A \\\r\n b\r\n") == [["1", "b"]]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("show $HERE", [["$HERE"]]),
        ("X=$(hostname); show $X-1", [["$(hostname)-1"]]),
        ("show $(( $(nproc) * 2 ))", [["$(( $(nproc) * 2 ))"]]),
        ("read X; show $X", [["$X"]]),
        ("show ${N%.*} ${N/a/b}", [["${N%.*}", "${N/a/b}"]]),
        ("X=a; IFS=:; show $X:$X b", [["a:a", "b"]]),
        ("show {a,b}", [["{a,b}"]]),
        ("x=abc; show ${x%'c'} ${x/\"b\"/z}", [["${x%'c'}", '${x/"b"/z}']]),
        ('A=(ab b); show "${A[@]:1}" ${A[@]%b} ${A[*]/b/c}', [["${A[@]:1}", "${A[@]%b}", "${A[*]/b/c}"]]),
        ("show $(echo -e '\\x41') $(basename -s .sh a.sh)", [["$(echo -e '\\x41')", "$(basename -s .sh a.sh)"]]),
        ("while read L; do N=$L; done < f; show $N", [["${N}"]]),
    ],
)
def test_what_only_a_machine_knows_stays_as_it_is_written(script: str, expected: list[list[str]]) -> None:
    if "while" in script:
        with pytest.raises(Undecided):
            found(script)
    else:
        assert found(script) == expected


def test_a_child_has_only_the_exported_variables() -> None:
    assert found("export A=1; B=2; bash -c 'show $A $B'") == [["1", "$B"]]
    assert found("X=5 bash -c 'show $X'; show $X") == [["5"], ["$X"]]


def test_a_value_that_the_user_gives_takes_the_place_of_an_unknown_one() -> None:
    assert found("show $X ${X:-d}", {"X": "5"}) == [["5", "5"]]
    assert found("X=$(nproc); show $X", {"X": "5"}) == [["5"]]
    assert found("X=4; show $X", {"X": "5"}) == [["4"]]
    assert found('show $1 "$2" $#', {"1": "a", "2": "b c"}) == [["a", "b c", "2"]]
    assert found("[ $# -eq 0 ] && show none", {"#": "0"}) == [["none"]]


BRANCH = 'L=24\nif [ "$DEBUG" = 1 ]; then\n  L=2\nfi\nshow $L\n'


def test_a_condition_that_decides_and_is_not_known_is_refused_with_its_line_and_its_variable() -> None:
    with pytest.raises(Undecided, match=r"line 2: '\[ \"\$DEBUG\" = 1 \]' is not known.*--set DEBUG=VALUE"):
        found(BRANCH)
    assert found(BRANCH, {"DEBUG": "1"}) == [["2"]]
    assert found(BRANCH, {"DEBUG": ""}) == [["24"]]


def test_the_number_of_arguments_is_asked_for_in_quotes() -> None:
    with pytest.raises(Undecided, match="--set '#=VALUE'"):
        found('for a in "$@"; do L=$a; done; show $L')


@pytest.mark.parametrize(
    "script",
    [
        "case $MODE in a) L=1;; b) L=2;; esac; show $L",
        "[ -d /data ] && L=1; show $L",
        "nvidia-smi | grep -q H100 && L=1; show $L",
        "for x in $LIST; do L=$x; done; show $L",
        "for ((i = 0; i < N; i++)); do L=$i; done; show $L",
        "if [ $X ]; then f() { L=1; }; f; fi; eval show $L",
        "A=(1); if [ $X ]; then A+=(2); fi; show ${A[@]}",
        'if [ $X ]; then cd a; P=1; fi; CMD="show $P"; bash -c "$CMD"',
        "f() { if [ $X ]; then return; fi; L=2; }; f; show $L",
    ],
)
def test_what_depends_on_an_unknown_condition_is_refused_where_it_is_used(script: str) -> None:
    with pytest.raises(Undecided):
        found(script)


@pytest.mark.parametrize(
    "script",
    [
        'if [ ! -f "$V" ]; then wget x; fi; show a',
        "if [ -z $X ]; then echo usage; exit 1; fi; show a",
        "[ -d d ] || mkdir d; L=a; show $L",
        "L=a; if [ -z $X ]; then L=b; exit 1; fi; show $L",
        "command -v git || exit 1; show a",
        "cd somewhere && show a",
        "for f in $FILES; do echo $f; done; show a",
        "if [ $X ]; then L=1; else L=1; fi; M=a; show $M",
        "if [ $X ]; then show a; fi",
    ],
)
def test_an_unknown_condition_that_decides_nothing_does_not_matter(script: str) -> None:
    assert found(script) == [["a"]]


def test_a_file_below_the_scripts_folder_is_sourced_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "common.sh").write_text("L=7\n")
    (tmp_path / "other.sh").write_text("L=8\n")
    folder = tmp_path / "inside"
    for path in ("common.sh", "./common.sh", '$(dirname "$0")/common.sh', '$(cd "$(dirname "$0")" && pwd)/common.sh'):
        assert found(f"L=1; source {path}; show $L", folder=folder) == [["7"]], path
    for path in ("../other.sh", str(tmp_path / "other.sh"), "missing.sh", "$ELSEWHERE/common.sh"):
        launches, notes = run.launches(f"L=1; . {path}; show $L", lambda each: written(each[0]) == "show", folder)
        assert written(launches[0].words[1]) == "1"
        assert ["is not read, so what it sets is not known" in note for note in notes] == [True], path


def test_each_word_has_the_line_that_it_comes_from() -> None:
    script = 'A=" \\\n  --a 1 \\\n  --b 2"\nexport CMD="show $A \\\n --c"\nbash -c "$CMD --d"\n'
    (launch,), _ = run.launches(script, lambda each: written(each[0]) == "show")
    lines = {written(word): word[0].line for word in launch.words}
    assert lines == {"show": 4, "--a": 2, "1": 2, "--b": 3, "2": 3, "--c": 5, "--d": 6}


def test_a_placeholder_of_an_example_is_unknown() -> None:
    (launch,), _ = run.launches("P=<Specify path>/x\nshow $P a\n", lambda each: written(each[0]) == "show")
    assert [written(word) for word in launch.words] == ["show", "<Specify path>/x", "a"]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'a", "line 1: this is not bash"),
        ("a\nif x; then y\n", "this is not bash"),
        ("A=xxxxxxxxxx\n" + "A=$A$A\n" * 40, "make a text of|texts of more than"),
        ("while true; do A=1; done", "a loop of more than|more than 50,000 statements"),
        ("f() { f; }; f", "inside each other"),
        ("eval 'eval \"eval x\"'\nX='eval $X'\neval \"$X\"", "inside each other"),
        ("for i in {1..9999999}; do :; done", "more than 10,000 words"),
        ("echo " + "$(" * 300 + "a" + ")" * 300, "nested|inside each other|too deeply"),
        ("(" * 5000 + ")" * 5000, "nested|not bash"),
        ("#" + "x" * 1_100_000, "expected at most 1,000,000"),
    ],
)
def test_a_text_that_is_no_script_or_exceeds_a_limit_is_refused(script: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        found(script)


def test_any_text_is_read_or_refused() -> None:
    rng = random.Random(0)
    pieces = [
        "show",
        " ",
        "\n",
        '"',
        "'",
        "`",
        "$",
        "${",
        "}",
        "(",
        ")",
        "A=",
        "$A",
        "\\",
        "#",
        "<<EOT",
        "--",
        "if",
        "[[",
    ]
    pieces += [
        "]]",
        "then",
        "fi",
        "for",
        "in",
        "do",
        "done",
        "$((",
        "))",
        ";",
        "&&",
        "|",
        "case",
        "esac",
        ";;",
        "{",
        "EOT",
    ]
    for _ in range(2000):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 30)))
        with contextlib.suppress(ValueError):
            found(text)


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    found(f"X=$(touch {tmp_path}/a); `touch {tmp_path}/b`; touch {tmp_path}/c; echo x > {tmp_path}/d; show a")
    assert list(tmp_path.iterdir()) == []


def test_the_stand_in_of_an_unknown_piece_keeps_its_text() -> None:
    source = grammar.parse((words.Text("show ", 1), words.Unknown("$(a b)", 1), words.Text("/c", 1)))
    assert list(source.unknown.values()) == [words.Unknown("$(a b)", 1)]
