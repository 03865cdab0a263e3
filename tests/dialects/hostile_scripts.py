"""Scripts and YAML that try to execute something, or to hold up or fill the process that reads them.

`python -m tests.dialects.hostile_scripts DIRECTORY` reads each one, in a process whose memory is bounded, with a limit on the
processor's time of each, and prints what became of it as JSON.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

SECONDS = 90
"""Of the processor's time for one script, whose reading takes at most a few."""
MEMORY = 3 << 30
RUN = "\npython3 -m verl.trainer.main_ppo trainer.nnodes=1"


def _doubled(first: str, step: str, times: int) -> str:
    return first + "\n" + "\n".join([step] * times)


EXECUTING = {
    "substitution": "X=$(touch ran)\nY=`touch ran`" + RUN + " data.train_files=$X$Y",
    "eval": "eval 'touch ran'\neval \"$(echo touch ran)\"" + RUN,
    "trap": "trap 'touch ran' EXIT DEBUG" + RUN,
    "function": "python3() { touch ran; }\npython3" + RUN,
    "heredoc": "bash <<EOF\ntouch ran\nEOF\ncat <<EOF > ran\nx\nEOF" + RUN,
    "source": ". <(echo touch ran)\nsource <(touch ran)\nsource ./ran.sh" + RUN,
    "redirections": ": > ran\necho x >> ran\n> ran" + RUN + " 2> ran",
    "arithmetic": "a='b[$(touch ran)]'\n: $((a)) ${b[$(touch ran)]}\n[[ $a -eq 1 ]]" + RUN,
    "substitution in a process": "PATH=.:$PATH\ndiff <(touch ran) >(touch ran)" + RUN,
    "python": 'python3 -c \'open("ran", "w")\'\nX=!!python/object/apply:os.system'
    + RUN
    + " a=!!python/object/apply:os.system[touch]",
}
"""None of them makes the file `ran`."""

GREEDY = {
    # Of an earlier round.
    "stars against a long value": f"a={'a' * 3000}\nb=${{a##*a*a*a*a*a*a*a*b}}${{a%%b*a*a*a*a*a*a}}" + RUN + " a.b=$b",
    "a doubled value": _doubled("a=xxxxxxxxxxxxxxxx", "a=$a$a", 64) + RUN,
    "a doubled array": _doubled("a=(x y)", 'a=("${a[@]}" "${a[@]}")', 64) + RUN,
    "replacements that grow": _doubled("a=aaaaaaaa", "a=${a//a/aaaaaaaa}", 64) + RUN,
    "squares": _doubled("a=99999", "a=$((a*a))", 64) + RUN + " trainer.nnodes=$a",
    "brackets 2,000 deep": "a=" + "$(echo " * 2000 + ")" * 2000 + RUN,
    "a line of 100 MB": None,
    "a file of the kernel": "source /proc/kmsg\n. /proc/self/environ\nsource /dev/zero\n. /dev/stdin" + RUN,
    "a fork bomb": ":(){ :|:& };:" + RUN,
    "a command without end": "a=$(cat /dev/zero)" + RUN + " a.b=$a",
    # New ones.
    "spaces in a case": "case x" + " " * 100_000 + "y in z) ;; esac" + RUN,
    "spaces in a test": "if [ x" + " " * 100_000 + "y; then :; fi\n" + "x=$(cd" + " " * 50_000 + "y && pwd)" + RUN,
    "spaces before a backslash": "a=1" + " " * 100_000 + "x" + RUN,
    "tr with long sets": f"a={'ab' * 20_000}\nb=$(echo $a | tr {'x' * 50_000} {'y' * 50_000})" + RUN,
    "evals that double": "a0=:\n"
    + "\n".join(f'a{i + 1}=\'eval "$a{i}" && eval "$a{i}"\'' for i in range(60))
    + '\neval "$a60"'
    + RUN,
    "scripts that write scripts": "\n".join(f"cat > s{i}.sh <<'E{i}'\nbash s{i + 1}.sh\nE{i}" for i in range(300))
    + "\nbash s0.sh",
    "an expression 5,000 brackets deep": "a=$(("
    + "(" * 5000
    + "1"
    + ")" * 5000
    + "))\nb=$(("
    + "1?" * 5000
    + "1"
    + ":1" * 5000
    + "))"
    + RUN,
    "odd numbers": 'shift ²\n[ --5 -gt 3 ] && a=1\n[ ² -gt 3 ]\ny="<"\ncat $y$y"7" > f\ncat $y$y"²"\nz=${x:99999999999999999999}'
    + RUN,
    "a word that is no file name": "bash " + "x" * 100_000 + ".sh" + RUN,
    "12,000 misspelled keys": RUN + "".join(f" trainer.misspelled{i}=1" for i in range(12_000)),
    "4,000 misspelled keys": RUN + "".join(f" trainer.misspelled{i}=1" for i in range(4_000)),
    "a key of 100,000 letters": RUN + " " + "a." * 50_000 + "b=1",
    "a variable that names itself": RUN + " data.train_files=x\\${LOOP}",
    "numbers of 5,000 digits": RUN + f" trainer.total_epochs={'9' * 5000} data.train_batch_size=1e999 algorithm.gamma=nan",
    "values within values": RUN + " data.train_files=" + "[" * 3000 + "]" * 3000 + " trainer.logger=[&a,*a]",
    "replacements of patterns": f"a={'a' * 50_000}\n" + "b=${a//*a*b/x}\nb=${a//a*a*a*b/x}" + RUN + " a.b=$b",
}
"""Each ends in a translation or a sentence."""

