"""Every setting is refused in one sentence.

Mutants tried and seen red: `/v1` kept in the root, the key shown, the URL's scheme not checked, a
login kept in the root, shown in a refusal or not unquoted, no upper bound of the long prompt.
"""

from __future__ import annotations

import re

import pytest

from ftruntime.bench.settings import StallSettings

URL = "http://127.0.0.1:1919"


@pytest.mark.parametrize(
    ("given", "root"),
    [(URL, URL), (URL + "/", URL), (URL + "/v1", URL), (URL + "/v1/", URL),
     ("https://host/api/v1", "https://host/api"), ("http://v1", "http://v1")],
)  # fmt: skip
def test_the_root_of_a_url(given, root):
    assert StallSettings(base_url=given).root == root


def test_the_defaults_are_the_experiment_of_the_simulator():
    settings = StallSettings(base_url=URL)
    found = (settings.victims, settings.victim_tokens, settings.attacker_tokens)
    assert (*found, settings.attack_after) == (1, 700, 200_019, 6.0)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("base_url", None, "--base-url is missing, expected the URL of a server"),
        ("base_url", "localhost:1919", "--base-url is localhost:1919, expected the URL of"),
        ("base_url", "ftp://host", "--base-url is ftp://host, expected the URL"),
        ("base_url", "http://", "--base-url is http://, expected the URL"),
        ("base_url", "http://host:99999", "--base-url is http://host:99999, expected the URL"),
        ("base_url", "http://host/?a=1", "--base-url is http://host/?a=1, expected the URL"),
        ("base_url", "http://u:pw@h:0", "--base-url is http://***@h:0, expected the URL"),
        ("base_url", "http://u:pw/x@h", "--base-url is http://***@h, expected the URL"),
        ("base_url", "u:pw@h", "--base-url is ***@h, expected the URL"),
        ("base_url", "http://u:pw@h?" + 999 * "x", "--base-url is http://***@h?xx"),
        ("base_url", "http://ho\nst", "--base-url is 'http://ho\\nst', expected the URL"),
        ("victims", 0, "--victims is 0, expected an integer in [1, 1024] (nearest: 1)"),
        ("victim_tokens", 1, "--victim-tokens is 1, expected an integer >= 2 (nearest: 2)"),
        ("attacker_tokens", 0, "--attacker-tokens is 0, expected an integer in [1, 1e+07]"),
        ("attacker_tokens", 10**12, "--attacker-tokens is 1000000000000, expected an integer in ["),
        ("attack_after", -1, "--attack-after is -1, expected a number >= 0"),
        ("timeout_s", 0, "--timeout-s is 0, expected a number > 0"),
        ("timeout_s", float("nan"), "--timeout-s is nan, expected a number > 0"),
        ("endpoint", "chats", "--endpoint is chats, expected one of completions, chat (nearest"),
        ("model", "", "--model is '', expected a non-empty string"),
        ("api_key", "kéy", "--api-key is ***, expected printable ASCII characters"),
    ],
)  # fmt: skip
def test_a_bad_setting_is_one_sentence(name, value, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        StallSettings(**{"base_url": URL, name: value})
    assert "\n" not in str(caught.value)
    assert "pw" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("given", "root", "login"),
    [("http://u:p%40w@h:1/v1", "http://h:1", ("u", "p@w")), ("http://u@h", "http://h", ("u", "")),
     ("http://:p@h", "http://h", ("", "p")), ("http://@h", "http://h", None), (URL, URL, None)],
)  # fmt: skip
def test_a_login_is_no_part_of_the_root(given, root, login):
    settings = StallSettings(base_url=given)
    assert (settings.root, settings.login) == (root, login)


def test_the_key_is_not_shown():
    assert "s3cret" not in repr(StallSettings(base_url=URL, api_key="s3cret"))
