"""Scripts that are read against bash, which runs them: the same words."""

from __future__ import annotations

import random
import subprocess

import pytest

from fivefold_dialects.shell import read_script

SCRIPTS = {
    "assignments and continuations": """
        set -x
        export N=4   # a comment
        M=${N}2 K=$M
        BATCH=$((N * 8 + M % 5 - 1))
        python3 -m verl.trainer.main_ppo \\
            data.train_batch_size=$BATCH \\
            data.max_prompt_length="$N" data.note='$N # stays' trainer.nnodes=${NNODES:-1} k.k=$K
        """,
    "defaults": """
        A=${A:-"a b"}; B=${B-}; C=${SET:-other}; D=${UNSET:+never}; E=${SET:+there}; : ${F:=6}
        python3 -m m x.a="$A" x.b=[$B] x.c=$C x.d=[$D] x.e=$E x.f=$F
        """,
    "defaults within quotes": """
        N=1; D=/data; F="${F:-['$D/a','$D/b']}"; : "${G:=['x']}"; H="${H:-"a  b"}"; : "${K:=$(( 8 * (N + 1) ))}"
        python3 -m m x.f="$F" x.g="$G" x.h="$H" x.k=$K x.i="[${I:-'$D'}]" x.j=${J:-'$D'}
        """,
    "arrays": """
        FILES="['$HOME/a.parquet','$HOME/b.parquet']"
        ARGS=(
            data.train_files="$FILES"
            # a comment within
            data.shuffle=True )
        ARGS+=("trainer.project_name=my project")
        COMMON="trainer.nnodes=2 trainer.save_freq=5"
        python3 -m m "${ARGS[@]}" $COMMON trainer.logger='["console","wandb"]' 2>&1 | tee log
        """,
    "branches": """
        MODE=big; SIZE=3
        if [ "$MODE" = "big" ]; then SIZE=8; else SIZE=1; fi
        if [ -z "$UNSET" ]; then X=empty; fi
        if [[ $SIZE -gt 4 ]]; then
            Y=many
        elif [[ $SIZE -gt 2 ]]; then
            Y=some
        else
            Y=few
        fi
        python3 -m m s.size=$SIZE s.x=$X s.y=$Y
        """,
    "cases": """
        SIZE=7b
        case "$SIZE" in
            1b|3b) TP=1; PP=1 ;;
            7b)
                TP=2
                PP=4
                ;;
            *) TP=8 ;;
        esac
        case $UNSET in on) MODE=on;; *) MODE=off;; esac
        python3 -m m l.tp=$TP l.pp=$PP l.mode=$MODE
        """,
    "tests joined": """
        A=1; B=; MODEL=Qwen/Qwen3-8B
        [ -n "$A" ] && X=set
        [ -z "$A" ] || Y=there
        [ "$UNSET" = true ] && A=never
        if [[ $A == 1 && -z $B ]]; then W=both; fi
        if [ "$A" = 2 ] || [ "$A" = 1 ]; then V=either; fi
        if [[ $MODEL == Qwen/* ]]; then U=qwen; fi
        if (( A > 0 )); then T=above; fi
        if ! [ "$A" = 2 ]; then S=not; fi
        if [ "$A" = 2 ]; then Q=never; fi
        python3 -m m j.x=$X j.y=$Y j.q=[$Q] j.w=$W j.v=$V j.u=$U j.t=$T j.s=$S j.r=$((A > 0 ? 4 : 2))
        """,
    "functions": """
        train() {
            local rate=$1
            shift
            python3 -m m f.rate=$rate f.count=$# "$@"
        }
        main() { train 1e-6 f.a=1 "f.b=two words"; }
        main "$@"
        """,
    "texts of texts": """
        GPUS=0,1,2,3
        COUNT=$(echo $GPUS | tr ',' ' ' | wc -w)
        DIR="$(dirname "/runs/a b/train.sh")"
        NAME=`basename /models/Qwen3-8B`
        EXTRA="x.flag=True x.more=2"
        python3 -m m t.n=$((COUNT * 2)) t.dir="$DIR" t.name="${NAME}_$(echo run)" t.fields=$(echo $GPUS | awk -F',' '{print NF}') \
            $([ "$COUNT" = 4 ] && echo "t.four=True") $EXTRA
        """,
    "items and parts": """
        SIZES=(1 2 4); WORDS="abcdef"
        ARGS=()
        ARGS+=(i.first=${SIZES[0]} i.last=${SIZES[2]} i.count=${#SIZES[@]} i.all="${SIZES[*]}")
        python3 -m m "${ARGS[@]}" i.part=${WORDS:1:3} i.length=${#WORDS}
        """,
    "loops": """
        for SEED in 7; do
            NAME=run-$SEED
            python3 -m m o.seed=$SEED o.name=$NAME
        done
        """,
    "arguments that nobody gives": """
        MODEL=small
        while [[ $# -gt 0 ]]; do
            case $1 in
                --model) MODEL="$2"; shift 2 ;;
                *) shift ;;
            esac
        done
        python3 -m m a.model=$MODEL a.count=$# a.steps=${1:-10} "$@"
        """,
    "cuts": """
        MODEL=Qwen/Qwen3-8B; FILE=/a/b/c.tar.gz
        python3 -m m n.name=${MODEL##*/} n.owner=${MODEL%%/*} n.end=${FILE%.*} n.swap=${MODEL/Qwen3/Q} n.low=${MODEL,,}
        """,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_words_of_a_command_are_those_that_bash_gives_it(name, tmp_path):
    script = SCRIPTS[name]
    environment = {"HOME": "/home/me", "SET": "is", "PATH": "/usr/bin:/bin"}
    shown = f"python3() {{ for word; do printf '%s\\0' \"$word\" >> {tmp_path}/words; done; }}\n{script}"
    subprocess.run(["bash", "-c", shown], env=environment, check=True, capture_output=True, cwd=tmp_path)
    expected = (tmp_path / "words").read_text().split("\0")[:-1]
    command = read_script(script, environment).command
    words = command[1:]
    assert words[: len(expected)] == expected
    assert words[len(expected) :] in ([], ["2>&1", "|", "tee", "log"])


def test_a_command_within_a_text_is_read(tmp_path):
    """eval of a text, a shell's -c, a heredoc that a shell reads, and what `set -u` needs around empty arrays."""
    for script in (
        'CMD="python3 -m m x.a=1"\nif [ "$UNSET" = true ]; then CMD="$CMD x.b=0"; fi\nCMD="$CMD x.b=2"\neval "$CMD"\n',
        'B=2\nsrun --ntasks=1 bash -c "export A=1; python3 -m m x.a=\\$A x.b=$B"\n',
        "B=2\nssh node bash <<EOF\nA=1\npython3 -m m x.a=\\$A x.b=$B\nEOF\n",
        'A=(x.a=1)\nE=()\npython3 -m m ${E[@]+"${E[@]}"} "${A[@]}" x.b=2\n',
    ):
        assert [word for word in read_script(script, {}).command if "=" in word] == ["x.a=1", "x.b=2"], script


def test_a_branch_that_does_not_run_gives_its_command_only_where_there_is_no_other():
    one = 'if [ "$RANK" = 0 ]; then python3 -m m x.a=1; fi\n'
    assert read_script(one, {}).command[3:] == ["x.a=1"]
    assert read_script(one.replace("; fi", "; else python3 -m m x.a=2; fi"), {}).command[3:] == ["x.a=2"]
    assert read_script(one.replace("; fi", "; else python3 -m m x.a=2; fi"), {"RANK": "0"}).command[3:] == ["x.a=1"]


def test_an_array_that_is_run_by_eval_is_read_once_more():
    script = read_script("A=7\nCMD=(\npython3 -m siirl.main_dag\nx.a=\\$A\n)\n", {})
    assert script.command == ["python3", "-m", "siirl.main_dag", "x.a=7"]


def test_a_file_that_the_script_writes_is_known():
    script = read_script("N=3\ncat > conf.yaml <<EOF\na: {b: ${N}}\nEOF\ncat > 'raw.yaml' <<'EOF'\nc: ${N}\nEOF\n", {})
    assert script.files == {"conf.yaml": "a: {b: 3}\n", "raw.yaml": "c: ${N}\n"}


def test_what_only_running_could_tell_stands_open():
    """The value of a loop, of a command, of an unknown test and of an argument is never guessed."""
    script = """
        for i in 1 2; do LAST=$i; done
        WHEN=$(date)
        if grep -q x /etc/hosts; then HOST=a; else HOST=b; fi
        if [ "$HOST" = a ]; then SIDE=left; fi
        case $HOST in a) PORT=1 ;; *) PORT=2 ;; esac
        python3 -m m x.last=$LAST x.when=$WHEN x.host=$HOST x.first=$1 x.side=$SIDE x.port=${PORT:-3}
    """
    expected = ["x.last=${LAST}", "x.when=$(date)", "x.host=${HOST}", "x.first=${1}", "x.side=${SIDE}", "x.port=${PORT:-3}"]
    assert read_script(script, {}).command[3:] == expected


def test_nothing_of_a_script_is_run(tmp_path):
    read_script(f"touch {tmp_path}/ran\nX=$(touch {tmp_path}/ran)\nY=`touch {tmp_path}/ran`\npython3 -m m a.b=$X a.c=$Y", {})
    assert list(tmp_path.iterdir()) == []


def test_patterns_fit_what_they_fit_in_bash(tmp_path):
    """`case`, `${a#p}` and its kin, and replacements, for patterns and texts of few letters."""
    rng = random.Random(7)
    cases = [
        ("".join(rng.choices("ab*?-c", k=rng.randint(1, 6))) + rng.choice(["", "[ab]", "[!a]", "[a-b]*"]),
         "".join(rng.choices("abc-", k=rng.randint(0, 8))))
        for _ in range(300)
    ]  # fmt: skip
    words, lines = ["{}={}", "{}#", "{}##", "{}%", "{}%%", "{}/", "{}//"], []
    for number, (pattern, text) in enumerate(cases):
        cuts = [f"${{a#{pattern}}}", f"${{a##{pattern}}}", f"${{a%{pattern}}}", f"${{a%%{pattern}}}", f"${{a/{pattern}/X}}",
                f"${{a//{pattern}/X}}"]  # fmt: skip
        lines.append(f"a='{text}'\ncase $a in {pattern}) f=1;; *) f=0;; esac")
        lines.append("ARGS+=(" + " ".join(f'"x.k{number}_{place}=[{cut}]"' for place, cut in enumerate(["$f", *cuts])) + ")")
    script = "ARGS=()\n" + "\n".join(lines) + '\npython3 -m m "${ARGS[@]}"\n'
    shown = f"python3() {{ for word; do printf '%s\\0' \"$word\" >> {tmp_path}/words; done; }}\n{script}"
    subprocess.run(["bash", "-c", shown], check=True, capture_output=True, env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"})
    expected = (tmp_path / "words").read_text().split("\0")[2:-1]
    assert len(expected) == len(cases) * len(words)
    assert read_script(script, {}).command[3:] == expected


def test_whole_numbers_are_those_of_64_bits():
    script = "a=99999\n" + "a=$((a*a))\n" * 3 + "python3 -m m x.a=$a x.b=$((-7 / 2)) x.c=$((-7 % 3)) x.d=$((7 / -2))\n"
    shown = subprocess.run(
        ["bash", "-c", script.replace("python3 -m m", "echo")], capture_output=True, text=True, check=True
    )
    assert read_script(script, {}).command[3:] == shown.stdout.split()
