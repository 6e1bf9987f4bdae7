"""Options that XLA gets for all programs of a process."""

import os

import pytest

from jaxspec.compiled.compiler import FLAGS_VARIABLE, set_xla_flags


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("", "--xla_one=true --xla_two=7"),
        ("--xla_two=3", "--xla_one=true --xla_two=7 --xla_two=3"),
        ("flags.txt", "flags.txt"),
    ],
)
def test_the_users_flags_win(given: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of two equal flags counts, and a file of flags stays the user's own."""
    monkeypatch.setenv(FLAGS_VARIABLE, given)
    set_xla_flags({"xla_one": True, "xla_two": "7"})
    assert os.environ[FLAGS_VARIABLE] == wanted
    set_xla_flags({"xla_one": True, "xla_two": "7"})
    assert os.environ[FLAGS_VARIABLE] == wanted, "a second start adds nothing"
