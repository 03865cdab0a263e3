"""Ranks that are asked to end at any moment end in the same place, and none waits for another permanently."""

from __future__ import annotations

import random
import signal
import time

import torch.distributed as dist

ROUNDS = 12


def interrupted_rounds(mesh, seed: int):
    """Where each of many programs ended on this rank: (collectives and passes begun, items done of each pass)."""
    from fivefold.distributed import heartbeat as module
    from fivefold.distributed.heartbeat import Ends, Heartbeat, Interrupted

    module.SECONDS = 0.01
    ranks, ends = mesh.ranks, []
    group, shared = ranks.whole_group(), random.Random(seed)
    for number in range(ROUNDS):
        rank_random, beat, done = random.Random(f"{seed} {number} {ranks.rank}"), Heartbeat(), []
        after, whom = 0.15 * shared.random(), shared.choice([[0], [1], [2, 3], [0, 1, 2, 3]])
        program = [shared.choice(["collective", "pass", "shielded"]) for _ in range(3000)]
        sizes = [shared.randrange(1, 6) for _ in program]
        begin = time.monotonic()
        asks = ranks.rank in whom
        beat.begin_run()
        requested = lambda: signal.SIGTERM if asks and time.monotonic() > begin + after else 0  # noqa: B023, E731
        beat.start(group, Ends(requested, lambda number: None, print, print), ["host"] * group.size())
        try:
            for kind, size in zip(program, sizes, strict=True):
                if kind == "pass":
                    beat.begin()
                    done.append(
                        [item for item in range(size) if beat.item(item) and not time.sleep(rank_random.random() * 4e-3)]
                    )
                    # As gradients are: every rank waits for every other, whatever was left out.
                    dist.barrier(group=ranks.world)
                    beat.check_items(size)
                elif kind == "shielded":
                    with beat.shielded():
                        for _ in range(size):
                            beat.begin()
                            dist.barrier(group=ranks.world)
                else:
                    beat.begin()
                    time.sleep(rank_random.random() * 2e-3)
                    dist.barrier(group=ranks.world)
            ends.append("it was not interrupted")
        except Interrupted as interrupted:
            assert interrupted.number == signal.SIGTERM
            ends.append((beat._place[0], done))
        # What is saved then is not interrupted again.
        beat.begin()
        dist.barrier(group=ranks.world)
        beat.close()
    return ends


def test_ranks_that_are_asked_to_end_at_random_moments_end_in_the_same_place(cluster):
    results = cluster.run(interrupted_rounds, "megatron:d4", 7)
    assert all(places == results[0] for places in results[1:])
    assert len({str(place) for place in results[0]}) > ROUNDS // 2, "they are not always the same place"
    cut_short = sum(1 for _, done in results[0] if done and len(done[-1]) < 5)
    assert cut_short, "some ended in the middle of a pass"


def alone(mesh):
    """A rank that works alone after the others have begun nothing further ends at once; the others wait nowhere."""
    from fivefold.distributed import heartbeat as module
    from fivefold.distributed.heartbeat import Ends, Heartbeat, Interrupted

    module.SECONDS = 0.01
    beat, group = Heartbeat(), mesh.ranks.whole_group()
    beat.begin_run()
    requested = lambda: signal.SIGINT if mesh.ranks.rank == 0 else 0  # noqa: E731
    beat.start(group, Ends(requested, lambda number: None, print, print), ["host"] * group.size())
    beat.begin()
    try:
        while True:
            beat.check()
            time.sleep(0.01)
    except Interrupted:
        beat.close()
        return True


def test_what_a_rank_does_alone_ends_at_once(cluster):
    assert cluster.run(alone, "megatron:d2") == [True, True]


def unheard(mesh):
    """What ranks say that have not heard of the others; rank 1 does not answer."""
    from fivefold.distributed.heartbeat import Ends, Heartbeat

    beat, messages = Heartbeat(), []
    beat._ends = Ends(lambda: 0, print, messages.append, print, unheard_seconds=1.0)
    beat._hosts = ["north", "south"]
    # Loading may block the threads of other ranks for longer.
    for _ in range(8):
        beat.tick()
    beat.begin_run()
    for _ in range(4 if mesh.ranks.rank == 0 else 0):
        beat.tick()
    mesh.ranks.barrier()
    return messages


def test_a_rank_that_hears_of_no_other_names_those_that_do_not_answer(cluster):
    (first,), second = cluster.run(unheard, "megatron:d2")
    assert first.startswith("the other ranks were not heard of for 1 s") and first.endswith(
        "rank 1 on south does not answer"
    )
    assert second == []
