"""The kind of a job's kvstore: its type, and the bound on staleness that was chosen for it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dmltrain.base.errors import UserError
from dmltrain.kvstore import types
from dmltrain.kvstore.types import KVStoreType
from dmltrain.kvstore.view import View


@dataclass(frozen=True)
class KVStoreKind:
    """A kvstore's type, and its bound on staleness in clocks."""

    type: KVStoreType
    staleness: float

    def __str__(self) -> str:
        bound = f" staleness={self.staleness:g}" if self.type.takes_staleness else ""
        return f"kv_store={self.type.name}{bound}"

    def changed(self, kv_store: str, staleness: float) -> KVStoreKind:
        """The kind after a change; for the values see message.Change. Raises UserError if there is no such kvstore."""
        wanted = types.find(kv_store) if kv_store else self.type
        if staleness >= 0 or wanted is not self.type:
            return KVStoreKind(wanted, wanted.bound(staleness if staleness >= 0 else None))
        return self

    def refusal(self, kv_store: str, staleness: float, why_fixed: str, elastic: bool = False) -> str:
        """Why a job with this kind cannot have another one after a change; empty if it can. For the values see
        message.Change. `why_fixed`: why it cannot change between types whose workers make each step together and
        others."""
        try:
            wanted = self.changed(kv_store, staleness)
        except UserError as error:
            return str(error)
        if wanted == self:
            return f"{self} is what the job has already"
        able = types.names(lambda type_: type_.distributed and "servers" in type_.optimizer_on)
        if wanted.type.name not in able:
            why = (
                ": an elastic job can change to" if elastic else " does not run the optimizer on the servers: expected"
            )
            return f"kv_store={wanted.type.name}{why} {' or '.join(able)}"
        return why_fixed if wanted.type.synchronous != self.type.synchronous else ""

    def in_view(self, view: View) -> View:
        """This view with a kvstore of this kind."""
        return replace(view, kvstore=self.type.name, staleness=self.chosen)

    @property
    def chosen(self) -> float:
        """The bound on staleness if one can be chosen, else 0."""
        return self.staleness if self.type.takes_staleness else 0.0


def kind_of(view: View) -> KVStoreKind | None:
    """The kvstore's kind in this view of an elastic job; None if it is not known. Raises UserError if there is no such
    kvstore."""
    if not view.kvstore:
        return None
    type_ = types.find(view.kvstore)
    return KVStoreKind(type_, type_.bound(view.staleness if type_.takes_staleness else None))
