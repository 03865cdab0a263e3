"""Models and data sets by the clients of both hubs, from a hub on this machine.

Those of ModelScope run where its client is installed (`make test-hub`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from fivefold.data.rows import count_rows, source_of
from fivefold.errors import UserError
from fivefold.hub import commit_of, model_snapshot
from tests.data.test_data_sets import parquet, rows
from tests.support.commands import LONGEST
from tests.support.hub import MEMBER, STRANGER, Hub, serving
from tests.support.tiny_models import make_model, make_tokenizer

MODELSCOPE = importlib.util.find_spec("modelscope_hub") is not None
LARGE = 11 << 20
"""Bytes of a file that a client writes in two pieces."""
WANTED = ["*.json", "*.safetensors"]
LOAD = """
import json, sys
from fivefold.errors import UserError
from fivefold.hub import model_snapshot
for name, wanted, commit in json.loads(sys.argv[1]):
    try:
        print(model_snapshot(name, wanted, commit))
    except UserError as error:
        print("refused:", error)
"""


@dataclass(frozen=True)
class User:
    """A user with caches of their own, of one of the two hubs: its address is read when its client is imported."""

    home: Path
    hub: Hub
    prefix: str
    variables: tuple[tuple[str, str], ...] = ()
    largest: int | None = None
    """Bytes of the largest file that the system lets them write."""

    def having(self, **variables: str) -> User:
        return replace(self, variables=(*self.variables, *variables.items()))

    @property
    def environment(self) -> dict[str, str]:
        others = ("PROXY", "HF_", "MODELSCOPE_")
        inherited = {name: value for name, value in os.environ.items() if not any(part in name.upper() for part in others)}
        of_user = {
            "HF_HOME": f"{self.home}/hf",
            "MODELSCOPE_CACHE": f"{self.home}/ms",
            "MODELSCOPE_HOME": f"{self.home}/ms-home",
        }
        path = os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))
        address = {"HF_ENDPOINT": self.hub.url, "MODELSCOPE_DOMAIN": self.hub.url, "HF_HUB_DISABLE_TELEMETRY": "1"}
        return {**inherited, **of_user, **address, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", **dict(self.variables)}

    @property
    def token(self) -> str:
        return "MODELSCOPE_API_TOKEN" if self.prefix else "HF_TOKEN"

    @property
    def cache(self) -> Path:
        return self.home / ("ms" if self.prefix else "hf/hub")

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        def limit() -> None:
            if self.largest is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (self.largest, self.largest))

        return subprocess.run(
            [sys.executable, *words],
            cwd=self.home,
            env=self.environment,
            preexec_fn=limit,
            capture_output=True,
            text=True,
            timeout=LONGEST,
        )

    def fivefold(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "fivefold.cli", *words)

    def load(self, *names: str, commit: str | None = None, wanted: list[str] = WANTED) -> list[str]:
        """The directory of each model, or the sentence that says why there is none."""
        done = self.run("-c", LOAD, json.dumps([(f"{self.prefix}{name}", wanted, commit) for name in names]))
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        return done.stdout.splitlines()


@pytest.fixture
def hub():
    with serving() as started:
        yield started


@pytest.fixture(params=["", pytest.param("modelscope:", marks=pytest.mark.hub)], ids=["huggingface", "modelscope"])
def user(request, tmp_path, hub):
    if request.param and not MODELSCOPE:
        pytest.skip("modelscope is not installed")
    return User(tmp_path, hub, request.param)


def files(mark: str, size: int = 1000) -> dict[str, bytes]:
    return {"config.json": b"{}", "model.safetensors": mark.encode() * size, "tokenizer.json": b"[]", "README.md": b"none"}


def weights(directory: str) -> bytes:
    return (Path(directory) / "model.safetensors").read_bytes()


def test_a_model_comes_from_its_hub_at_the_revision_that_its_name_has(user, hub):
    first = hub.push("some/tiny", files("a"), "models", tag="v1")
    hub.push("some/tiny", files("b"), "models")
    latest, tagged = user.load("some/tiny", "some/tiny@v1")
    assert (weights(latest), weights(tagged)) == (b"b" * 1000, b"a" * 1000)
    assert commit_of(Path(tagged)) == first
    # The commit of a checkpoint is read, whatever the name says; nothing is downloaded twice.
    downloads = len(hub.large_downloads())
    (pinned,) = user.load("some/tiny", commit=first)
    assert weights(pinned) == b"a" * 1000 and len(hub.large_downloads()) == downloads == 2
    assert sorted(path.name for path in Path(latest).iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.hub
@pytest.mark.skipif(not MODELSCOPE, reason="modelscope is not installed")
def test_modelscope_s_cache_gives_no_other_revision_also_in_its_first_form(hub, tmp_path):
    user = User(tmp_path, hub, "modelscope:")
    hub.push("some/tiny", files("a"), "models", tag="v1")
    hub.push("some/tiny", files("b"), "models")
    user.load("some/tiny@v1")
    (message,) = user.having(HF_HUB_OFFLINE="1").load("some/tiny")
    assert "does not have all of it" in message
    # The first client wrote models/OWNER/NAME, whose revision is the branch.
    first = tmp_path / "ms/models/some/old"
    first.mkdir(parents=True)
    (first / "config.json").write_text("{}")
    hub.push("some/old", files("c"), "models")
    (directory,) = user.load("some/old")
    assert Path(directory) == first and weights(directory) == b"c" * 1000 and commit_of(first) == "master"


@pytest.mark.hub
@pytest.mark.skipif(not MODELSCOPE, reason="modelscope is not installed")
def test_a_branch_of_modelscope_is_read_at_its_commit_or_a_line_says_that_it_is_not(hub, tmp_path):
    """Each file names the commit that wrote it: the latest is the branch's if the same files are there."""
    user = User(tmp_path, hub, "modelscope:")
    hub.push("some/tiny", files("a"), "models")
    commit = hub.push("some/tiny", {**files("a"), "tokenizer.json": b"[1]"}, "models")
    (directory,) = user.load("some/tiny")
    assert commit_of(Path(directory)) == commit
    later = hub.push("some/tiny", files("b"), "models")
    offline, pinned, latest = (
        user.having(HF_HUB_OFFLINE="1").load("some/tiny"),
        user.load("some/tiny", commit=commit),
        user.load("some/tiny"),
    )
    assert offline == pinned == [directory] and commit_of(Path(latest[0])) == later and weights(latest[0]) == b"b" * 1000
    # A file was taken away last: the latest commit of the files that are left is not the branch's, and has one more.
    hub.push("some/fewer", {**files("a"), "extra.json": b"1"}, "models")
    hub.push("some/fewer", files("a"), "models")
    hub.push("some/old", files("a"), "models")
    for name, names_none in (("some/fewer", False), ("some/old", True)):
        hub.names_no_commits = names_none
        request = json.dumps([(f"modelscope:{name}", WANTED, None)])
        done = user.run("-c", LOAD, request)
        assert commit_of(Path(done.stdout.strip())) == "master"
        assert f"download modelscope:{name}: the commit of these files is not known" in done.stderr