YAML = {
    "references that double": {f"a{i}": f"${{x.a{i + 1}}}${{x.a{i + 1}}}" for i in range(60)} | {"a60": "y"},
    "references in a ring": {"a0": "x${x.a1}", "a1": "x${x.a0}"},
}


def _scripts(directory: Path) -> dict[str, list[str]]:
    """Name -> the words after `--from verl`."""
    words: dict[str, list[str]] = {}
    for name, text in {**EXECUTING, **GREEDY}.items():
        place = directory / f"{len(words)}.sh"
        if text is None:
            with place.open("wb") as file:
                file.write(b"a=")
                for _ in range(100):
                    file.write(b"x" * (1 << 20))
        else:
            place.write_text(text)
        words[name] = [str(place)]
    for name, tree in YAML.items():
        place = directory / f"{len(words)}.yaml"
        place.write_text(json.dumps({"x": tree, "data": {"train_files": "${x.a0}"}}))
        words[name] = ["--config", str(place)]
    os.mkfifo(directory / "fifo.yaml")
    words["a pipe as YAML"] = ["--config", str(directory / "fifo.yaml")]
    words["a file of the kernel as YAML"] = ["--config", "/proc/kmsg"]
    words["a device as a script"] = ["/dev/zero"]
    return words


def _out_of_time(*_: object) -> None:
    raise TimeoutError


def main(directory: Path) -> None:
    from fivefold.config import ConfigError
    from tests.support.dialects import translate_words

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGVTALRM, _out_of_time)
    os.chdir(directory)
    results: dict[str, Any] = {}
    for name, words in _scripts(directory).items():
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        began = time.process_time()
        try:
            translation = translate_words("verl", words, {"HOME": "/home/me", "LOOP": "x${LOOP}"})
            results[name] = ["translated", [sentence[:500] for sentence in translation.refusals[:3]]]
        except ConfigError as error:
            results[name] = ["refused", [fault[:500] for fault in error.faults]]
        except BaseException as error:
            results[name] = ["raised", [f"{type(error).__name__}: {error}"[:500]]]
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        print(f"{time.process_time() - began:6.2f} s {name}", file=sys.stderr)
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
