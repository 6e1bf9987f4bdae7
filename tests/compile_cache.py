"""Compiled programs of the tests, kept from one run to the next and for other clones."""

from pathlib import Path

import jax
from jax._src.lru_cache import LRUCache

from jaxspec.storage.cache import cache_folder

LIMIT = 2**30
"""Bytes of programs that are kept."""


def compiled_programs() -> Path:
    """Where they are: in the user's cache folder."""
    return cache_folder() / "tests" / f"jax-{jax.__version__}"


def keep_programs() -> None:
    """Has JAX keep programs there, by their texts, and deletes the oldest of too many."""
    jax.config.update("jax_compilation_cache_dir", str(compiled_programs()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    # with a limit, entries are written and read under a file lock
    jax.config.update("jax_compilation_cache_max_size", LIMIT)
    drop_torn_entries()
    cache = LRUCache(str(compiled_programs()), max_size=LIMIT)
    with cache.lock:
        cache._evict_if_needed()
    # Every entry that is written would look at all others: minutes of a run from an empty cache.
    LRUCache._evict_if_needed = lambda *_, **__: None


def drop_torn_entries() -> None:
    """Deletes what a killed process left half written."""
    compiled_programs().mkdir(parents=True, exist_ok=True)
    with LRUCache(str(compiled_programs()), max_size=LIMIT).lock:
        for entry in compiled_programs().glob("*-cache"):
            if not entry.with_name(entry.name.removesuffix("cache") + "atime").exists():
                entry.unlink()
