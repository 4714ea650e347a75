"""100 000 random operations of sequences that share pages, against what a plain model remembers.

The model knows nothing of trees: it notes for every page of both pools which prefix was written
there last. A page that is given away while somebody reads it, shared by the wrong prompts, or
lost, shows as another prefix. Pools are as small as `min_window_pages` allows.

Mutants run, each noticed: a page keyed by its own tokens without those before it; a hit without its
window page; the hit's window page not held; a path not held; the last page of a prompt taken too;
held pages counted twice at admission; pages of the others not counted; an idle page's copy lost;
a copy handed over while others hold the page; window pages given up while seen; promises that are
not lowered when a page is shared; a dropped leaf's window page leaked.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from ftruntime.kvcache.layout import min_window_pages, pages_for
from ftruntime.kvcache.manager import KVManager

OPERATIONS = 25_000
ROWS, CHUNK_PAGES = 5, 3
Prefix = tuple[int, ...]  # one number for each page: what its tokens are


@dataclass
class Sequence:
    tokens: list[int]
    total: int  # tokens it may come to
    done: int
    num_prompt: int
    rows: dict[int, int] = field(default_factory=dict)
    windows: dict[int, int] = field(default_factory=dict)

    def prefix(self, logical: int) -> Prefix:
        """The pages up to this one, as far as they are computed."""
        ends = [min((i + 1) * 128, self.done) for i in range(logical + 1)]
        return tuple(hash(tuple(self.tokens[i * 128 : end])) for i, end in enumerate(ends))


class Run:
    def __init__(self, seed: int, num_pages: int, window_pages: int, keeps: bool = True) -> None:
        self.rng = random.Random(seed)
        self.kv = KVManager(num_pages, window_pages, prefix_cache=keeps)
        self.live: dict[str, Sequence] = {}
        self.rows: dict[int, Prefix] = {}  # page -> what was written last
        self.windows: dict[int, Prefix] = {}
        self.known: set[Prefix] = {()}  # full pages that were ever computed
        self.over: list[int] = []  # tokens of the sequence that ended last
        self.num_started = 0
        self.seen = dict.fromkeys(("admit", "blocked", "hit", "full hit", "end", "decode"), 0)

    def prompt(self) -> list[int]:
        """Few texts in many lengths, most of them beside a page edge."""
        if self.over and self.rng.random() < 0.2:  # a chat goes on
            return self.over[: 1100 + self.rng.randint(0, 200)] + [9] * self.rng.randint(0, 9)
        text = self.rng.choice((1, 2, 3))
        length = 128 * self.rng.randint(0, 9) + self.rng.choice((1, 5, 126, 127, 128))
        tokens = [text] * length
        if self.rng.random() < 0.5:  # leaves the text at some page
            at = 128 * self.rng.randint(0, 9)
            tokens[at:] = [4 + self.rng.randint(0, 2)] * len(tokens[at:])
        return tokens

    def room(self) -> int:
        """Row pages that are neither in a table nor still to come."""
        seqs = self.live.values()
        tables = {page for seq in seqs for page in seq.rows.values()}
        to_come = sum(pages_for(seq.total) - len(seq.rows) for seq in seqs)
        return self.kv.total_pages - len(tables) - to_come

    def start(self) -> None:
        if len(self.live) == ROWS:
            return
        tokens = self.prompt()
        total = len(tokens) + self.rng.randint(1, 300)
        wanted = pages_for(total)
        if wanted > self.kv.total_pages:
            return
        name = f"s{self.num_started}"
        lookup = [] if self.rng.random() < 0.1 else tokens
        hit = self.kv.cached_tokens(lookup)
        assert hit % 128 == 0
        assert hit <= max(len(lookup) - 1, 0)
        seq = Sequence(tokens, total, hit, len(tokens))
        if not self.kv.can_admit(total, lookup):
            assert self.live, "an empty pool takes everything"
            self.seen["blocked"] += 1
            return
        assert self.kv.admit(name, total, lookup) == hit
        self.num_started += 1
        self.live[name] = seq
        self.seen["admit"] += 1
        self.seen["hit"] += hit > 0
        self.seen["full hit"] += 0 < len(tokens) - hit <= 128 and hit > 0
        longest = 0
        for logical in range((len(lookup) - 1) // 128 if lookup else 0):
            whole = Sequence(tokens, total, len(tokens), 0).prefix(logical)
            if whole not in self.known:
                break
            longest = (logical + 1) * 128
        assert hit <= longest
        self.check_hit(hit, longest)
        if hit:
            self.take(seq, self.kv.extend(name, hit))
            assert set(seq.rows) == set(range(hit // 128))
            assert set(seq.windows) == {hit // 128 - 1}
            self.reads(seq)
        assert self.room() >= 0

    def check_hit(self, hit: int, longest: int) -> None:
        """Pools are small: less than `longest` may be left."""

    def take(self, seq: Sequence, triples: tuple[tuple[int, int, int], ...]) -> None:
        for logical, window, row in triples:
            assert logical not in seq.rows
            seq.rows[logical] = row
            if window >= 0:
                seq.windows[logical] = window

    def reads(self, seq: Sequence) -> None:
        """What its next token sees is what it, or a prompt like it, has computed."""
        for logical in range(pages_for(seq.done)):
            assert self.rows[seq.rows[logical]] == seq.prefix(logical)
        for logical in range(max(0, seq.done - 127) // 128, pages_for(seq.done)):
            assert self.windows[seq.windows[logical]] == seq.prefix(logical)

    def advance(self) -> None:
        if not self.live:
            return
        name = self.rng.choice(list(self.live))
        seq = self.live[name]
        rest = seq.num_prompt - seq.done
        if seq.done == seq.total:
            self.end(name)
            return
        if rest > 0:
            count = min(rest, 128 * self.rng.randint(1, CHUNK_PAGES))
        else:
            count = 1
            seq.tokens.append(self.rng.choice((7, 8)))
            self.seen["decode"] += 1
        end = seq.done + count
        self.take(seq, self.kv.extend(name, end))
        self.reads(seq)
        others = {page for other in self.live.values() if other is not seq
                  for page in other.rows.values()}  # fmt: skip
        first, seq.done = seq.done // 128, end
        for logical in range(first, pages_for(end)):
            assert seq.rows[logical] not in others
            self.rows[seq.rows[logical]] = self.windows[seq.windows[logical]] = seq.prefix(logical)
            if (logical + 1) * 128 <= end:
                self.known.add(seq.prefix(logical))
        self.reads(seq)
        self.kv.keep(name, seq.tokens, end, prompt_ends=end == seq.num_prompt)
        self.kv.trim(name, end)
        for logical in [i for i in seq.windows if i * 128 + 127 < end - 127]:
            del seq.windows[logical]
        assert dict(self.kv.window_pages_of(name)) == seq.windows
        assert list(self.kv.row_pages_of(name)) == list(seq.rows.values())

    def end(self, name: str) -> None:
        assert self.kv.release(name)
        self.over = self.live.pop(name).tokens
        self.seen["end"] += 1

    def operate(self) -> None:
        draw = self.rng.random()
        if draw < 0.15:
            self.start()
        elif draw > 0.99 and self.live:
            self.end(self.rng.choice(list(self.live)))
        else:
            self.advance()
        if self.rng.random() < 0.02:
            self.kv.check()
            for seq in self.live.values():
                self.reads(seq)

    def finish(self) -> None:
        for name in list(self.live):
            self.end(name)
        self.kv.check()
        assert self.kv.used_pages == self.kv.used_window_pages == self.kv.reserved_pages == 0
        # all that is kept can be had again
        self.kv.admit("all", 128 * self.kv.total_pages)
        for end in range(128, 128 * self.kv.total_pages + 1, 128):
            self.kv.extend("all", end)
            self.kv.trim("all", end)
        assert self.kv.cached_pages == 0
        self.kv.check()


SMALLEST = min_window_pages(max_running=ROWS, chunk_tokens=128 * CHUNK_PAGES)


@pytest.mark.parametrize(
    ("num_pages", "window_pages"),
    [(16, SMALLEST), (40, SMALLEST), (40, SMALLEST + 9), (16, 60)],
    ids=str,
)
def test_random_operations_in_small_pools(num_pages: int, window_pages: int) -> None:
    run = Run(num_pages, num_pages, window_pages)
    for _ in range(OPERATIONS):
        run.operate()
    assert min(run.seen.values()) > 0, run.seen
    run.finish()


class Roomy(Run):
    def check_hit(self, hit: int, longest: int) -> None:
        assert hit == longest, "nothing was ever dropped"


def test_every_known_page_is_found_while_nothing_is_dropped() -> None:
    run = Roomy(3, 4000, 4000)
    for _ in range(4000):
        run.operate()
    assert run.seen["full hit"] > 20
    run.finish()


def test_nothing_is_kept_without_the_cache() -> None:
    run = Run(5, 40, SMALLEST, keeps=False)
    for _ in range(3000):
        run.operate()
    assert run.seen["hit"] == run.kv.cached_pages == 0
    run.finish()
