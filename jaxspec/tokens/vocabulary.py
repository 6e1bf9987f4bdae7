"""Whether two tokenizers give their ids to the same tokens."""

from pathlib import Path

import tokenizers

from jaxspec.inputs.checked import ConfigError, first_line, require
from jaxspec.inputs.json_keys import listed

TOKENIZER = "tokenizer.json"


def check_same_tokens(policy: Path, draft: Path) -> None:
    """Raises ConfigError if an id stands for another word in a draft's tokenizer than in its
    policy's.

    Special tokens may differ, and either may have more tokens: texts are the policy's.
    """
    ours, special = _read(policy)
    theirs, theirs_special = _read(draft)
    differing = [
        f"{number} ({ours[number]!r}, {theirs[number]!r})"
        for number in sorted(ours.keys() & theirs.keys() - special - theirs_special)
        if ours[number] != theirs[number]
    ]
    require(
        not differing,
        f"{draft / TOKENIZER} has other tokens than the policy's {policy / TOKENIZER}, for"
        f" {len(differing)} ids: {listed(differing)}; choose a draft that shares the policy's"
        " tokenizer",
    )


def _read(folder: Path) -> tuple[dict[int, str], set[int]]:
    """Tokens by their ids, and the ids of those that were added to the vocabulary."""
    file = folder / TOKENIZER
    try:
        read = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no class of its own
        raise ConfigError(f"{file}: {first_line(error)}; download the file again") from error
    words = {number: token for token, number in read.get_vocab(with_added_tokens=True).items()}
    return words, {*read.get_added_tokens_decoder()}
