"""Calls of the cache: what they return, refuse and leave behind; products from slots.
The order of copies stands in test_expert_moves.py.

Cases O02 (no slot to be had), O03 (fewer slots than experts of a step) and G03 (copies that end and
change nothing).
Mutants that these tests catch: a copy that fails and leaves its keys in the map, a loop left early
that keeps its slots, a release after the step, a close that does not wait (for the copier, for the
bus), no publishing at a step's begin, unbounded hints, a width forgotten with its step, 0 for none
in the result, layer 0's bank for all, ids below 0 kept, groups that go on or start after their
step, a close that is over before it waited, that waits for no copy a step came after or forgets the
last one when it fails, int32 scales in a bank that is not packed, a class for a policy, any card.
"""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

import ftkernels
from ftkernels import ExpertBank, ExpertCache
from ftkernels.moe.bank import expert_rows, row_offsets
from ftkernels.moe.copier import CpuCopier
from ftkernels.testing import randn
from ftkernels.testing.fake_copier import FakeCopier
from tests.support.expert_cases import fp4, random_ids
from tests.support.numbered_banks import SLOT_BYTES, E, L, numbered_banks

NAN = float("nan")


def cached(num_slots=7, banks=None, **kwargs):
    return ExpertCache(L, E, num_slots, banks or numbered_banks(), device="cpu", **kwargs)


def ids(*experts):
    return torch.tensor([experts], dtype=torch.int32)


def resident(cache, layer):
    return {e for e, s in enumerate(cache.lookup(layer, ids(0))[0].tolist()) if s >= 0}


def layer_bank(form, seed=0):
    """5 experts of 64 channels and 32 hidden ones."""
    w13, w2 = fp4(5, 64, 64, seed=seed), fp4(5, 64, 32, seed=seed + 50)
    bank = ExpertBank(w13.codes, w13.scale, w2.codes, w2.scale)
    if form in ("packed", "rows"):
        bank = bank.pack()
    if form.startswith("dense"):
        bank = ExpertBank(w13.matrix.float(), None, w2.matrix.float(), None)
    if form == "dense-columns":
        bank = ExpertBank(*(x if x is None else x.mT.contiguous().mT for x in
                            (bank.w13, None, bank.w2, None)))  # fmt: skip
    if form == "rows":
        rows = torch.empty(5, row_offsets(bank.parts)[-1], dtype=torch.uint8)
        views = expert_rows(rows, bank.parts)
        for view, x in zip(views, bank.tensors, strict=True):
            view.copy_(x)
        bank = ExpertBank(*views, packed=True)
    return bank


@pytest.mark.parametrize("path", ["gemv", "gemm"])
@pytest.mark.parametrize("form", ["packed", "rows", "checkpoint", "dense", "dense-columns"])
def test_few_slots_give_the_bits_of_all_experts(form, path, device, lane):
    """O03: a step that uses every expert, down to one slot."""
    interpreted = lane == "interpreter"
    if interpreted and form == "packed":
        pytest.skip("as in rows, which have the wider strides")
    banks = [layer_bank(form), layer_bank(form, seed=7)]
    tokens, visits = (2, (1,)) if interpreted else (4, (0, 1, 1, 0))
    topk_ids, weights = random_ids(tokens, 3, 5), randn(tokens, 3, seed=4)
    x, shared = (randn(tokens, 64, dtype=torch.bfloat16, seed=seed) for seed in (5, 6))
    topk_ids, weights, x, shared = (t.to(device) for t in (topk_ids, weights, x, shared))
    kwargs = {"swiglu_limit": 1.5, "packed": banks[0].packed, "path": path}

    def product(matrices, **more):
        return ftkernels.moe_fp4(x, *matrices, weights, topk_ids, **kwargs, **more)

    expected = {}
    for layer in visits:
        bank = banks[layer]
        given = (bank.w13, bank.w13_scale, bank.w2, bank.w2_scale)
        moved = [t if t is None else t.to(device) for t in given]
        expected[layer] = product(moved, shared=shared)
    for num_slots in (1, 3, 10):
        cache = ExpertCache(2, 5, num_slots, banks, device=device)
        if num_slots == 10:
            with cache.step("decode"):
                slots = cache.ensure(1, topk_ids)
                out = product(cache.slots(1), slot_of_expert=slots, shared=shared)
            assert torch.equal(out, expected[1])
        for layer in visits if num_slots == 1 or not interpreted else ():
            routed, groups = torch.full((tokens, 3, 64), NAN, dtype=x.dtype, device=device), 0
            with cache.step("prefill"):
                for slots in cache.groups(layer, topk_ids):
                    product(cache.slots(layer), slot_of_expert=slots, routed_out=routed)
                    groups += 1
            assert groups == 1 if num_slots == 10 else groups > 1
            out = ftkernels.moe_combine(routed, topk_ids=topk_ids, shared=shared)
            assert torch.equal(out, expected[layer]), (num_slots, layer)
            cache.check()
        cache.close()