def test_what_a_hub_does_not_give_is_one_sentence_with_what_to_do(user, hub):
    hub.push("some/tiny", files("a"), "models")
    missing, revision = user.load("some/none", "some/tiny@v9")
    head = f"refused: '{user.prefix}some/none'"
    says = "there is none of this name{}, or it is private (then set " + user.token + " to a token that may read it)"
    assert missing.startswith(head) and missing.endswith(f"from {hub.url}: " + says.format(""))
    assert revision.endswith(
        says.format(" with revision 'v9'") if user.prefix else f"from {hub.url}: it has no revision 'v9'"
    )


def test_a_gated_model_says_where_its_license_is_and_which_token_counts(user, hub):
    hub.push("some/gated", files("a"), "models")
    hub.gated.add("models/some/gated")
    page = f"{hub.url}/{'models/' if user.prefix else ''}some/gated"
    says = f"access to it is restricted: accept its license at {page}, then set {user.token} to a token of that account"
    for one in (user, user.having(**{user.token: STRANGER})):
        (message,) = one.load("some/gated")
        assert message.endswith(f"from {hub.url}: {says}"), message
    (directory,) = user.having(**{user.token: MEMBER}).load("some/gated")
    assert weights(directory) == b"a" * 1000
    # The host of large files is another one, and must not see the token.
    assert hub.large_downloads() and not hub.tokens_elsewhere


