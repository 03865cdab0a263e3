"""Models of other hubs."""

from __future__ import annotations

import importlib.util

import pytest

from fivefold.distributed.ports import free_port
from fivefold.hub import commit_of, model_snapshot

MODELSCOPE = importlib.util.find_spec("modelscope") is not None


@pytest.mark.skipif(MODELSCOPE, reason="modelscope is installed")
def test_a_model_of_modelscope_needs_its_library():
    with pytest.raises(ValueError, match=r"'modelscope:Qwen/Qwen3-0.6B' needs modelscope, not installed here: pip install"):
        model_snapshot("modelscope:Qwen/Qwen3-0.6B", ["*.json"])


@pytest.mark.skipif(not MODELSCOPE, reason="modelscope is not installed")
def test_without_a_network_modelscope_s_cache_has_it_or_one_sentence_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path))
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    snapshot = tmp_path / "models/Qwen--Qwen3-0.6B/snapshots/master"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    found = model_snapshot("modelscope:Qwen/Qwen3-0.6B", ["*.json"])
    assert found == snapshot and commit_of(found) == "master"
    assert model_snapshot("modelscope:Qwen/Qwen3-0.6B", ["*.json"], "master") == snapshot
    with pytest.raises(
        ValueError, match="'Qwen/none' is not a model that ModelScope has: it does not answer, and its cache"
    ):
        model_snapshot("modelscope:Qwen/none", ["*.json"])