@pytest.mark.parametrize("form", ["packed", "rows", "checkpoint", "dense", "dense-columns"])
def test_slots_are_laid_out_as_the_banks_are(form):
    bank = layer_bank(form)
    cache = ExpertCache(1, 5, 3, [bank], device="cpu")
    pool = cache.slots(0)
    for mine, theirs in zip(pool, (bank.w13, bank.w13_scale, bank.w2, bank.w2_scale), strict=True):
        if theirs is None:
            assert mine is None
            continue
        assert (mine.shape[0], mine.dtype) == (3, theirs.dtype)
        assert mine.shape[1:] == theirs.shape[1:]
        assert mine.stride()[1:] == theirs.stride()[1:]
        assert mine.data_ptr() % 16 == 0
    with cache.step("decode"):
        slots = cache.ensure(0, ids(4, 1)).tolist()
    for mine, theirs in zip(pool, (bank.w13, bank.w13_scale, bank.w2, bank.w2_scale), strict=True):
        for e in (4, 1):
            assert theirs is None or torch.equal(mine[slots[e]], theirs[e])


def test_what_ensure_returns():
    cache = cached()
    with cache.step("decode"):
        first = cache.ensure(1, torch.tensor([[5, -1, 2], [2, 5, -3]]))
        second = cache.ensure(1, ids(5, 0))
        assert (first.dtype, first.shape) == (torch.int32, (E,))
        assert [e for e, s in enumerate(first.tolist()) if s >= 0] == [2, 5]
        assert [e for e, s in enumerate(second.tolist()) if s >= 0] == [0, 5]
        assert first[5] == second[5]
        assert cache.ensure(0, ids(-1, -1)).tolist() == [-1] * E
        assert cache.ensure(0, torch.empty(0, 6, dtype=torch.int64)).tolist() == [-1] * E
        many = torch.tensor([4, 1, -1]).repeat(40)
        assert (cache.ensure(2, many) >= 0).nonzero().flatten().tolist() == [1, 4]
    stats = cache.stats()
    assert stats["decode"] == {
        "hits": 1, "misses": 5, "bytes_h2d": 5 * SLOT_BYTES, "prefetch_used": 0,
        "prefetch_wasted": 0, "evictions": 0,
    }  # fmt: skip
    assert set(stats["prefill"].values()) == {0}
    assert stats["layers"] == [
        {"hits": 0, "misses": 0}, {"hits": 1, "misses": 3}, {"hits": 0, "misses": 2},
    ]  # fmt: skip
    assert (stats["num_slots"], stats["num_experts"]) == (7, L * E)


