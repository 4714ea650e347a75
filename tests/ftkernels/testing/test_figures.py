"""The file of committed figures: what is wrong with it is one sentence, whatever it is.

Mutants run, each noticed: fields unchecked, unknown fields let be, NaN and infinity as numbers,
booleans as counts, another card let be, launches of a case gathered from two places, the second of
two equal names taken.
"""

from __future__ import annotations

import json

import pytest

from ftkernels.testing import figures

LAUNCH = {
    "op": "rms_norm", "case": "flash-t1", "kernel": "_rms_norm_kernel", "registers": 40,
    "spill_bytes": 0, "shared_bytes": 1024, "warps_per_sm": 24, "mma": {}, "copies": 0,
    "wide_share": 1.0, "issue_per_kmac": None, "ceiling_tflops": None, "ceiling_gb_per_s": 900.0,
    "us": 0.6, "bound": "issue",
}  # fmt: skip


def _read(path, *launches, **head):
    """What is read of launches; `...` as a value leaves a field out."""
    head = {"triton": "3.7.1", "arch": 89, "launches": list(launches), **head}
    kept = [_without(x) if isinstance(x, dict) else x for x in (head, *launches)]
    if isinstance(kept[0].get("launches"), list):
        kept[0]["launches"] = kept[1:]
    path.write_text(json.dumps(kept[0]))
    return figures.read(path)


def _without(values):
    return {name: value for name, value in values.items() if value is not ...}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "contract.json"


def test_launches_come_in_order_by_op_and_case(path):
    second, other = {**LAUNCH, "kernel": "_k"}, {**LAUNCH, "case": "flash-t8", "mma": {"QMMA": 3}}
    triton, launches = _read(path, LAUNCH, second, other)
    assert triton == "3.7.1"
    assert launches == {
        ("rms_norm", "flash-t1"): [LAUNCH, second], ("rms_norm", "flash-t8"): [other],
    }  # fmt: skip
    assert _read(path) == ("3.7.1", {})


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("us", float("nan"), "NaN, expected a number above 0"),
        ("us", float("inf"), "Infinity, expected a number above 0"),
        ("us", 0, "0, expected a number above 0"),
        ("us", None, "null, expected a number above 0"),
        ("us", ..., "missing, expected a number above 0"),
        ("ceiling_gb_per_s", -1.5, "-1.5, expected a number above 0"),
        ("issue_per_kmac", float("nan"), "NaN, expected a number above 0, or null"),
        ("ceiling_tflops", "165", '"165", expected a number above 0, or null'),
        ("ceiling_tflops", ..., "missing, expected a number above 0, or null"),
        ("wide_share", 1.01, "1.01, expected a share from 0 to 1"),
        ("wide_share", float("nan"), "NaN, expected a share from 0 to 1"),
        ("registers", True, "true, expected a whole number, at least 0"),
        ("registers", 40.0, "40.0, expected a whole number, at least 0"),
        ("spill_bytes", -8, "-8, expected a whole number, at least 0"),
        ("shared_bytes", "0", '"0", expected a whole number, at least 0'),
        ("warps_per_sm", None, "null, expected a whole number, at least 0"),
        ("copies", ..., "missing, expected a whole number, at least 0"),
        ("mma", ..., "missing, expected the number of each matrix instruction"),
        ("mma", [], "[], expected the number of each matrix instruction"),
        ("mma", {"QMMA": 0}, '{"QMMA": 0}, expected the number of each matrix instruction'),
        ("mma", {"QMMA": 1.5}, '{"QMMA": 1.5}, expected the number of each matrix instruction'),
        ("kernel", "", '"", expected a name'),
        ("bound", 3, "3, expected a name"),
        ("speed", 3, "3, expected no such field"),
        ("speed", "x" * 100, '"' + "x" * 56 + "..., expected no such field"),
    ],
    ids=str,
)
def test_a_field_that_is_wrong_is_named(field, value, told, path):
    with pytest.raises(ValueError) as error:
        _read(path, LAUNCH, {**LAUNCH, "case": "flash-t8", field: value})
    assert str(error.value) == f"contract: {field} of rms_norm flash-t8 is {told}"


@pytest.mark.parametrize("field", list(LAUNCH))
def test_no_field_may_be_missing(field, path):
    with pytest.raises(ValueError, match=rf"^contract: {field} of .* is missing, expected "):
        _read(path, {**LAUNCH, field: ...})


@pytest.mark.parametrize(
    ("head", "told"),
    [
        ({"arch": 90}, "arch of the file is 90, expected 89"),
        ({"arch": ...}, "arch of the file is missing, expected 89"),
        ({"arch": 89.0}, "arch of the file is 89.0, expected 89"),
        ({"triton": None}, "triton of the file is null, expected a version of Triton"),
        ({"launches": {}}, "launches of the file is {}, expected an array"),
        ({"launches": ...}, "launches of the file is missing, expected an array"),
        ({"date": "x"}, 'date of the file is "x", expected no such field'),
    ],
    ids=str,
)
def test_a_head_that_is_wrong_is_named(head, told, path):
    with pytest.raises(ValueError) as error:
        _read(path, LAUNCH, **head)
    assert str(error.value) == f"contract: {told}"


def test_a_launch_without_a_name_is_told_by_its_place(path):
    with pytest.raises(ValueError, match=r"^contract: case of launch 2 is missing, expected"):
        _read(path, LAUNCH, {**LAUNCH, "case": ...})
    with pytest.raises(ValueError, match=r"^contract: launch 1 is 7, expected a JSON object$"):
        _read(path, 7)


def test_a_case_that_stands_in_two_places_is_refused(path):
    with pytest.raises(ValueError, match=r"^contract: case rms_norm flash-t1 stands in two places"):
        _read(path, LAUNCH, {**LAUNCH, "case": "flash-t8"}, LAUNCH)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", r"contract\.json is unreadable \(.*\), expected committed figures$"),
        ("{", r"contract\.json is unreadable \(.*\), expected committed figures$"),
        ("[" * 100_000, r"contract\.json is unreadable \(.*\), expected committed figures$"),
        ('{"arch": 89, "arch": 90}', r"\(arch is given twice in one object\), expected committed"),
        ("[]", r"contract\.json is \[\], expected a JSON object$"),
        ("3", r"contract\.json is 3, expected a JSON object$"),
    ],
    ids=["empty", "cut", "deep", "twins", "list", "number"],
)
def test_a_file_that_is_no_object_is_one_sentence(text, told, path):
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"^contract: .*{told}"):
        figures.read(path)


def test_a_missing_file_is_one_sentence(path):
    with pytest.raises(ValueError, match=r"^contract: .* is unreadable \(.*No such file.*\), exp"):
        figures.read(path)
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(ValueError, match=r"^contract: .* is unreadable \(.*\), expected"):
        figures.read(path)
