"""The journal's format."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.storage import records
from forebay.storage.errors import JournalError
from forebay.storage.index import Entry
from forebay.storage.plan import Span, pack
from forebay.storage.records import DeviceRecord, Header

HEADER = Header(b"u" * 16, 4096, 1, (DeviceRecord("ram", "dram", "", 10), DeviceRecord("ssd", "file", "/f", 20)))
PREAMBLE = next(records.whole_file([]))
SPACE = b"n" * 16
OTHER = b"m" * 16


def entry(generation, name=None, lengths=(4096, 100), lanes=1, copies=()):
    spans = tuple(Span(sum(lengths[:i]), length) for i, length in enumerate(lengths))
    places = [1 << 32 | generation * len(lengths) + i for i in range(len(lengths))]
    made = Entry(name or SPACE + b"key%d" % generation, generation, spans, pack(places), pack(copies))
    made.checksums = bytes(4 * len(lengths) * lanes)
    return made


def journal(*content):
    """Each record in a frame of its own, as if written one by one."""
    start = b"".join(records.whole_file([records.header_record(HEADER)]))
    return start + b"".join(records.frame([record]) for record in content)


def keys(data):
    found = records.replay(data, "j")
    return [kept.name for kept in records.decode(data, found)]


@given(
    st.integers(1, 2**63),
    st.binary(min_size=16, max_size=60),
    st.lists(st.integers(1, 2**26), min_size=1, max_size=8),
    st.integers(1, 8),
    st.booleans(),
    st.data(),
)
def test_a_chunk_survives_the_round_trip(generation, name, lengths, lanes, copied, data):
    count = len(lengths)
    places = data.draw(st.lists(st.integers(0, 2**37), min_size=count, max_size=count))
    spans = tuple(Span(sum(lengths[:i]), length) for i, length in enumerate(lengths))
    before = Entry(name, generation, spans, pack(places), pack(places[::-1]) if copied else b"")
    before.checksums = data.draw(st.binary(min_size=4 * count * lanes, max_size=4 * count * lanes))
    content = journal(records.put_record(before))
    found = records.replay(content, "j")
    (after,) = records.decode(content, found)
    assert (after.name, after.generation, after.spans) == (name, generation, spans)
    assert (after.extents, after.checksums) == (before.extents, before.checksums)
    assert after.copies == (before.copies or b"\xff" * 8 * count)
    assert after.ready
    assert not after.verified
    assert records.put_size(after) == len(records.put_record(before)) == found.live
    assert found.last_generation == generation


def test_what_is_dropped_is_gone():
    puts = [records.put_record(entry(n)) for n in range(1, 5)]
    data = journal(*puts, records.drop_record([1, 3]), records.drop_record([99]))
    assert keys(data) == [SPACE + b"key2", SPACE + b"key4"]
    assert records.replay(data, "j").last_generation == 4


def test_reset_empties_one_namespace_up_to_here():
    data = journal(
        records.put_record(entry(1)),
        records.put_record(entry(2, OTHER + b"x")),
        records.reset_record(SPACE),
        records.put_record(entry(3)),
    )
    assert keys(data) == [OTHER + b"x", SPACE + b"key3"]


def test_namespaces_are_kept():
    data = journal(records.namespace_record(SPACE, '{"model":"m"}'))
    assert records.replay(data, "j").namespaces == {SPACE: '{"model":"m"}'}


def test_compaction_keeps_what_counts():
    data = journal(
        records.namespace_record(SPACE, "{}"),
        *(records.put_record(entry(n)) for n in range(1, 9)),
        records.drop_record([2, 4, 6]),
        records.reset_record(OTHER),
    )
    compact = b"".join(records.whole_file(records.live_records(data, records.replay(data, "j"))))
    assert keys(compact) == keys(data)
    assert len(compact) < len(data)
    assert records.replay(compact, "j").header == HEADER
    assert records.replay(compact, "j").namespaces == {SPACE: "{}"}


def test_unknown_records_are_skipped():
    unknown = records.record(99, 1, b"from the future")
    assert keys(journal(unknown, records.put_record(entry(1)))) == [SPACE + b"key1"]


def test_every_cut_leaves_the_complete_records():
    parts = [
        records.put_record(entry(1)),
        records.put_record(entry(2)),
        records.drop_record([1]),
        records.put_record(entry(3)),
    ]
    data, start = journal(*parts), len(journal())
    ends = [len(journal(*parts[: i + 1])) for i in range(len(parts))]
    after = [{1}, {1, 2}, {2}, {2, 3}]
    for length in range(start, len(data) + 1):
        found = records.replay(data[:length], "j")
        complete = sum(end <= length for end in ends)
        assert set(found.puts) == (after[complete - 1] if complete else set())
        assert found.end == ([start, *ends])[complete]


def test_every_flipped_bit_is_noticed():
    """A damaged record and what follows count for nothing; a damaged header is refused."""
    data = journal(*(records.put_record(entry(n)) for n in range(1, 4)))
    start, size = len(journal()), len(records.frame([records.put_record(entry(1))]))
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        if bit // 8 < start:
            with pytest.raises(JournalError):
                records.replay(bytes(damaged), "j")
        else:
            sound = (bit // 8 - start) // size
            assert list(records.replay(bytes(damaged), "j").puts) == [1, 2, 3][:sound]


def test_a_frame_counts_as_a_whole():
    data = journal() + records.frame([records.put_record(entry(1)), records.put_record(entry(2))])
    assert set(records.replay(data, "j").puts) == {1, 2}
    assert set(records.replay(data[:-1], "j").puts) == set()


def test_zeros_at_the_end_are_no_frames():
    """What a file system may leave after a power failure."""
    data = journal(records.put_record(entry(1)))
    found = records.replay(data + bytes(100), "j")
    assert (set(found.puts), found.end) == ({1}, len(data))


def test_empty_file_is_a_new_journal():
    assert records.replay(b"", "j") is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            b"PK\x03\x04" + bytes(100),
            "x/journal: not a forebay journal; give the pool another path, or remove the file",
        ),
        (b"FOREB", "x/journal: not a forebay journal"),
        (
            records.MAGIC + b"\x07\0\0\0" + bytes(50),
            "x/journal: format 7, this version reads format 1; run `forebay pool clear`",
        ),
        (PREAMBLE, "x/journal: the header is damaged"),
        (
            PREAMBLE + records.frame([records.record(records.Kind.HEADER, 0, b"{}")]),
            "the header is damaged .*run `forebay pool clear`",
        ),
        (PREAMBLE + records.frame([records.record(records.Kind.HEADER, 0, b"[1]")]), "the header is damaged"),
        (PREAMBLE + records.frame([records.record(records.Kind.PUT, 0, b"{}")]), "the header is damaged"),
    ],
)
def test_foreign_files_are_refused_with_the_fix(data, message):
    with pytest.raises(JournalError, match=message) as caught:
        records.replay(data, "x/journal")
    assert "\n" not in str(caught.value)