def test_no_slot_to_be_had_changes_nothing():
    """O02: all slots in use and one expert missing."""
    cache = cached(4, copier=FakeCopier())
    text = (
        "^ExpertCache.ensure: topk_ids is 3 experts that need 2 slots, expected at most 1, those "
        "that earlier calls of the step do not use; `groups` takes fewer at a time, or give the "
        "cache more slots$"
    )
    with cache.step("decode"):
        held = cache.ensure(0, ids(0, 1, 2))
        before = cache.stats()
        with pytest.raises(ValueError, match=text):
            cache.ensure(0, ids(2, 3, 4))
        assert cache.stats() == before
        cache.check()
        assert cache.ensure(0, ids(0, 1, 2, 3))[:3].equal(held[:3])
        groups = cache.groups(1, ids(0))
        with pytest.raises(ValueError, match=r"groups: topk_ids is 1 experts without a slot"):
            next(groups)
        cache.check()
    with cache.step("decode"):
        cache.ensure(1, ids(0, 1, 2, 3))


def test_groups_take_what_is_resident_first_and_copy_ahead():
    fake = FakeCopier()
    cache = cached(4, copier=fake)
    with cache.step("prefill"):
        cache.ensure(0, ids(1, 4))
    fake.log.clear()
    with cache.step("prefill"):
        groups = cache.groups(0, torch.arange(E))
        experts = [{e for e, s in enumerate(next(groups).tolist()) if s >= 0}]
        assert [entry[0] for entry in fake.log] == ["copy"], "the next group is on its way"
        experts += [{e for e, s in enumerate(g.tolist()) if s >= 0} for g in groups]
    assert experts == [{1, 4}, {0, 2}, {3, 5}]
    kinds = [entry[0] for entry in fake.log]
    assert kinds == ["copy", "mark", "copy", "wait", "mark", "wait", "mark"]


def test_leaving_a_loop_early_leaves_nothing_behind():
    cache = cached(4)
    with cache.step("prefill"):
        for _ in cache.groups(0, torch.arange(E)):
            cache.check()
            break
        cache.ensure(1, ids(0, 1, 2, 3))
    with cache.step("prefill"):
        left = cache.groups(2, torch.arange(E))
        next(left)
    with cache.step("prefill"):
        cache.ensure(1, ids(0, 1, 2, 3))
        left.close()  # its step is over
        cache.check()
        with pytest.raises(ValueError, match="expected at most 0"):
            cache.ensure(0, ids(0))


def test_groups_are_written_where_captured_kernels_read():
    cache, out = cached(3), torch.full((E,), 99, dtype=torch.int32)
    with cache.step("decode"):
        found = []
        for slots in cache.groups(1, ids(0, 2, 4, 5), out=out):
            assert slots is out
            assert set(out.tolist()) <= {-1, 0, 1, 2}
            found += [e for e, slot in enumerate(out.tolist()) if slot >= 0]
        assert sorted(found) == [0, 2, 4, 5]
        for bad, error in (
            (torch.empty(E), TypeError), (torch.empty(E + 1, dtype=torch.int32), ValueError),
            (torch.empty(E, dtype=torch.int32, device="meta"), ValueError),
        ):  # fmt: skip
            before = cache.stats()
            with pytest.raises(error, match=r"^ExpertCache.groups: out "):
                cache.groups(0, ids(1), out=bad)
            assert cache.stats() == before


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("then", ["nothing", "a step", "close"])
def test_groups_end_with_their_step(started, then):
    cache = cached(4)
    with cache.step("prefill"):
        groups = cache.groups(0, torch.arange(E))
        if started:
            next(groups)
    if then == "a step":
        step = cache.step("decode")
        step.__enter__()
        cache.ensure(1, ids(0, 1, 2))
    if then == "close":
        cache.close()
    text = "^ExpertCache.groups: the step has ended, expected the iterator's use within it$"
    with pytest.raises(RuntimeError, match=text):
        next(groups)
    assert list(groups) == []
    if then != "close":
        cache.check()
    if then == "a step":
        cache.ensure(1, ids(0, 1, 2, 5))


def test_an_error_in_a_step_gives_its_slots_back():
    cache = cached(4)

    def fail():
        with cache.step("decode"):
            cache.ensure(0, ids(0, 1, 2, 3))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with cache.step("decode"):
        cache.ensure(1, ids(0, 1, 2, 3))
    cache.check()


