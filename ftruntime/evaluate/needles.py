"""Needles: a name with a number early in a text, asked for behind many tokens of it. No torch."""

from __future__ import annotations

from typing import Final

NAMES: Final = (
    "Abner", "Ahaziah", "Amasa", "Asahel", "Baruch", "Benaiah", "Boaz", "Caleb", "Eleazar",
    "Eliakim", "Gedaliah", "Gideon", "Hanani", "Hilkiah", "Huldah", "Ishmael", "Jehoiada",
    "Jephthah", "Jethro", "Joab", "Jotham", "Lemuel", "Manoah", "Mephibosheth", "Micaiah",
    "Mordecai", "Naaman", "Nabal", "Obadiah", "Orpah", "Phinehas", "Rahab", "Shaphan", "Shimei",
    "Tamar", "Uriah", "Vashti", "Zadok", "Zebulun", "Zipporah",
)  # fmt: skip
LOW: Final = 10
HIGH: Final = 99
"""Numbers have two digits."""


def statement(name: str, number: int) -> str:
    """The line that is hidden."""
    return f"The number of {name} is {number}.\n"


def question(name: str) -> str:
    """What stands before the answer."""
    return f"What is the number of {name}? The number of {name} is"


def answer(number: int) -> str:
    """What should come behind it."""
    return f" {number}"