@pytest.mark.hub
def test_a_download_that_breaks_off_continues_where_it_was(user, hub):
    data = files("abcdefghijk", 1 << 20)
    hub.push("some/large", data, "models")
    hub.cuts = [LARGE - 5000, 100]
    (directory,) = user.load("some/large")
    assert weights(directory) == data["model.safetensors"]
    spans = [request.partition(" bytes=")[2] for request in hub.large_downloads()]
    assert len(spans) == 3 and spans[0] == "" and 0 < int(spans[1][:-1]) <= int(spans[2][:-1]) < LARGE


def test_a_full_disk_is_named_and_what_it_lacked_is_downloaded_again(hub, tmp_path):
    user = User(tmp_path, hub, "")
    hub.push("some/tiny", files("a", 1 << 20), "models")
    (message,) = replace(user, largest=1 << 19).load("some/tiny")
    where = f"the disk of {user.cache} is full: make room, or set HF_HOME to a directory on another one"
    assert message.endswith(f"from {hub.url}: {where}"), message
    (directory,) = user.load("some/tiny")
    assert weights(directory) == b"a" * (1 << 20)


@pytest.mark.hub
def test_a_disk_without_room_is_named_by_both_hubs(user, hub):
    """A file system of one MiB for the cache, in a namespace of the process's own."""
    disk = user.home / ("ms" if user.prefix else "hf")
    disk.mkdir()
    inside = [
        "unshare",
        "--mount",
        "--map-root-user",
        "sh",
        "-c",
        f'mount -t tmpfs -o size=1m none {disk} && exec "$@"',
        "sh",
    ]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    hub.push("some/tiny", files("a", 4 << 20), "models")
    request = json.dumps([(f"{user.prefix}some/tiny", WANTED, None)])
    words = [*inside, sys.executable, "-c", LOAD, request]
    done = subprocess.run(words, env=user.environment, capture_output=True, text=True, timeout=LONGEST)
    variable = "MODELSCOPE_CACHE" if user.prefix else "HF_HOME"
    says = f"the disk of {user.cache} is full: make room, or set {variable} to a directory on another one\n"
    assert done.stdout.endswith(says) and "Traceback" not in done.stderr, done.stdout + done.stderr


def test_without_a_network_a_whole_cache_is_enough_and_a_part_of_one_is_not(user, hub):
    hub.push("some/tiny", files("a"), "models")
    hub.push("some/part", files("b"), "models")
    directory, part = user.load("some/tiny", "some/part")
    for path in Path(part).glob("*.safetensors"):
        path.unlink()
    before = len(hub.requests)
    offline = user.having(HF_HUB_OFFLINE="1")
    loaded, message, none = offline.load("some/tiny", "some/part", "some/none")
    assert loaded == directory and len(hub.requests) == before
    lacks = f"and its cache in {user.cache} does not have all of it"
    assert message.endswith(f": HF_HUB_OFFLINE is set, {lacks}") and none.endswith(f": HF_HUB_OFFLINE is set, {lacks}")
    gone = user.having(HF_ENDPOINT="http://127.0.0.1:9", MODELSCOPE_DOMAIN="127.0.0.1:9")
    loaded, message = gone.load("some/tiny", "some/part")
    assert loaded == directory and message.endswith(f": it does not answer, {lacks}")


@pytest.mark.hub
def test_a_hub_that_is_out_of_order_or_refuses_the_token_says_so(hub, tmp_path):
    user = User(tmp_path, hub, "")
    hub.push("some/tiny", files("a"), "models")
    (message,) = user.having(HF_TOKEN="wrong").load("some/tiny")
    assert message.endswith("it refuses the token in HF_TOKEN: set another one, or none")
    hub.status = 503
    (message,) = user.load("some/tiny")
    assert message.endswith(f"from {hub.url}: it answers with status 503: try again later")


@pytest.mark.hub
def test_processes_that_load_a_model_together_download_it_once(user, hub):
    hub.push("some/tiny", files("a", 1 << 20), "models")
    hub.seconds_per_piece = 0.05
    with ThreadPoolExecutor(2) as pool:
        directories = set(map(tuple, pool.map(lambda _: user.load("some/tiny"), range(2))))
    assert len(directories) == 1 and len(hub.large_downloads()) == 1