def test_a_copy_that_fails_leaves_its_experts_missing(monkeypatch):
    copier = CpuCopier()
    cache = cached(4, copier=copier)

    def fail(dst, src, after):
        raise RuntimeError("the bus")

    with cache.step("decode"):
        cache.ensure(0, ids(5))
        with monkeypatch.context() as patch:
            patch.setattr(copier, "copy", fail)
            with pytest.raises(RuntimeError, match="the bus"):
                cache.ensure(0, ids(1, 5))
        cache.check()
        slots = cache.ensure(0, ids(1, 5))
        assert (cache.slots(0)[0][slots[1]] == 2).all()
    assert cache.stats()["decode"]["misses"] == 2


def test_hints_are_used_or_wasted():
    fake = FakeCopier()
    cache = cached(3, copier=fake, policy="lru")
    cache.prefetch(0, [1, 1, -1, 2])
    cache.prefetch(0, torch.tensor([1, 2]))
    cache.prefetch(0, [])
    fake.finish()
    with cache.step("decode"):
        slots = cache.ensure(0, ids(1))
        assert (cache.slots(0)[0][slots[1]] == 2).all()
    with cache.step("prefill"):
        cache.ensure(1, ids(0, 1))
    counts = cache.stats()
    assert counts["decode"]["bytes_h2d"] == 2 * SLOT_BYTES
    assert (counts["decode"]["hits"], counts["decode"]["misses"]) == (1, 0)
    assert counts["decode"]["prefetch_used"] == 1
    assert counts["prefill"]["prefetch_wasted"] == 1


def test_hints_wait_for_nobody():
    fake = FakeCopier()
    cache = cached(2, copier=fake, policy="lru")
    with cache.step("decode"):
        cache.ensure(0, ids(0, 1))
        cache.prefetch(1, [0])
    assert cache.stats()["decode"]["bytes_h2d"] == 2 * SLOT_BYTES, "in use"
    cache.prefetch(1, [0])
    assert cache.stats()["decode"]["bytes_h2d"] == 2 * SLOT_BYTES, "the step's kernels run"
    fake.finish()
    cache.prefetch(1, [0])
    cache.prefetch(2, [0])
    assert cache.stats()["decode"]["bytes_h2d"] == 4 * SLOT_BYTES
    cache.prefetch(2, [1])
    assert cache.stats()["decode"]["bytes_h2d"] == 4 * SLOT_BYTES, "both slots are in flight"
    with cache.step("decode"):
        cache.ensure(2, ids(4, 5))
    cache.check()


def test_hints_in_flight_are_bounded():
    """Twice the experts of the widest call, 16 when those are few: a miss queues behind no more."""
    experts = 90
    rows = torch.zeros(experts, 2, 1, dtype=torch.uint8)
    fake = FakeCopier()
    bank = ExpertBank(rows, rows, rows, rows)
    cache = ExpertCache(2, experts, 180, [bank, bank], device="cpu", copier=fake)

    def moved(hint):
        cache.prefetch(0, list(range(hint)))
        return cache.stats()["decode"]["bytes_h2d"] // 8

    assert moved(12) == 12
    assert moved(30) == 16
    with cache.step("decode"):
        cache.ensure(1, torch.arange(11))  # its copies come after those of the hints
        assert moved(experts) == 16 + 11 + 22
        assert moved(experts) == 16 + 11 + 22
    fake.finish()
    assert moved(experts) == 16 + 11 + 22 + 22
    with cache.step("decode"):
        pass
    fake.finish()
    assert moved(experts) == 16 + 11 + 22 + 22 + 16


