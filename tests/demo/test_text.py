"""The text in chapters, its split, and the baselines by hand.

Mutants run, each noticed: a verse without its last character, a split that follows the order, an
added count left out of the unigram, kinds and total swapped in the 5-gram.
Of `fetch`: no warning of another text, a program's failure ignored, a relative folder.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import string
from pathlib import Path

import pytest

from demo import baselines, cli, text

RAW = """

Genesis 1

  1 In the beginning.
  2 And the earth:

1 Samuel 31

 10 And they put his armour.
"""


def test_parse():
    chapters = text.parse(RAW)
    assert [c.heading for c in chapters] == ["Genesis 1", "1 Samuel 31"]
    assert [c.verses for c in chapters] == [
        ("In the beginning.", "And the earth:"), ("And they put his armour.",),
    ]  # fmt: skip
    assert text.join(chapters) == (
        "Genesis 1\nIn the beginning.\nAnd the earth:\n\n1 Samuel 31\nAnd they put his armour.\n"
    )


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ("", "text is empty, expected chapters"),
        ("  1 A verse.", "line 1 is '  1 A verse.', expected a heading or a verse"),
        (RAW + "Ruth 1\n", "Ruth 1 is empty, expected verses"),
        (RAW + "and so on", "line 11 is 'and so on', expected a heading or a verse"),
    ],
)
def test_what_is_no_text(raw, sentence):
    with pytest.raises(ValueError, match=sentence):
        text.parse(raw)


@pytest.mark.parametrize("share", [0.05, 0.3, 1e-9])
def test_split(share):
    chapters = [text.Chapter(f"Book {i}", ("x",)) for i in range(100)]
    train, held_out = text.split(chapters, seed=1, held_out=share)
    assert len(held_out) == max(1, round(100 * share))
    assert sorted(train + held_out, key=chapters.index) == chapters
    assert held_out == sorted(held_out, key=chapters.index)
    assert text.split(chapters, seed=1, held_out=share) == (train, held_out)
    assert text.split(chapters, seed=2, held_out=share) != (train, held_out)
    if share == 0.3:
        assert held_out != chapters[:30]


def test_a_split_leaves_some_to_train_on():
    with pytest.raises(ValueError, match="text has 1 chapters, expected more than 1"):
        text.split([text.Chapter("Book 1", ("x",))], seed=1, held_out=0.05)


APT = "#!/bin/sh\n[ $1 = download ] && : > a_1.deb\n"
DPKG = """#!/bin/sh
[ -f "$2" ] && /bin/mkdir -p "$3/usr/bin" && printf '#!/bin/sh\\n%s' "$BIBLE" > "$3/usr/bin/bible"
/bin/chmod +x "$3/usr/bin/bible"
"""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Puts programs on a PATH that has no others; `bible` prints the text above."""
    path = tmp_path / "bin"
    path.mkdir()
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setenv("BIBLE", f"printf '{RAW}'")

    def put(**scripts):
        for name, script in scripts.items():
            file = path / name.replace("_", "-")
            file.write_text(script)
            file.chmod(0o755)

    return put


def test_the_text_is_fetched_once(tmp_path, programs, caplog, monkeypatch):
    programs(apt_get=APT, dpkg_deb=DPKG)
    monkeypatch.chdir(tmp_path)
    folder = Path("folder")  # relative: programs run elsewhere
    folder.mkdir()
    train, held_out = text.fetch(folder)
    assert sorted(c.heading for c in train + held_out) == ["1 Samuel 31", "Genesis 1"]
    assert [file.name for file in folder.iterdir()] == ["kjv.txt"]
    assert (folder / "kjv.txt").read_text() == RAW
    found = hashlib.sha256(RAW.encode()).hexdigest()[:16]
    (record,) = caplog.records
    assert record.getMessage() == (
        f"folder/kjv.txt has sha256 {found}, not 6f74f5589333c56c of the text that the figures of "
        "demo/README.md are of"
    )
    monkeypatch.setattr(text, "SHA256", hashlib.sha256(RAW.encode()).hexdigest())
    programs(apt_get="#!/bin/sh\nexit 1\n")
    caplog.clear()
    assert text.fetch(folder) == (train, held_out)
    assert not caplog.records


@pytest.mark.parametrize(
    ("scripts", "bible", "sentence"),
    [
        ({}, "", "apt-get cannot be run (No such file or directory): "),
        (
            {"apt_get": "#!/bin/sh\necho E: first >&2\necho E: no network >&2\nexit 100\n"}, "",
            "apt-get failed (E: no network): ",
        ),
        ({"apt_get": "#!/bin/sh\nexit 100\n"}, "", "apt-get failed (exit code 100): "),
        ({"apt_get": APT}, "", "dpkg-deb cannot be run (No such file or directory): "),
        (
            {"apt_get": APT, "dpkg_deb": "#!/bin/sh\n"}, "",
            "bible cannot be run (No such file or directory): ",
        ),
        (
            {"apt_get": APT, "dpkg_deb": DPKG}, f"printf '{RAW}'; exit 3",
            "bible failed (exit code 3): ",
        ),
        (
            {"apt_get": APT, "dpkg_deb": DPKG}, "",
            "folder/kjv.txt: text is empty, expected chapters",
        ),
    ],
)  # fmt: skip
def test_a_text_that_cannot_be_fetched(
    tmp_path, programs, capsys, monkeypatch, scripts, bible, sentence
):
    programs(**scripts)
    monkeypatch.setenv("BIBLE", bible)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert cli.run(baselines.main, ["folder"]) == 1
    if sentence.endswith(": "):
        sentence += (
            "the text comes from Debian's packages bible-kjv and bible-kjv-text, over the network; "
            "elsewhere, put the kjv.txt of another folder into folder"
        )
    assert capsys.readouterr() == ("", sentence + "\n")
    assert not list((tmp_path / "folder").iterdir())


def test_a_text_that_is_not_utf_8(tmp_path):
    (tmp_path / "kjv.txt").write_bytes(RAW.encode() + b"\xff")
    with pytest.raises(ValueError, match=r"kjv\.txt: 'utf-8' codec .*; removed, it is fetched "):
        text.fetch(tmp_path)


def test_unigram_by_hand():
    # four letters and the unseen c: (2+1)/7, (2+1)/7, (0+1)/7
    assert baselines.unigram("abab", "abc") == pytest.approx(
        -(2 * math.log2(3 / 7) + math.log2(1 / 7)) / 3
    )


def test_bigram_by_hand():
    # train "aab": a twice, b once, two kinds; behind a: a once, b once
    empty = 1 / 2
    a, b = (2 + 2 * empty) / (3 + 2), (1 + 2 * empty) / (3 + 2)
    behind_a = (1 + 2 * b) / (2 + 2)
    assert baselines.ngram("aab", "ab", order=2) == pytest.approx(
        -(math.log2(a) + math.log2(behind_a)) / 2
    )


def test_chances_sum_to_one():
    """The last character of every continuation, by the difference of two texts' bits."""
    train, before = "abracadabra" * 3 + "xyz", "abrac"
    letters = sorted(set(train))
    known = baselines.ngram(train, before) * len(before)
    chances = [
        2 ** (known - baselines.ngram(train, before + c) * (len(before) + 1)) for c in letters
    ]
    assert sum(chances) == pytest.approx(1)


def test_more_context_tells_more():
    pattern = "".join(itertools.islice(itertools.cycle(string.ascii_lowercase), 600))
    assert baselines.ngram(pattern, pattern) < 0.2 < baselines.unigram(pattern, pattern)