@pytest.mark.hub
def test_a_long_download_prints_how_much_has_arrived(hub, tmp_path):
    hub.push("some/tiny", files("a", 24 << 20), "models")
    hub.seconds_per_piece = 0.01
    user = User(tmp_path, hub, "")
    often = f"import fivefold.hub\nfivefold.hub._PROGRESS_SECONDS = 0.3\n{LOAD}"
    done = user.run("-c", often, json.dumps([("some/tiny", WANTED, None)]))
    lines = done.stderr.splitlines()
    assert done.returncode == 0 and len(lines) > 1, done.stderr
    assert all(line.startswith("download some/tiny: ") and line.endswith(" MB/s") for line in lines)


GSM8K = {f"main/{split}-00000-of-00001.parquet": split for split in ("train", "test")}


def test_fivefold_data_writes_known_data_sets_from_the_hub_or_says_why_not(hub, tmp_path):
    user = User(tmp_path, hub, "")
    hub.push("openai/gsm8k", {name: parquet(*rows(3, split)) for name, split in GSM8K.items()})
    problems = [{"problem": f"What is {number}?", "answer": str(number), "solution": ""} for number in range(40)]
    hub.push("agentica-org/DeepScaleR-Preview-Dataset", {"deepscaler.json": json.dumps(problems).encode()})
    for name, sizes in {"gsm8k": (3, 3), "deepscaler": (38, 2)}.items():
        done = user.fivefold("data", name, "--out", str(tmp_path / name))
        assert done.returncode == 0 and not done.stderr, done.stderr
        files_of_splits = [tmp_path / name / f"{split}.parquet" for split in ("train", "test")]
        assert tuple(count_rows(path, 99) for path in files_of_splits) == sizes
    hub.gated.add("datasets/openai/gsm8k")
    other = replace(user, home=tmp_path / "other")
    other.home.mkdir()
    done = other.fivefold("data", "gsm8k", "--out", str(tmp_path / "gated"))
    says = f"accept its license at {hub.url}/datasets/openai/gsm8k, then set HF_TOKEN to a token of that account"
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and says in done.stderr, done.stderr
    assert done.stderr.endswith("; or name local files with --source\n") and not (tmp_path / "gated").exists()


LOCATE = """
import sys
from pathlib import Path
from fivefold.data.data_sets import local_file
from fivefold.errors import UserError
try:
    print(local_file(sys.argv[1], "train", Path("cache"), (sys.argv[2:] or [None])[0]))
except UserError as error:
    print("refused:", error)
"""
README = b"""---
configs:
- config_name: main
  data_files: [{split: train, path: main/train-*}, {split: test, path: main/test-*}]
- config_name: short
  data_files: [{split: train, path: main/test-*}]
---
"""


