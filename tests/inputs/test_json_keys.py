"""Keys of JSON files: values of another type are refused with file, key and what they must be."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxspec.inputs.checked import ConfigError, prefix_errors
from jaxspec.inputs.json_keys import JsonObject, join_names, read_json

KEYS = JsonObject(
    {
        "size": 3,
        "rate": 0.5,
        "on": False,
        "name": "x",
        "names": ["a"],
        "ids": [1, 2],
        "part": {"size": 4},
        "none": None,
    },
    "a.json",
)


def test_values_of_the_right_type_are_given_and_null_is_absent() -> None:
    assert (KEYS.get_int("size"), KEYS.get_int("none", 7), KEYS.get_int("absent", 8)) == (3, 7, 8)
    assert (KEYS.get_float("rate"), KEYS.get_float("size"), KEYS.get_float("none", 2.0)) == (
        0.5,
        3.0,
        2.0,
    )
    assert (KEYS.get_bool("on", True), KEYS.get_bool("none", True)) == (False, True)
    assert (
        KEYS.get_string("name"),
        KEYS.get_strings("names"),
        KEYS.get_strings("none"),
        KEYS.get_ints("ids"),
    ) == (
        "x",
        ["a"],
        [],
        [1, 2],
    )
    assert (KEYS.get_object("part").get_int("size"), KEYS.get_object("none").content) == (4, {})
    assert (KEYS.has_key("size"), KEYS.has_key("none"), KEYS.has_key("absent")) == (
        True,
        False,
        False,
    )


WHOLE, NUMBER = "a whole number from 1 to 2,147,483,647", "a positive number"


@pytest.mark.parametrize(
    ("read", "bad", "wanted"),
    [
        (JsonObject.get_int, ["64", 64.0, 0, -1, True, [64], {}, 2**31, float("nan")], WHOLE),
        (
            JsonObject.get_float,
            ["1", 0, -1.5, True, [1], float("inf"), float("nan"), 10**400],
            NUMBER,
        ),
        (lambda keys, key: keys.get_bool(key, True), ["false", 0, [], {}], "true or false"),
        (JsonObject.get_string, [1, ["x"], {}, True], "a string"),
        (JsonObject.get_strings, ["x", [1], {"a": 1}, 3], "a list of strings"),
        (JsonObject.get_ints, ["1", 1, [1.0], [True], [None]], "a list of whole numbers"),
        (JsonObject.get_object, [[], "x", 3, True], "an object or null"),
    ],
)
def test_values_of_another_type_are_refused_with_file_and_key(
    read: Callable[[JsonObject, str], Any], bad: list[Any], wanted: str
) -> None:
    for value in bad:
        with pytest.raises(
            ConfigError, match=r"^folder/config\.json: size is .*; it must be "
        ) as error:
            read(JsonObject({"size": value}, "folder/config.json"), "size")
        assert str(error.value).endswith(f"it must be {wanted}")
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 200


def test_an_absent_key_without_a_default_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^a\.json: no key 'none'; add it"):
        KEYS.get_int("none")
    with pytest.raises(ConfigError, match=r"^a\.json, part: no key 'absent'"):
        KEYS.get_object("part").get_string("absent")


@pytest.mark.parametrize(
    "text",
    ["{", "[1]", "3", '"x"', "null", "", "[" * 100_000, '{"a":' * 100_000, "\xff", "9" * 5000],
)
def test_a_file_that_holds_no_object_is_named_in_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"download the file again$") as error:
        read_json(file)
    assert str(error.value).startswith(str(file))
    assert "\n" not in str(error.value)
    file.write_text(json.dumps({"a": 1}))
    assert read_json(file) == {"a": 1}


def test_a_number_too_long_for_python_is_called_that(tmp_path: Path) -> None:
    """And no function of Python's is advised."""
    (tmp_path / "config.json").write_text('{"a": ' + "9" * 5000 + "}")
    with pytest.raises(
        ConfigError,
        match=r"config\.json: not valid JSON \(a whole number of thousands of digits\); download",
    ):
        read_json(tmp_path / "config.json")


def test_names_of_others_are_shown_in_one_printable_line() -> None:
    assert (
        join_names(["a", "b\n\x1b[31m", "\ud800", "c" * 999, "e", "f", "g"])
        == f"a, b\\n\\x1b[31m, \\ud800, {'c' * 300}..., e and 2 more"
    )
    assert (join_names([]), join_names(iter("ab"), "; ")) == ("", "a; b")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_regular_file_is_not_read(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "config.json")
    with pytest.raises(
        ConfigError, match=rf"^{tmp_path}/config\.json: not a regular file; give .*"
    ):
        read_json(tmp_path / "config.json")


def test_a_file_is_blamed_once() -> None:
    with pytest.raises(ConfigError, match=r"^a\.json: size is 0$"), prefix_errors("a.json"):
        raise ConfigError("size is 0")
    with pytest.raises(ConfigError, match=r"^a\.json: size is 0$"), prefix_errors("a.json"):
        raise ConfigError("a.json: size is 0")