def test_lookup_shows_what_has_arrived():
    fake = FakeCopier()
    cache = cached(4, copier=fake, policy="lru")
    topk_ids = ids(2, 3, -1)
    slots, missing = cache.lookup(1, topk_ids)
    assert slots.tolist() == [-1] * E
    assert missing.tolist() == [2]
    cache.prefetch(1, [2])
    assert resident(cache, 1) == set(), "in flight"
    fake.finish()
    with cache.step("decode"):
        assert slots.tolist()[2] >= 0, "published with the step"
        out = torch.zeros(1, dtype=torch.int32)
        again, missing = cache.lookup(1, topk_ids, out=out)
        assert again.data_ptr() == slots.data_ptr()
        assert out.tolist() == [1]
        assert missing is out
        cache.ensure(0, ids(0, 1, 4, 5))
    assert resident(cache, 1) == set()
    assert resident(cache, 0) == {0, 1, 4, 5}


def test_captures_see_a_table_that_is_up_to_date(monkeypatch):
    fake = FakeCopier()
    cache = cached(4, copier=fake, policy="lru")
    with cache.step("decode"):
        cache.ensure(0, ids(0, 1))
    capturing = [True]
    monkeypatch.setattr(ExpertCache, "_is_capturing", lambda self: capturing[0])
    with pytest.raises(RuntimeError, match=r"^ExpertCache.lookup: the table on the device is out"):
        cache.lookup(0, ids(0))
    capturing[0] = False
    cache.lookup(0, ids(0))
    capturing[0] = True
    fake.log.clear()
    with cache.step("decode"):
        assert cache.lookup(0, ids(0, 5))[1].tolist() == [1]
        cache.prefetch(1, [1])
        with pytest.raises(RuntimeError, match=r"^ExpertCache.ensure: a stream is captured"):
            cache.ensure(0, ids(0))
    assert fake.log == [], "nothing is copied or recorded"
    capturing[0] = False
    fake.finish()
    with cache.step("decode"):
        cache.prefetch(1, [0, 1, 2, 3])
        assert resident(cache, 0) == {0, 1}, "a replay may read what is published"
        assert cache.stats()["decode"]["bytes_h2d"] == 4 * SLOT_BYTES
    fake.finish()
    cache.prefetch(1, [2, 3])
    fake.finish()
    cache.prefetch(1, [])
    assert resident(cache, 0) == set()


def test_steps_do_not_nest():
    cache = cached()
    with cache.step("decode"):
        with pytest.raises(RuntimeError, match="a step is open, expected one at a time"):
            cache.step("decode").__enter__()
        with pytest.raises(RuntimeError, match="close: a step is open"):
            cache.close()
        cache.ensure(0, ids(0))
    for call in (cache.ensure, cache.groups):
        with pytest.raises(RuntimeError, match="no step is open, expected a call within one"):
            call(0, ids(0))


