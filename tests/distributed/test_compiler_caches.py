"""Compiled code is kept between runs in the user's own cache, and never loaded from where another user may write."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import sys
from pathlib import Path

import pytest
import torch

from fivefold.backend.kernels import flash
from fivefold.config.packages import can_import
from fivefold.distributed.compiler_caches import VARIABLES, use_compiler_caches
from fivefold.distributed.scratch import remove_scratch
from fivefold.engines.servers.server_process import ServerProcess, own_environment
from fivefold.files import user_cache, with_umask
from tests.support.commands import Command, wait_for
from tests.support.whole_runs import make_model, write_run

RUN = """
algorithm: {group_size: 2}
data: {prompts_per_step: 4, max_response_tokens: 8}
trainer: {steps: 1}
"""
TELLS = "import json, os, pathlib; pathlib.Path(os.environ['TOLD']).write_text(json.dumps(dict(os.environ)))\n"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return user_cache("compiled")


def test_compilers_keep_their_code_in_one_private_directory_of_the_users_cache(cache):
    with with_umask("000"):
        variables: dict[str, str] = {}
        assert use_compiler_caches(variables) == ""
    assert variables == {name: f"{cache}/{directory}" for name, directory in VARIABLES.items()}
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert use_compiler_caches(other := {}) == "" and other == variables, "the next process finds the same directory"


def test_a_directory_that_the_user_set_is_left_to_them(cache):
    variables = {"TRITON_CACHE_DIR": "/mine", "VLLM_CACHE_ROOT": "/mine/vllm"}
    assert use_compiler_caches(variables) == ""
    assert variables["TRITON_CACHE_DIR"] == "/mine" and variables["VLLM_CACHE_ROOT"] == "/mine/vllm"
    assert variables["TORCHINDUCTOR_CACHE_DIR"] == f"{cache}/inductor"
    everything = dict.fromkeys(VARIABLES, "/mine")
    assert use_compiler_caches(everything) == "" and everything == dict.fromkeys(VARIABLES, "/mine")


def _no_locks(*arguments) -> None:
    raise OSError(errno.ENOSYS, "Function not implemented")


@pytest.mark.parametrize(
    ("of_user", "flock", "is_kept"),
    [({}, fcntl.flock, "1"), ({"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}, fcntl.flock, "0"), ({}, _no_locks, None)],
)  # fmt: skip
def test_flash_attention_keeps_kernels_apart_for_each_architecture(cache, tmp_path, monkeypatch, of_user, flock, is_kept):
    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / "flash_attn/cute").mkdir(parents=True)
    (tmp_path / "flash_attn/__init__.py").touch()
    (tmp_path / "flash_attn/cute/__init__.py").write_text("import os\n\nread = dict(os.environ)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    # What other tests find out stays in the caches of both.
    monkeypatch.setattr(flash, "can_import", can_import.__wrapped__)
    variables: dict[str, str] = {}
    use_compiler_caches(variables)
    for name, value in (variables | of_user).items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    assert flash._available.__wrapped__(torch.device("cuda"))
    assert dict(os.environ) == before, "vLLM's copy of it reads the same variables"
    read = sys.modules.pop("flash_attn.cute").read
    del sys.modules["flash_attn"]
    assert read.get("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED") == is_kept
    if is_kept:
        assert read["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == f"{cache}/flash-attention/sm90"


def _of_another_user(cache: Path, monkeypatch) -> None:
    cache.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: cache.stat().st_uid + 1)


def _writable(cache: Path, monkeypatch) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o770)


def _link(cache: Path, monkeypatch) -> None:
    cache.parent.mkdir(parents=True)
    cache.symlink_to(cache.parent.parent)


def _blocked(cache: Path, monkeypatch) -> None:
    cache.parent.parent.mkdir()
    cache.parent.write_text("not a directory")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [(_of_another_user, "belongs to user"), (_writable, "mode 0770, in which others may write"), (_link, "is not a directory"),
     (_blocked, "the user's cache cannot be used")],
)  # fmt: skip
def test_code_is_not_loaded_from_where_another_user_may_write(cache, monkeypatch, spoil, says):
    spoil(cache, monkeypatch)
    variables: dict[str, str] = {}
    fault = use_compiler_caches(variables)
    assert says in fault and "set XDG_CACHE_HOME" in fault
    places = {Path(value).parent for value in variables.values()}
    assert len(places) == 1 and variables.keys() == VARIABLES.keys()
    (place,) = places
    assert cache not in (place, *place.parents) and stat.S_IMODE(place.stat().st_mode) == 0o700
    remove_scratch(os.getpid())
    assert not place.exists()


def test_servers_reuse_what_earlier_servers_compiled(cache, tmp_path, monkeypatch):
    (tmp_path / "tells.py").write_text(TELLS)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    started_with = []
    for number in range(2):
        file = tmp_path / f"told-{number}.json"
        changes = {"PYTHONPATH": str(tmp_path), "TOLD": str(file)}
        served = ServerProcess(["tells"], own_environment(changes), tmp_path / "log", lambda _: False)
        served.start()
        wait_for(lambda file=file: file.is_file() and file.read_text().endswith("}"))
        served.close()
        environment = json.loads(file.read_text())
        assert not environment["VLLM_CACHE_ROOT"].startswith(environment["TMPDIR"]), "that is removed with the server"
        started_with.append({name: environment[name] for name in VARIABLES})
    assert started_with[0] == started_with[1]
    assert started_with[0] == {name: f"{cache}/{directory}" for name, directory in VARIABLES.items()} | {
        "TRITON_CACHE_DIR": "/mine"
    }


def tell_of_each_rank() -> None:
    from fivefold import build

    def build_run(config, ranks, *arguments, **named):
        (config.run_dir / f"told-{ranks.rank}.json").write_text(json.dumps(dict(os.environ)))
        return before(config, ranks, *arguments, **named)

    before, build.build_run = build.build_run, build_run


def test_ranks_of_a_run_use_the_caches_of_its_user(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    make_model(tmp_path, rows=16)
    write_run(tmp_path, RUN)
    done = Command("train", tmp_path / "run.yaml", "policy.backend=megatron:d2", hook=tell_of_each_rank).finish()
    assert done.returncode == 0, done.stderr
    assert "compiled code must be" not in done.stdout + done.stderr
    for rank in range(2):
        environment = json.loads((tmp_path / "runs/base" / f"told-{rank}.json").read_text())
        assert environment["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
        assert environment["TRITON_CACHE_DIR"] == f"{cache}/triton" and environment["VLLM_CACHE_ROOT"] == f"{cache}/vllm"
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
