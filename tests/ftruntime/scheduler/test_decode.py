"""The running set."""

from __future__ import annotations

import gc

from ftruntime.kvcache.manager import KVManager
from ftruntime.scheduler.decode import DecodeManager
from ftruntime.scheduler.table import RequestRow, RequestTable
from tests.ftruntime.scheduler.support import make_request


def running(table: RequestTable, kv: KVManager, name: str) -> RequestRow:
    row = table.add(make_request(name, 128))
    kv.admit(name, row.num_reserved_tokens)
    kv.extend(name, 128)
    table.seat(row)
    row.append(50)
    return row


def test_one_token_each_in_order_of_joining() -> None:
    table, kv = RequestTable(3), KVManager(10, 11)
    decode = DecodeManager(kv)
    assert not decode.can_run
    rows = [running(table, kv, name) for name in "abc"]
    for row in (rows[2], rows[0]):
        decode.join(row)
    batch = decode.build()
    assert [row.request_id for row, _ in batch] == ["c", "a"]
    assert [(seq.row, seq.start, seq.token_ids) for _, seq in batch] == [
        (2, 128, (50,)),
        (0, 128, (50,)),
    ]
    # position 128 opens a page
    assert [[page[0] for page in seq.new_pages] for _, seq in batch] == [[1], [1]]
    assert all(seq.sample is not None and seq.sample.position == 129 for _, seq in batch)


def test_s04_ended_rows_stay_listed_until_the_next_decode_drops_them() -> None:
    table, kv = RequestTable(3), KVManager(10, 11)
    decode = DecodeManager(kv)
    row = running(table, kv, "a")
    decode.join(row)
    table.end(row)
    assert (decode.can_run, decode.rows) == (True, ())
    assert decode.build() == []
    assert not decode.can_run


def test_rows_that_ended_do_not_pile_up_while_no_decode_is_planned() -> None:
    table, kv = RequestTable(3), KVManager(10, 11)
    decode = DecodeManager(kv)
    rows = []
    for number in range(50):
        rows.append(running(table, kv, str(number)))
        decode.join(rows[-1])
        table.end(rows[-1])
        kv.release(str(number))
    assert len(gc.get_referents(decode._running)) == 1
