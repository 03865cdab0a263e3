"""Which ranks are placed on which nodes of a cluster, without one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.config import RunConfig
from fivefold.config.loader import ConfigError
from fivefold.launch.environment import forwarded
from fivefold.launch.ray.placement import Amount, Node, Role, has, needs, place, place_when_free, rank_role
from fivefold.plan.check import check


def node(name: str, gpus: int, cpus: int = 64, free: Amount | None = None) -> Node:
    whole = Amount(gpus, cpus)
    return Node(name, name, name, whole, whole if free is None else free)


def ranks(count: int, together: int = 1) -> Role:
    return Role("ranks", count, Amount(1, 1), together)


def shares(bundles) -> list[tuple[str, int, int]]:
    return [(bundle.node.id, bundle.members[0], bundle.members[-1]) for bundle in bundles]


@pytest.mark.parametrize(
    ("role", "gpus", "spread", "expected"),
    [
        (ranks(8), [8, 8], False, [("n0", 0, 7)]),
        (ranks(8), [8, 8], True, [("n0", 0, 3), ("n1", 4, 7)]),
        (ranks(8, 4), [8, 6], True, [("n0", 0, 3), ("n1", 4, 7)]),
        # The largest is filled, and the rest goes where it leaves least.
        (ranks(12, 4), [4, 8, 8], False, [("n0", 0, 3), ("n1", 4, 11)]),
        # Neighbours of four: six GPUs hold one four.
        (ranks(8, 4), [6, 6], False, [("n0", 0, 3), ("n1", 4, 7)]),
        (ranks(8, 4), [7, 3, 3], False, None),
        (ranks(8, 8), [4, 4], False, None),
        (ranks(9), [4, 4], False, None),
    ],
)
def test_consecutive_ranks_fill_nodes_and_neighbours_share_one(role, gpus, spread, expected):
    bundles = place([role], [node(f"n{number}", count) for number, count in enumerate(gpus)], spread)
    assert (None if bundles is None else shares(bundles)) == expected


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6),
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(0, 2), st.integers(1, 2)), min_size=1, max_size=3),
    st.booleans(),
)  # fmt: skip
def test_every_member_has_one_place_and_no_node_gives_more_than_it_has(sizes, wanted, spread):
    nodes = [node(f"n{number}", *size) for number, size in enumerate(sizes)]
    roles = [
        Role(f"role {number}", units * together, Amount(gpus, cpus), together)
        for number, (units, together, gpus, cpus) in enumerate(wanted)
    ]
    bundles = place(roles, nodes, spread)
    if bundles is None:
        if len(roles) == 1:
            # Whole units of one kind: as many as fit are found.
            (role,) = roles
            assert sum(room.free // (role.per_process * role.together) for room in nodes) < role.count // role.together
        return
    for role in roles:
        groups_of_role = [bundle.members for bundle in bundles if bundle.role is role]
        assert [member for members in groups_of_role for member in members] == list(range(role.count))
        assert all(members.start % role.together == 0 == len(members) % role.together for members in groups_of_role)
    for room in nodes:
        taken = [bundle.amount for bundle in bundles if bundle.node is room]
        assert (
            sum(amount.gpus for amount in taken) <= room.free.gpus and sum(amount.cpus for amount in taken) <= room.free.cpus
        )


def test_engines_on_gpus_of_their_own_are_placed_in_what_the_ranks_leave():
    """Roles of other kinds are bundles of the same reservation."""
    bundles = place([ranks(8, 4), Role("engines", 2, Amount(4, 1))], [node("a", 8), node("b", 8)], spread=False)
    assert bundles is not None
    assert [(bundle.role.name, *share) for bundle, share in zip(bundles, shares(bundles), strict=True)] == [
        ("ranks", "a", 0, 7), ("engines", "b", 0, 1)
    ]  # fmt: skip


def test_what_others_have_reserved_is_told_from_what_is_not_there():
    busy = [node("a", 8, free=Amount(2, 64)), node("b", 4)]
    assert place([ranks(8, 4)], busy, spread=False) is None
    assert place_when_free([ranks(8, 4)], busy, spread=False) is not None
    assert place_when_free([ranks(16, 4)], busy, spread=False) is None
    assert needs([ranks(8, 4)]) == "8 ranks with 1 GPU and 1 CPU each, 4 neighbours on one node"
    assert has(busy[:1]) == "a has 8 GPUs and 64 CPUs, of which 2 GPUs and 64 CPUs free"


def test_variables_of_libraries_go_along_and_those_of_a_machine_stay():
    there = {
        "HF_TOKEN": "t", "WANDB_API_KEY": "w", "NCCL_DEBUG": "INFO", "CUDA_LAUNCH_BLOCKING": "1", "PYTHONPATH": "/p", "FIVEFOLD_X": "1",
        "CUDA_VISIBLE_DEVICES": "3", "CUDA_HOME": "/usr/local/cuda", "PATH": "/bin", "HOME": "/root", "RANK": "0", "MY_A": "1", "MY_B": "2",
    }  # fmt: skip
    usual = {"HF_TOKEN", "WANDB_API_KEY", "NCCL_DEBUG", "CUDA_LAUNCH_BLOCKING", "PYTHONPATH", "FIVEFOLD_X"}
    assert set(forwarded(there)) == usual
    assert set(forwarded(there, ["MY_*", "HOME"])) == usual | {"MY_A", "MY_B", "HOME"}
    with pytest.raises(ValueError, match="MY_C must be set where the run is started"):
        forwarded(there, ["MY_A", "MY_C"])


@pytest.mark.parametrize(
    ("ray", "says"),
    [
        ({"address": "somewhere"}, "launch.ray.address must be auto, HOST:PORT or ray://HOST:PORT: got 'somewhere'"),
        ({"env_vars": ["A=1"]}, "must be a name, or its beginning and a [*]: got 'A=1'"),
        ({"cpus_per_rank": 0}, "launch.ray.cpus_per_rank must be in"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(ray, says):
    with pytest.raises(ConfigError, match=says):
        RunConfig.of(model={"path": "m/m"}, launch={"backend": "ray", "ray": ray})


def test_check_says_what_is_missing_and_which_keys_do_nothing(monkeypatch):
    config = RunConfig.of(model={"path": "m/m"}, launch={"ray": {"cpus_per_rank": 2}})
    assert ("launch.ray", "launch.backend is not ray") in check(config).ignored
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    errors = check(RunConfig.of(model={"path": "m/m"}, launch={"backend": "ray"})).errors
    assert "launch.backend: ray needs ray, not installed here: pip install 'fivefold[ray]'" in errors


def test_a_run_on_a_cluster_is_not_held_to_the_gpus_of_this_machine(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def faults(address: str | None) -> list[str]:
        tree = {"backend": "ray", "ray": {"address": address}}
        config = RunConfig.of(
            model={"path": "m/m"}, policy={"backend": "megatron:d8"}, trainer={"device": "cuda"}, launch=tree
        )
        return [fault for fault in check(config).errors if fault.startswith("layout")]

    assert faults("gpu-head:6379") == []
    assert faults(None) == [
        "layout megatron:d8t1p1 needs 8 GPUs on this machine: found 0; lower it, start it with torchrun on several machines, "
        "place it on a Ray cluster by launch.backend: ray and launch.ray.address, or set trainer.device: cpu"
    ]


@pytest.mark.parametrize(
    ("allocation", "gpus", "expected"),
    [
        # AReaL's page: 16 GPUs train, 16 sample, on four nodes; every four ranks start the server after them.
        ("sglang:d4t4+megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)", [8] * 4, [("n0", 4), ("n1", 4), ("n2", 4), ("n3", 4)]),
        ("vllm:d2t2+megatron:d1t4", [8], [("n0", 4)]),
        # One rank starts all three.
        ("vllm:d3+megatron:d1", [4], [("n0", 1)]),
        # Two servers for three ranks do not come in halves.
        ("vllm:d2+megatron:d3", [4, 4], None),
        ("vllm:d2+megatron:d3", [4, 5], [("n1", 3)]),
        ("vllm:d2t4+megatron:d2t4", [8, 8], [("n0", 4), ("n1", 4)]),
        # Models on ranks of their own, and servers after all of these: together.
        ("vllm[rollout]:d2+megatron[actor]:d2+megatron[ref]:d1", [4, 5], [("n1", 3)]),
        ("vllm[rollout]:d2+megatron[actor]:d2+megatron[ref]:d1", [4, 4], None),
    ],
)
def test_ranks_have_the_gpus_of_the_servers_that_they_start_on_their_node(allocation, gpus, expected):
    sections = {"model": {"path": "m"}, "trainer": {"device": "cuda"}, "data": {"train": ["a.jsonl"]}}
    config = RunConfig.of(
        **sections,
        algorithm={"kl": {"coef": 0.1}},
        launch={"allocation": allocation, "backend": "ray"},
        reward={"functions": {"math": 1.0}},
    )
    nodes = [node(f"n{number}", count) for number, count in enumerate(gpus)]
    role = rank_role(config.roles, config.engine, config.trainer.device, config.launch.ray.cpus_per_rank, nodes)
    bundles = place([role], nodes, spread=False)
    assert (bundles and [(bundle.node.id, len(bundle.members)) for bundle in bundles]) == expected
    if bundles:
        assert sum(bundle.amount.gpus for bundle in bundles) == config.roles.world_size + config.engine.layout.world_size


@pytest.mark.parametrize(
    ("allocation", "together", "expected"),
    [
        ("megatron[actor]:d2t4+megatron[ref]:d1t4", 4, [("n0", 8), ("n1", 4)]),
        # The reference's neighbours begin in the middle of others': all of them share a node, or none of it runs.
        ("megatron[actor]:d2+megatron[ref]:d1t4", 6, [("n0", 6)]),
        ("megatron[actor]:d8+megatron[ref]:d1t4", 4, [("n0", 8), ("n1", 4)]),
        ("megatron[actor]:d6+megatron[ref]:d1t4", 10, None),
    ],
)
def test_tensor_parallel_neighbours_of_a_model_on_ranks_of_its_own_share_a_node(allocation, together, expected):
    config = RunConfig.of(
        model={"path": "m"}, algorithm={"kl": {"coef": 0.1}}, launch={"allocation": allocation, "backend": "ray"},
        trainer={"device": "cuda"}, data={"train": ["a.jsonl"]}, reward={"functions": {"math": 1.0}},
    )  # fmt: skip
    nodes = [node(f"n{number}", 8) for number in range(2)]
    role = rank_role(config.roles, config.engine, config.trainer.device, config.launch.ray.cpus_per_rank, nodes)
    bundles = place([role], nodes, spread=False)
    assert (role.count, role.together) == (config.roles.world_size, together)
    assert (bundles and [(bundle.node.id, len(bundle.members)) for bundle in bundles]) == expected


@pytest.mark.parametrize(
    ("gpus", "hosts", "expected"),
    [
        ([8, 8], 2, {"n0": 4, "n1": 4}),
        ([8, 4, 8], 2, {"n1": 4, "n0": 4}),
        ([8, 8], 1, {"n0": 8}),
        ([8, 2], 2, None),
        ([8, 8, 8], 3, None),
        ([8], 2, None),
    ],
)
def test_a_number_of_hosts_is_given_the_same_number_of_ranks_on_each_or_refused(gpus, hosts, expected):
    role = ranks(8)
    bundles = place([role], [node(f"n{number}", count) for number, count in enumerate(gpus)], False, hosts)
    assert bundles is None if expected is None else {bundle.node.id: len(bundle.members) for bundle in bundles} == expected
    assert "on 2 nodes alike (launch.nodes)" in needs([role], 2)