@pytest.mark.parametrize("copier", [CpuCopier, FakeCopier])
def test_close_returns_everything(copier):
    copier = copier()
    banks = numbered_banks()
    cache = cached(banks=banks, copier=copier)
    cache.prefetch(0, [0, 1])
    with cache.step("decode"):
        cache.ensure(1, ids(0))
    held = [weakref.ref(cache.slots(0)[0]), *(weakref.ref(bank) for bank in banks)]
    cache.prefetch(2, [0])
    event = cache._moves._flights[-1].event
    cache.close()
    assert event.done(), "no copy is in flight"
    cache.close()
    del banks, event
    gc.collect()
    assert [ref() for ref in held] == [None] * 4
    calls = (
        lambda: cache.ensure(0, ids(0)), lambda: cache.groups(0, ids(0)), cache.stats, cache.check,
        lambda: cache.lookup(0, ids(0)), lambda: cache.prefetch(0, [0]), lambda: cache.slots(0),
        lambda: cache.step("decode").__enter__(),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(RuntimeError, match=r"^ExpertCache.\w+: the cache is closed"):
            call()


def test_close_waits_for_the_bus():
    class Event:
        polls = 0

        def done(self):
            self.polls += 1
            return self.polls > 3

    class Slow(CpuCopier):
        def copy(self, dst, src, after):
            super().copy(dst, src, after)
            return event

    event = Event()
    cache = cached(copier=Slow())
    cache.prefetch(0, [0])
    cache.close()
    assert event.polls == 4


def test_close_waits_for_copies_that_a_step_came_after():
    class Event:
        is_done = False

        def done(self):
            return self.is_done

    class Slow(CpuCopier):
        def copy(self, dst, src, after):
            super().copy(dst, src, after)
            return event

    event = Event()
    event.is_done = True
    cache = cached(copier=Slow())
    event = Event()
    with cache.step("decode"):
        cache.ensure(0, ids(0))
    held = weakref.ref(cache.slots(0)[0])
    thread = threading.Thread(target=cache.close)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    assert held() is not None
    event.is_done = True
    thread.join()
    assert held() is None


@pytest.mark.parametrize("where", ["wait", "done"])
def test_a_close_that_fails_is_made_again(where, monkeypatch):
    class Broken(BaseException):
        pass

    class Event:
        def done(self):
            if where == "done" and broken:
                raise Broken
            return True

    class Breaking(CpuCopier):
        def copy(self, dst, src, after):
            super().copy(dst, src, after)
            return Event()

        def wait(self, event):
            if where == "wait" and broken:
                raise Broken

    broken = []
    cache = cached(copier=Breaking())
    cache.prefetch(0, [0, 1])
    banks = weakref.ref(cache._pool._pairs[0][0][1])
    broken.append(True)
    for _ in range(2):
        with pytest.raises(Broken):
            cache.close()
        assert banks() is not None
        cache.check()
    broken.clear()
    cache.close()
    cache.close()
    gc.collect()
    assert banks() is None


def test_copies_that_change_nothing_are_found_at_once():
    """G03: a driver that reports copies done and leaves the bytes as they were."""

    class Idle(CpuCopier):
        def copy(self, dst, src, after):
            return super().copy([], [], after)

    class Late(CpuCopier):
        def copy(self, dst, src, after):
            return super().copy(dst, [torch.zeros_like(x) for x in src], after)

    for copier in (Idle(), Late()):
        with pytest.raises(RuntimeError, match="a copy from pageable host memory to cpu ended"):
            cached(copier=copier)


def test_policies_by_name_and_by_object():
    text = r"^ExpertCache: policy is 'fifo', expected 'scan-resistant', 'lru' or a SlotPolicy"
    with pytest.raises(ValueError, match=text):
        cached(policy="fifo")
    with pytest.raises(TypeError, match=r"^ExpertCache: policy is 3, expected"):
        cached(policy=3)
    lru = ftkernels.moe.slot_policy.Lru
    without = [type("P", (lru,), {name: None})() for name in
               ("begin", "insert", "touch", "remove", "victim")]  # fmt: skip
    for policy in (lru, None, *without):
        text = r"expected 'scan-resistant', 'lru' or a SlotPolicy, an object with begin, insert, "
        with pytest.raises(TypeError, match=rf"^ExpertCache: policy is .*{text}"):
            cached(policy=policy)
    given = lru()
    cache = cached(1, policy=given)
    with cache.step("decode"):
        cache.ensure(0, ids(3))
    assert given.victim(lambda key: True) == 3


def test_stats_can_be_read_by_another_thread():
    cache, sums = cached(4), []

    def watch():
        for _ in range(200):
            counts = cache.stats()["decode"]
            sums.append(counts["hits"] + counts["misses"])

    thread = threading.Thread(target=watch)
    thread.start()
    for layer in range(200):
        with cache.step("decode"):
            cache.ensure(layer % L, ids(0, 1))
    thread.join()
    assert sums == sorted(sums)


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"num_layers": 2}, ValueError, "banks is 3 banks, expected 2"),
        ({"num_experts": 5}, ValueError, r"banks\[0\].w13 holds 6 experts, expected "
         r"num_experts, 5"),
        ({"num_slots": 0}, ValueError, "num_slots is 0, expected >= 1"),
        ({"num_slots": 19}, ValueError, "num_slots is 19, expected at most 18"),
        ({"num_slots": 2.0}, TypeError, "num_slots is 2.0, expected an integer"),
        ({"device": "foo"}, ValueError, "device is 'foo', expected cpu, or cuda where PyTorch"),
        ({"device": None}, TypeError, "device is None, expected cpu"),
        ({"device": "meta"}, ValueError, "device is 'meta', expected cpu"),
        ({"device": torch.device("mps")}, ValueError, "device is 'mps', expected cpu"),
        ({"device": "cuda:4096"}, ValueError, "device is 'cuda:4096', expected cpu"),
        (
            {"copier": CpuCopier},
            TypeError,
            "copier is <class .*, expected a Copier, an object with copy, mark, wait",
        ),
        ({"copier": "cpu"}, TypeError, "copier is 'cpu', expected a Copier"),
        ({"banks": [1, 2, 3]}, TypeError, "banks is list, expected a list of ExpertBank"),
        ({"banks": numbered_banks()[0]}, TypeError, "banks is ExpertBank, expected a list"),
    ],
)
def test_refusals_of_the_constructor(change, kind, text):
    kwargs = {"num_layers": L, "num_experts": E, "num_slots": 4, "banks": numbered_banks()}
    with pytest.raises(kind, match=f"^ExpertCache: {text}"):
        ExpertCache(**{**kwargs, "device": "cpu", **change})


