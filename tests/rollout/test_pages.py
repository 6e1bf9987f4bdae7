"""Pages against lists and sets in plain Python: whoever grows, shares and releases, every page is
held by those who think so."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.rollout import pages as paging
from jaxspec.rollout.pages import Pages, init_pages

HOLDERS, ROW_PAGES = 6, 5
allocate_pages, share_pages, release_pages, count_free_pages = (
    jax.jit(getattr(paging, name))
    for name in ("allocate_pages", "share_pages", "release_pages", "count_free_pages")
)


class Simulated:
    """Each holder's pages in order of their indices; which free pages are given is the pool's own
    affair."""

    def __init__(self, count: int):
        self.count = count
        self.held: dict[int, list[int]] = {holder: [] for holder in range(HOLDERS)}

    def free(self) -> set[int]:
        return set(range(self.count)) - {page for pages in self.held.values() for page in pages}

    def grow(self, wanted: np.ndarray, after: Pages) -> None:
        """Takes over what was given, when it was free and given once."""
        unused = self.free()
        for holder, pages in self.held.items():
            for page_index in range(len(pages), int(wanted[holder])):
                page = int(after.table[holder, page_index])
                assert page in unused, f"page {page} is given, but it is not free"
                unused.remove(page)
                pages.append(page)

    def needed(self, wanted: np.ndarray) -> int:
        return sum(max(int(wanted[holder]) - len(pages), 0) for holder, pages in self.held.items())

    def check(self, pages: Pages) -> None:
        references = Counter(page for held in self.held.values() for page in held)
        np.testing.assert_array_equal(
            pages.references, [references[page] for page in range(self.count)]
        )
        assert int(count_free_pages(pages)) == len(self.free())
        for holder, held in self.held.items():
            assert int(pages.page_counts[holder]) == len(held)
            assert pages.table[holder].tolist() == held + [self.count] * (ROW_PAGES - len(held))
            assert len(set(held)) == len(held)


def random_step(
    random: np.random.Generator, pages: Pages, simulated: Simulated
) -> tuple[str, Pages]:
    """One of the three, as far as it is allowed."""
    empty = [holder for holder, held in simulated.held.items() if not held]
    kind = random.choice(["grow", "share", "release"], p=[0.5, 0.2, 0.3])
    if kind == "share" and empty and len(empty) < HOLDERS:
        holder = int(random.choice(empty))
        source = int(random.choice([other for other in simulated.held if other not in empty]))
        count = int(random.integers(0, len(simulated.held[source]) + 1))
        simulated.held[holder] = simulated.held[source][:count]
        return "share", share_pages(pages, jnp.int32(holder), jnp.int32(source), jnp.int32(count))
    if kind == "release":
        marked = random.random(HOLDERS) < 0.4
        simulated.held |= {holder: [] for holder in np.flatnonzero(marked).tolist()}
        return "release", release_pages(pages, jnp.asarray(marked))
    wanted = random.integers(0, ROW_PAGES + 1, HOLDERS)
    while simulated.needed(wanted) > len(simulated.free()):
        wanted[random.integers(HOLDERS)] = 0
    after = allocate_pages(pages, jnp.asarray(wanted, jnp.int32))
    kind = (
        "grow to the last page" if simulated.needed(wanted) == len(simulated.free()) > 0 else "grow"
    )
    simulated.grow(wanted, after)
    return kind, after


@pytest.mark.parametrize("count", [5, 9, 17, 30])
def test_random_sequences_agree_with_plain_lists(count: int) -> None:
    random, simulated, seen = np.random.default_rng(count), Simulated(count), Counter()
    pages = init_pages(count, HOLDERS, ROW_PAGES)
    simulated.check(pages)
    shared = 0
    for _ in range(150):
        kind, pages = random_step(random, pages, simulated)
        simulated.check(pages)
        seen[kind] += 1
        shared = max(shared, int(pages.references.max()))
    assert min(seen[kind] for kind in ("grow", "share", "release")) > 10
    # of 30 pages six holders never need more
    assert count == 30 or seen["grow to the last page"] > 3
    assert shared > 2
    pages = release_pages(pages, jnp.ones((HOLDERS,), bool))
    assert (int(count_free_pages(pages)), pages.references.tolist()) == (count, [0] * count)


def test_what_two_hold_is_free_when_the_second_lets_go() -> None:
    pages = allocate_pages(init_pages(4, 3, 3), jnp.asarray([0, 0, 3], jnp.int32))
    pages = share_pages(pages, jnp.int32(0), jnp.int32(2), jnp.int32(2))
    pages = allocate_pages(pages, jnp.asarray([3, 0, 3], jnp.int32))
    assert pages.table.tolist() == [[0, 1, 3], [4, 4, 4], [0, 1, 2]]
    assert pages.references.tolist() == [2, 2, 1, 1]
    pages = release_pages(pages, jnp.asarray([False, False, True]))
    assert pages.references.tolist() == [1, 1, 0, 1]
    pages = allocate_pages(pages, jnp.asarray([1, 1, 0], jnp.int32))  # who has more keeps it
    assert pages.table.tolist() == [[0, 1, 3], [2, 4, 4], [4, 4, 4]]
    assert pages.page_counts.tolist() == [3, 1, 0]
