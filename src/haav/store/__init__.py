"""Views on disk: `lmdb` for one machine, `shards` for many."""

from haav.store.lmdb import Store
from haav.store.records import ViewManifest
from haav.store.shards import ShardStore, open_store

__all__ = ["ShardStore", "Store", "ViewManifest", "open_store"]