@pytest.mark.hub
@pytest.mark.skipif(not MODELSCOPE, reason="modelscope is not installed")
def test_a_data_set_of_modelscope_becomes_a_file_of_its_content_once(hub, tmp_path):
    user = User(tmp_path, hub, "modelscope:")

    def locate(*words: str, by: User = user) -> str:
        done = by.run("-c", LOCATE, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    def push(count: int, tag: str | None = None) -> None:
        splits = {name: parquet(*rows(count, split)) for name, split in GSM8K.items()}
        hub.push("some/sums", {"README.md": README, **splits}, tag=tag)

    def gets() -> int:
        return sum(
            request.startswith("GET /api/v1/datasets/some/sums/repo") and "tree" not in request for request in hub.requests
        )

    push(3, tag="v1")
    name = "modelscope:some/sums:main"
    first = locate(name)
    assert count_rows(Path(tmp_path, first), 99) == 3 and source_of(Path(tmp_path, first)) == "some/sums"
    downloads = gets()
    assert locate(name) == first and gets() == downloads > 0
    push(5)
    second = locate(name)
    assert second != first and count_rows(Path(tmp_path, second), 99) == 5
    assert count_rows(Path(tmp_path, locate(f"{name}/test@v1")), 99) == 3
    # A run that resumes reads the file that it began with; where that is not, other files are refused.
    pinned = commit_of(Path(first))
    assert locate(name, pinned) == first
    other = replace(user, home=tmp_path / "other")
    other.home.mkdir()
    assert f"has changed: the run began with its files of hash {pinned}" in locate(name, pinned, by=other)
    # Without a network the cache is enough, and what it lacks is one sentence.
    alone = user.having(HF_HUB_OFFLINE="1")
    assert locate(name, by=alone) == second
    assert "modelscope download --dataset some/other" in locate("modelscope:some/other", by=alone)
    for asked_for, says in {
        "modelscope:some/sums": "must name one of its configurations: modelscope:some/sums:main, modelscope:some/sums:short",
        f"{name}/none": "has no split 'none': name one of modelscope:some/sums:main/train, modelscope:some/sums:main/test",
        "modelscope:no/where": "there is none of this name",
    }.items():
        assert says in locate(asked_for)
    hub.gated.add("datasets/some/sums")
    says = f"accept its license at {hub.url}/datasets/some/sums, then set MODELSCOPE_API_TOKEN"
    assert says in locate(name, by=other)
    assert locate(name, by=other.having(MODELSCOPE_API_TOKEN=MEMBER)).endswith("train.parquet")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_model("qwen3", tmp_path_factory.mktemp("hub") / "model")
    make_tokenizer(path)
    return path


def write_run(user: User, model: Path) -> Path:
    """The file of a run on two ranks with a model and rows of the hub, which has them then."""
    user.hub.push("some/tiny", {path.name: path.read_bytes() for path in model.iterdir()}, "models")
    user.hub.push("openai/gsm8k", {name: parquet(*rows(4)) for name in GSM8K})
    tree = {
        "model": {"path": f"{user.prefix}some/tiny"},
        "policy": {"dtype": "float32", "backend": "megatron:d2"},
        "algorithm": {"group_size": 2},
        "reward": {"functions": {"gsm8k": 1.0}},
        "data": {"train": ["openai/gsm8k/train"], "prompts_per_step": 2, "max_prompt_tokens": 32, "max_response_tokens": 8,
                 "cache_dir": f"{user.home}/cache", "prompt_key": "question", "ground_truth_key": "answer"},
        "trainer": {"device": "cpu", "run_dir": f"{user.home}/run", "steps": 1},
    }  # fmt: skip
    file = user.home / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fivefold.cli")


@pytest.mark.hub
@pytest.mark.parametrize("words", [("-m", "fivefold.cli"), TORCHRUN], ids=["launcher", "torchrun"])
def test_two_ranks_train_a_model_of_a_hub_that_was_downloaded_once(user, hub, model, words):
    run = write_run(user, model)
    done = user.run(*words, "train", str(run))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(hub.large_downloads()) == 1 and len(hub.downloads("openai/gsm8k", "datasets")) == 1
    assert json.loads((user.home / "run/metrics.jsonl").read_text().splitlines()[-1])["step"] == 1
    # A second run needs no network.
    again = user.having(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    done = again.run(*words, "train", str(run), f"trainer.run_dir={user.home}/again")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(hub.large_downloads()) == 1


@pytest.mark.hub
def test_what_a_hub_lacks_is_one_sentence_before_any_rank_starts(user, model):
    run = write_run(user, model)
    for key, name, begins in (
        ("model.path", f"{user.prefix}some/none", "fivefold: "),
        # `check` reads the first rows.
        ("data.train", "[openai/none]", "error    data.train: "),
    ):
        done = user.fivefold("train", str(run), f"{key}={name}")
        errors = done.stderr.splitlines()
        assert done.returncode == 2 and len(errors) == 1 and errors[0].startswith(begins), done.stderr
        assert name.strip("[]") in errors[0] and not list((user.home / "run").rglob("*.log")), errors


@pytest.mark.hub
def test_an_interrupt_ends_a_download_at_once_and_the_next_one_is_whole(user, hub, model):
    run = write_run(user, model)
    hub.seconds_per_piece = 60.0
    words = [sys.executable, "-m", "fivefold.cli", "train", str(run)]
    with subprocess.Popen(words, env=user.environment, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        while not hub.large_downloads():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.1)
        begin = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(LONGEST) == 128 + signal.SIGINT and "Traceback" not in process.stderr.read()
    assert time.monotonic() - begin < 30
    hub.seconds_per_piece = 0.0
    (directory,) = user.load("some/tiny")
    assert weights(directory) == (model / "model.safetensors").read_bytes()


def download(user: User, directory: str) -> None:
    """Download a model by the hub's own command."""
    hugging_face = "from huggingface_hub.cli.hf import main; main()", "--local-dir"
    program, option = (
        ("from modelscope_hub.cli.main import run_cmd; run_cmd()", "--local_dir") if user.prefix else hugging_face
    )
    done = user.run("-c", program, "download", "some/tiny", option, directory)
    assert done.returncode == 0, done.stderr


@pytest.mark.hub
def test_what_the_hubs_own_commands_download_is_a_model_directory(user, model):
    run = write_run(user, model)
    out = str(user.home / "model")
    download(user, out)
    done = user.fivefold("check", str(run), f"model.path={out}")
    assert done.returncode == 0 and "will be taken from the hub" not in done.stdout, done.stderr + done.stdout


@pytest.mark.hub
def test_siirl_s_steps_from_a_hub_to_a_run_are_done_as_its_page_has_them(user, hub, model):
    """Step 1 writes its data set, step 2 downloads the model by the hub's own command, step 3 trains."""
    write_run(user, model)
    problems = [{"problem": f"{number}+1=", "answer": str(number + 1), "solution": ""} for number in range(40)]
    hub.push("agentica-org/DeepScaleR-Preview-Dataset", {"deepscaler.json": json.dumps(problems).encode()})
    done = user.fivefold("data", "deepscaler", "--out", "data/datasets/deepscaler")
    assert done.returncode == 0, done.stderr
    download(user, "data/models/Qwen3-8B")
    done = user.fivefold(
        "train", "--from", "siirl", "algorithm.adv_estimator=grpo", "data.train_files=data/datasets/deepscaler/train.parquet",
        "data.val_files=data/datasets/deepscaler/test.parquet", "data.train_batch_size=2", "data.max_prompt_length=200",
        "data.max_response_length=8", "actor_rollout_ref.model.path=data/models/Qwen3-8B", "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=2", "trainer.n_gpus_per_node=1", "trainer.nnodes=1", "trainer.total_training_steps=1",
        "trainer.default_local_dir=run", "--", "trainer.device=cpu", "policy.dtype=float32",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((user.home / "run/metrics.jsonl").read_text().splitlines()[-1])["step"] == 1


AREAL = """
rollout: {max_head_offpolicyness: 0}
gconfig: {n_samples: 2, max_new_tokens: 8}
actor: {ppo_n_minibatches: 1, kl_ctl: 0, optimizer: {lr: 1.0e-6}, reward_norm: {mean_level: group, std_level: group}}
train_dataset: {path: openai/gsm8k, batch_size: 2, max_length: 200}
total_train_steps: 1
"""


@pytest.mark.hub
def test_areal_s_command_takes_its_model_and_its_rows_from_the_hub(hub, tmp_path, model):
    user = User(tmp_path, hub, "")
    write_run(user, model)
    (tmp_path / "areal.yaml").write_text(AREAL)
    done = user.fivefold("data", "gsm8k", "--form", "areal", "--out", "data/gsm8k-areal")
    assert done.returncode == 0, done.stderr
    done = user.fivefold(
        "train", "--from", "areal", "--config", "areal.yaml", "experiment_name=megatron-moe-gsm8k-grpo", "trial_name=trial-0",
        "rollout.backend=sglang:d1", "actor.backend=megatron:d1", "actor.path=some/tiny", f"cluster.fileroot={tmp_path}/runs",
        "--", "engine.backend=transformers", "engine.placement=colocated", "trainer.device=cpu", "policy.dtype=float32",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(hub.large_downloads()) == 1 and "step 1" in done.stdout


@pytest.mark.parametrize("revision", ["../x", "a/../../x", "/etc/x", "a//b", "a\0b", "a b", "..", "-/./a"])
@pytest.mark.parametrize("name", ["modelscope:owner/model", "owner/model"])
def test_a_revision_is_no_path_out_of_the_cache(name, revision):
    """Clients write its name as a path, and a file of that name would be removed."""
    with pytest.raises(UserError, match="a revision must be a branch, a tag or a commit"):
        model_snapshot(f"{name}@{revision}", ["config.json"])
