from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tests.support.cluster import Cluster
from tests.support.tiny_models import make_model
from tests.support.zygote import THREADS, zygote

# Threads that wait for each other on a busy machine spin: two processes of two threads cost several times what they compute.
os.environ["OMP_NUM_THREADS"] = str(THREADS)

# A shell that starts the tests in the background has them ignore Ctrl-C, and with them every program that they start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


LONGEST_FIRST = (
    "checkpoint/test_resharding", "launch/test_runs", "megatron/test_step_equality", "megatron/test_micro_batches",
    "trainer/test_methods_learn", "config/test_mcore_options", "megatron/test_hugging_face",
    "engines/test_transformers_engine", "launch/test_method_runs", "megatron/test_attention", "megatron/test_routing",
    "megatron/test_critic", "megatron/test_guards",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", help="K/N: run only the K-th of N parts of the selected files")


LONG = yaml.safe_load((Path(__file__).parent / "long.yaml").read_text())


def mark_long(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases that long.yaml leaves to the long targets; raises where it names what is not in the whole suite."""
    unknown = {(path, test, case) for path, tests in LONG.items() for test, cases in tests.items() for case in cases or [""]}
    for item in items:
        path, _, name = item.nodeid.removeprefix("tests/").partition("::")
        test, _, case = name.removesuffix("]").partition("[")
        cases = LONG.get(path, {}).get(test)
        if cases is None:
            continue
        matching = {pattern for pattern in cases or [""] if fnmatchcase(case, pattern)}
        if not cases or not matching:
            item.add_marker(pytest.mark.slow)
        unknown -= {(path, test, pattern) for pattern in matching or {""}}
    if unknown and config.args == config.getini("testpaths"):
        raise pytest.UsageError(f"tests/long.yaml names tests that there are not: {sorted(unknown)}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark long tests, and order files: workers take whole ones, and a long one at the end would leave the other idle.

    Parts are dealt after `-m` and `-k` have left out what they do not select.
    """
    mark_long(config, items)
    places = {f"tests/{name}.py": place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))
    part, parts = map(int, config.getoption("part").split("/"))
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--part must be K/N with K from 1 to N: got {part}/{parts}")
    yield
    # Files are dealt in turn, so that the longest ones go to different parts.
    files = list(dict.fromkeys(item.nodeid.partition("::")[0] for item in items))
    chosen = set(files[part - 1 :: parts])
    left_out = [item for item in items if item.nodeid.partition("::")[0] not in chosen]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid.partition("::")[0] in chosen]


def pytest_sessionfinish() -> None:
    zygote.close()


@pytest.fixture
def temporary(monkeypatch):
    """The directory for temporary files, with a path that is short enough for sockets, for one test alone."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory):
    """name of a family variant -> directory of a tiny random model, made once."""
    directories: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in directories:
            directories[name] = make_model(name, tmp_path_factory.mktemp("model") / name)
        return directories[name]

    return get


@pytest.fixture(scope="session")
def gpus():
    """Ranks on the GPUs that are there; FIVEFOLD_GPU_TESTS=cpu runs the same tests with tiny models on the CPU."""
    # Imports torch, which reads OMP_NUM_THREADS then.
    from tests.support.gpus import GPUs, count

    if os.environ.get("FIVEFOLD_GPU_TESTS") == "cpu":
        return GPUs("cpu")
    if not count():
        pytest.skip("no CUDA device is there: FIVEFOLD_GPU_TESTS=cpu runs this with tiny models on the CPU")
    return GPUs("cuda")


@pytest.fixture(scope="session")
def gpu_models(gpus):
    """name -> directory of a random model of the size that is computed with, all made in one start."""
    from tests.support.gpu_models import scratch

    with scratch(gpus.large) as root:
        yield gpus.make_models(Path(root))