def test_a_card_that_is_not_there_is_no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^ExpertCache: device is 'cuda', expected cpu"):
        ExpertCache(L, E, 4, numbered_banks(), device="cuda")


def test_banks_must_agree():
    banks = numbered_banks()
    a = banks[0]
    half = ExpertBank(a.w13, None, a.w2, a.w2_scale)
    other = ExpertBank(a.w13, a.w13_scale[:, :2], a.w2, a.w2_scale)
    folded = ExpertBank(a.w13, a.w13_scale, a.w2, a.w2_scale.int())
    none = ExpertBank(a.w13, a.w13_scale, None, a.w2_scale)
    array = ExpertBank(a.w13, a.w13_scale.numpy(), a.w2, a.w2_scale)
    turned = ExpertBank(a.w13.cfloat().conj(), a.w13_scale, a.w2, a.w2_scale)
    empty = ExpertBank(a.w13[:, :0], a.w13_scale, a.w2, a.w2_scale)
    sparse = ExpertBank(a.w13.to_sparse(), a.w13_scale, a.w2, a.w2_scale)
    packed = ExpertBank(a.w13, a.w13_scale, a.w2, a.w2_scale, packed=True)
    far = ExpertBank(a.w13.to("meta"), a.w13_scale, a.w2, a.w2_scale)
    flat = ExpertBank(a.w13[:, 0], a.w13_scale, a.w2, a.w2_scale)
    for bank, kind, text in (
        (half, ValueError, " is with one of its scales, expected both or none"),
        (other, ValueError,
         r" is .* uint8 \(6, 2, 1\), .* expected .* uint8 \(6, 4, 1\), .* as banks\[0\]"),
        (packed, ValueError, r" is .* packed, expected .* as banks\[0\]"),
        (folded, ValueError, " has int32 scales and packed=False, expected packed=True"),
        (none, TypeError, ".w2 is NoneType, expected a tensor"),
        (array, TypeError, ".w13_scale is ndarray, expected a tensor"),
        (turned, TypeError, ".w13 is complex64, expected uint8, bfloat16, float16, float32"),
        (far, ValueError, ".w13 is on meta, expected cpu"),
        (sparse, ValueError, ".w13 is sparse_coo, expected a dense tensor"),
        (flat, ValueError, r".w13 is \(6, 2\), expected \[E, rows, columns\], none of them 0"),
        (empty, ValueError, r".w13 is \(6, 0, 2\), expected \[E, rows, columns\], none of"),
    ):  # fmt: skip
        with pytest.raises(kind, match=rf"^ExpertCache: banks\[2\]{text}"):
            cached(banks=[*banks[:2], bank])


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda c: c.ensure(3, ids(0)), ValueError, "ensure: layer is 3, expected 0 to 2"),
        (lambda c: c.ensure(True, ids(0)), TypeError, "ensure: layer is True, expected an integer"),
        (lambda c: c.ensure(0, ids(6)), ValueError, "ensure: topk_ids holds 6, expected ids below"),
        (lambda c: c.ensure(0, torch.arange(99)), ValueError, "ensure: topk_ids holds 98"),
        (lambda c: c.ensure(0, [1]), TypeError, "ensure: topk_ids is list, expected a tensor"),
        (lambda c: c.ensure(0, torch.ones(1)), TypeError, "ensure: topk_ids is float32"),
        (lambda c: c.ensure(0, ids(0).to("meta")), ValueError,
         "ensure: topk_ids is on meta, expected a dense tensor"),
        (lambda c: c.ensure(0, ids(0).to_sparse()), ValueError,
         "ensure: topk_ids is sparse_coo, expected a dense tensor"),
        (lambda c: c.lookup(0, ids(0).to_sparse()), ValueError, "lookup: topk_ids is sparse_coo"),
        (lambda c: c.prefetch(0, [1.5] * 100_000), TypeError,
         r"prefetch: expert_ids is \[(1.5, ){6}...\], expected a list"),
        (lambda c: c.prefetch(0, ""), TypeError, "prefetch: expert_ids is '', expected a list"),
        (lambda c: c.prefetch(0, b"1"), TypeError, "prefetch: expert_ids is b'1', expected a"),
        (lambda c: c.groups(-1, ids(0)), ValueError, "groups: layer is -1"),
        (lambda c: c.groups(0, ids(6)), ValueError, "groups: topk_ids holds 6"),
        (lambda c: c.prefetch(0, [6]), ValueError, "prefetch: expert_ids holds 6"),
        (lambda c: c.prefetch(0, [1.0]), TypeError, r"prefetch: expert_ids is \[1.0\], expected a"),
        (lambda c: c.prefetch(0, torch.ones(1)), TypeError, "prefetch: expert_ids is float32"),
        (lambda c: c.prefetch(0, torch.ones(1, device="meta").int()), ValueError,
         "prefetch: expert_ids is on meta, expected cpu"),
        (lambda c: c.prefetch(9, []), ValueError, "prefetch: layer is 9"),
        (lambda c: c.lookup(9, ids(0)), ValueError, "lookup: layer is 9"),
        (lambda c: c.slots("0"), TypeError, "slots: layer is '0'"),
        (lambda c: c.step("idle").__enter__(), ValueError, "step: phase is 'idle', expected"),
    ],
)  # fmt: skip
def test_refusals_of_calls(call, kind, text):
    cache = cached()
    with cache.step("decode"), pytest.raises(kind, match=f"^ExpertCache.{text}"):
        call(cache)
    cache.check()
    assert cache.stats()["decode"]["misses"] == 0


def test_check_finds_what_is_broken():
    def lose_a_slot(cache):
        cache._map._free.pop()

    def forget_a_holder(cache):
        cache._step._groups.clear()

    def forget_a_flight(cache):
        cache._moves._flights.clear()

    def enter_too_early(cache):
        cache._table.enter(7, cache._map.slot(7))

    def swap_slots(cache):
        table = cache._map._slot_of
        table[0], table[1] = table[1], table[0]

    for breaks in (lose_a_slot, forget_a_holder, forget_a_flight, enter_too_early, swap_slots):
        cache = cached(copier=FakeCopier())
        with cache.step("decode"):
            cache.ensure(0, ids(0, 1))
            cache.prefetch(1, [1])
            cache.check()
            breaks(cache)
            with pytest.raises(AssertionError, match="do not add up"):
                cache.check()
