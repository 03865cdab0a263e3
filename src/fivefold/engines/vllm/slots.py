"""Finds in one look that a running request has room for its next token, where vLLM's scheduler asks every part of its cache.

No vLLM is imported before `take_slots_at_hand` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

PLAIN = "FullAttentionManager"
"""The manager of blocks, by its name, that keeps all of them until a request ends."""


class SlotsAtHand:
    """Room for the next tokens in the blocks that requests already have, of one cache of plain attention."""

    def __init__(self, manager: Any, blocks: Any) -> None:
        """`manager`: vLLM's KVCacheManager; `blocks`: what it has for its only kind of attention."""
        self._size: int = blocks.block_size
        self._blocks: Mapping[str, list[Any]] = blocks.req_to_blocks
        self._cached: Mapping[str, int] = blocks.num_cached_block
        self._copied: Mapping[str, Any] = getattr(blocks, "_partial_hit_reqs", {})
        self.none = manager.empty_kv_cache_blocks

    @classmethod
    def of(cls, manager: Any) -> SlotsAtHand | None:
        """Returns None for a cache of several kinds, of windows or states, or that shares parts of blocks."""
        kinds: Sequence[Any] = getattr(getattr(manager, "coordinator", None), "single_type_managers", ())
        if len(kinds) != 1 or type(kinds[0]).__name__ != PLAIN:
            return None
        (blocks,) = kinds
        shared = getattr(blocks.block_pool, "hash_block_size", blocks.block_size)
        return cls(manager, blocks) if shared == blocks.block_size else None

    def suffice(self, request: Any, tokens: int) -> bool:
        """Whether so many further tokens need no block, and complete none that would be shared from now on."""
        name, end = request.request_id, request.num_computed_tokens + tokens
        held = self._blocks.get(name)
        if not held or end > self._size * len(held) or name in self._copied:
            return False
        return bool(min(end, request.num_tokens) // self._size <= self._cached.get(name, 0))


def at_hand(allocate: Callable[..., Any]) -> Callable[..., Any]:
    """Returns vLLM's `KVCacheManager.allocate_slots` with the same results, sooner if a request needs no further block."""

    def allocate_slots(self: Any, request: Any, num_new_tokens: int, *arguments: Any, **named: Any) -> Any:
        # Waiting requests, drafts of tokens and caches of other programs come with further arguments.
        if num_new_tokens > 0 and not arguments and not any(named.values()) and named.keys() <= {"num_lookahead_tokens"}:
            try:
                slots = self._slots_at_hand
            except AttributeError:
                slots = self._slots_at_hand = SlotsAtHand.of(self)
            if slots is not None and slots.suffice(request, num_new_tokens):
                return slots.none
        return allocate(self, request, num_new_tokens, *arguments, **named)

    allocate_slots.vllms_own = allocate  # type: ignore[attr-defined]
    return allocate_slots


def take_slots_at_hand() -> None:
    """Let a scheduler of vLLM in this process, if it is here, allocate blocks only for requests that need one."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    if not hasattr(KVCacheManager.allocate_slots, "vllms_own"):
        KVCacheManager.allocate_slots = at_hand(KVCacheManager.allocate_slots)
