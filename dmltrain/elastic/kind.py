"""Members and rounds for the kvstore's type: all workers make each step together, or each makes steps of its own."""

from __future__ import annotations

from typing import Any

from dmltrain.elastic.async_member import AsyncMember, AsyncRounds
from dmltrain.elastic.member import Member, MemberRounds
from dmltrain.kvstore.worker.elastic_store import ElasticKVStore


def member_of(store: ElasticKVStore, *more: Any) -> Member:
    """See Member."""
    return (Member if store.kvstore_type.synchronous else AsyncMember)(store, *more)


def rounds_of(member: Member, epoch: int, first: int = 0) -> MemberRounds | AsyncRounds:
    """See MemberRounds."""
    if isinstance(member, AsyncMember):
        return AsyncRounds(member, epoch, first)
    return MemberRounds(member, epoch, first)
