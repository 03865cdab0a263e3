"""Scripts that are read against bash, which runs them: the same words."""

from __future__ import annotations

import subprocess

import pytest

from fivefold.config.dialects.shell import read_script

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
    found = command[1:]
    assert found[: len(expected)] == expected
    assert found[len(expected) :] in ([], ["2>&1", "|", "tee", "log"])


def test_an_array_that_is_run_by_eval_is_read_once_more():
    found = read_script("A=7\nCMD=(\npython3 -m siirl.main_dag\nx.a=\\$A\n)\n", {})
    assert found.command == ["python3", "-m", "siirl.main_dag", "x.a=7"]


def test_a_file_that_the_script_writes_is_known():
    found = read_script("N=3\ncat > conf.yaml <<EOF\na: {b: ${N}}\nEOF\ncat > 'raw.yaml' <<'EOF'\nc: ${N}\nEOF\n", {})
    assert found.files == {"conf.yaml": "a: {b: 3}\n", "raw.yaml": "c: ${N}\n"}


def test_what_only_running_could_tell_stands_open():
    """The value of a loop, of a command, of an unknown test and of an argument is never guessed."""
    script = """
        for i in 1 2; do LAST=$i; done
        WHEN=$(date)
        if grep -q x /etc/hosts; then HOST=a; else HOST=b; fi
        python3 -m m x.last=$LAST x.when=$WHEN x.host=$HOST x.first=$1
    """
    assert read_script(script, {}).command[3:] == ["x.last=${LAST}", "x.when=$(date)", "x.host=${HOST}", "x.first=${1}"]


def test_nothing_of_a_script_is_run(tmp_path):
    read_script(f"touch {tmp_path}/ran\nX=$(touch {tmp_path}/ran)\nY=`touch {tmp_path}/ran`\npython3 -m m a.b=$X a.c=$Y", {})
    assert list(tmp_path.iterdir()) == []
