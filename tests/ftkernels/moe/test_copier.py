"""Order of copies: on the host, on a card (through a stub of ``torch.cuda``), and in the fake one.

Mutants that these tests catch: copies on the stream of compute, their event recorded there, a
blocking copy, an event reused while somebody holds it or never, marks that are forgotten before
they are passed, a number off by one, copies tried over their own bytes.
"""

from __future__ import annotations

import types

import pytest
import torch

from ftkernels.moe import copier as module
from ftkernels.moe.copier import CpuCopier, CudaCopier, Marks, check_copies
from ftkernels.testing.fake_copier import FakeCopier


def full(value, size=4):
    return torch.full((size,), value, dtype=torch.uint8)


def test_the_host_copies_at_once():
    copier, dst = CpuCopier(), [full(0), full(0)]
    event = copier.copy(dst, [full(1), full(2)], copier.mark())
    assert [x.tolist() for x in dst] == [[1] * 4, [2] * 4]
    assert event.done()
    copier.wait(event)
    with pytest.raises(ValueError, match="zip"):
        copier.copy(dst, [full(1)], None)


class FakeCuda:
    """``torch.cuda`` as far as the copier knows it, with a log of what streams are told."""

    def __init__(self):
        self.log, self.made, self.streams = [], 0, ["compute"]
        cuda = self

        class Event:
            def __init__(self):
                cuda.made += 1
                self.name, self.passed = f"e{cuda.made}", False

            def record(self, stream):
                cuda.log.append((stream.name, "record", self.name))

            def query(self):
                return self.passed

        class Stream:
            def __init__(self, device, name="copies"):
                self.device, self.name = device, name

            def wait_event(self, event):
                cuda.log.append((self.name, "wait", event.name))

        self.Event, self.Stream = Event, Stream

    def stream(self, stream):
        cuda = self

        class Context:
            def __enter__(self):
                cuda.streams.append(stream.name)

            def __exit__(self, *error):
                cuda.streams.pop()

        return Context()

    def current_stream(self, device):
        assert device == torch.device("cuda:1")
        return self.Stream(device, self.streams[-1])

    def tensor(self, name):
        def copy_(source, non_blocking=False):
            assert non_blocking
            self.log.append((self.streams[-1], "copy", f"{source} to {name}"))

        return types.SimpleNamespace(copy_=copy_)


@pytest.fixture
def cuda(monkeypatch):
    stub = FakeCuda()
    monkeypatch.setattr(module.torch, "cuda", stub)
    return stub


def test_a_card_copies_beside_compute(cuda):
    copier = CudaCopier("cuda:1")
    mark = copier.mark()
    event = copier.copy([cuda.tensor("x"), cuda.tensor("y")], ["a", "b"], mark)
    copier.copy([cuda.tensor("z")], ["c"], None)
    copier.wait(event)
    assert cuda.log == [
        ("compute", "record", "e1"),
        ("copies", "wait", "e1"), ("copies", "copy", "a to x"), ("copies", "copy", "b to y"),
        ("copies", "record", "e2"),
        ("copies", "copy", "c to z"), ("copies", "record", "e3"),
        ("compute", "wait", "e2"),
    ]  # fmt: skip


def test_events_of_a_card_are_used_again_once_nobody_has_them(cuda):
    copier = CudaCopier("cuda:1")
    kept = copier.mark()
    for _ in range(5):
        copier.mark()
    assert cuda.made == 2
    assert not kept.done()
    kept.event.passed = True
    assert kept.done()
    names = {entry[2] for entry in cuda.log[1:]}
    assert kept.event.name not in names
    first, second = copier.mark(), copier.mark()
    assert first.event is not second.event


def test_an_event_that_cannot_be_made_is_not_kept(cuda, monkeypatch):
    copier = CudaCopier("cuda:1")

    def fail():
        raise RuntimeError("no events")

    monkeypatch.setattr(cuda, "Event", fail)
    with pytest.raises(RuntimeError, match="no events"):
        copier.mark()
    assert copier._spare == []


def test_marks_are_numbered_and_forgotten_once_passed():
    fake = FakeCopier()
    marks = Marks(fake)
    first, second = marks.take(), marks.take()
    assert (first, second) == (1, 2)
    assert marks.is_passed(0)
    assert not marks.is_passed(1)
    times = [marks.event(number).time for number in (first, second)]
    assert times == sorted(times)
    fake.computed = times[0]
    assert not marks.is_passed(1), "until the next sweep"
    marks.sweep()
    assert marks.is_passed(1)
    assert marks.event(1) is None
    assert marks.event(2).time == times[1]
    fake.finish()
    assert marks.take() == 3
    assert marks.event(2) is None
    assert len(marks._open) == 1


def test_the_fake_copies_when_somebody_waits():
    fake, (x, y) = FakeCopier(), (full(0), full(0))
    first, second = fake.copy([x], [full(1)], None), fake.copy([y], [full(2)], None)
    assert (x[0], y[0], first.done()) == (0, 0, False)
    fake.wait(first)
    assert (x[0], y[0], first.done(), second.done()) == (1, 0, True, False)
    mark = fake.mark()
    third = fake.copy([x], [full(3)], mark)
    fake.wait(second)
    assert not mark.done()
    fake.wait(third)
    assert (x[0], mark.done()) == (3, True)
    last, copied = fake.mark(), fake.copy([y], [full(4)], None)
    fake.finish()
    assert (y[0], last.done(), copied.done()) == (4, True, True)
    assert [entry[0] for entry in fake.log] == [
        "copy", "copy", "wait", "mark", "copy", "wait", "wait", "mark", "copy",
    ]  # fmt: skip


def test_the_fake_refuses_a_read_before_its_copy():
    fake, x = FakeCopier(), full(0, 8)
    event = fake.copy([x], [full(1, 8)], None)
    fake.read(full(5))
    with pytest.raises(AssertionError, match="does not come after copy"):
        fake.read(x[6:])
    fake.wait(event)
    fake.read(x[6:])


def test_the_fake_refuses_a_copy_before_the_last_read():
    fake, x = FakeCopier(), full(0, 8)
    early = fake.mark()
    fake.read(x[:4])
    late = fake.mark()
    fake.copy([x[4:]], [full(1)], None)  # beside it
    for after in (None, early):
        with pytest.raises(AssertionError, match="does not come after the read"):
            fake.copy([x[2:6]], [full(1)], after)
    fake.copy([x[2:6]], [full(1)], late)
    fake.finish()
    fake.copy([x], [full(1, 8)], None)


def test_copies_are_tried():
    dst = [full(0), torch.zeros(3, dtype=torch.int32)]
    src = [full(7), torch.tensor([0, -1, 5], dtype=torch.int32)]
    for copier in (CpuCopier(), FakeCopier()):
        check_copies(copier, dst, src)
        assert all(torch.equal(a, b) for a, b in zip(dst, src, strict=True))
    broken = CpuCopier()
    broken.copy = lambda dst, src, after: module.Done()
    with pytest.raises(RuntimeError, match=r"^ExpertCache: a copy from pageable host memory to"):
        check_copies(broken, dst, src)
    check_copies(broken, [], [])
